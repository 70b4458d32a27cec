"""Tests of the models users hold."""
