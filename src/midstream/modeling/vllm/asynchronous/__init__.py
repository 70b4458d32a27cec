"""Traces on an event loop: vLLM's asynchronous engine, and what users hold of it."""
