"""Traces in the caller's own process: blocks beside the forwards of any PyTorch module."""
