"""Tests of HuggingFace models in this process."""
