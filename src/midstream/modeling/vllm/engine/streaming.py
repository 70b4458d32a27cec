"""What blocks append to the lists they save, sent while their requests go on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Appended:
    """How much of each saved list has been sent.

    Only lists are followed, and only what is appended: an item that is changed or taken out
    afterwards has been sent as it was.

    Attributes:
        counts: how many items of each list have been sent, by its name.
    """

    def __init__(self) -> None:
        self._lists: dict[str, list[Any]] = {}
        self.counts: dict[str, int] = {}

    def begin(self, name: str, value: Any) -> None:
        """Take a list's items of now for known where it goes."""
        if type(value) is list:
            self._lists[name], self.counts[name] = value, len(value)

    def take(self, saves: Mapping[str, Any]) -> dict[str, list[Any]]:
        """The items that have come since the last call, by the name of their list."""
        found: dict[str, list[Any]] = {}
        for name, value in saves.items():
            if type(value) is not list:
                continue
            if self._lists.get(name) is not value:
                self._lists[name], self.counts[name] = value, 0
            new = value[self.counts[name] :]
            self.counts[name] = len(value)
            if new:
                found[name] = new
        return found
