"""Blocks built from a grammar, and what PyTorch hooks say each of them must give."""
