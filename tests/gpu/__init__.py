"""Tests that need an NVIDIA GPU; run by hand with `pytest -m gpu`."""
