"""Tests of engines with several ranks."""
