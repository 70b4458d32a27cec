"""How vLLM reads a switch in the environment."""

from __future__ import annotations


def is_on(value: str) -> bool:
    """Whether a variable's text turns on what it names: a number that is not 0, or "true"."""
    try:
        return bool(int(value))
    except ValueError:
        return value.strip().lower() == "true"
