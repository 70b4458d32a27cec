"""Tests of models in the caller's own process."""
