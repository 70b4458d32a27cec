"""What is known about a code object, kept as long as the code object lives."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import CodeType
from typing import Generic, TypeVar

__all__ = ["PerCode"]

T = TypeVar("T")


class PerCode(Generic[T]):
    """A value per code object.

    By identity: code objects of different files may compare equal. Threads may ask at once; then a
    value may be made twice, and one of the two is kept.

    Args:
        make: gives the value of a code object that is asked for the first time.
    """

    def __init__(self, make: Callable[[CodeType], T]) -> None:
        self._make = make
        self._entries: dict[int, tuple[weakref.ref[CodeType], T]] = {}

    def __call__(self, code: CodeType) -> T:
        """Return the value of a code object."""
        entry = self._entries.get(id(code))
        if entry is None or entry[0]() is not code:
            key, entries = id(code), self._entries
            dropped = weakref.ref(code, lambda _: entries.pop(key, None))
            entry = entries[key] = (dropped, self._make(code))
        return entry[1]
