"""Tests of operations inside forwards."""
