"""The same block in two dialects: as users write it, and as a generator for the oracle."""

from __future__ import annotations

from typing import Protocol

Lines = list[str]


class Dialect(Protocol):
    """How a block says what it wants."""

    def read(self, path: str, side: str) -> str:
        """An expression."""

    def write(self, path: str, side: str, value: str) -> str:
        """A statement."""

    def skip(self, path: str, value: str) -> str:
        """A statement."""

    def call(self, path: str, value: str) -> str:
        """An expression."""

    def save(self, name: str, value: str) -> str:
        """A statement."""

    def stop(self) -> str:
        """A statement."""

    def steps(self, which: str, body: Lines) -> Lines:
        """A loop over steps, ``which`` as between the brackets of `tracer.iter`."""


class Midstream:
    """As users write it.

    Args:
        saves: how a value is kept: ``{0}`` is the name, ``{1}`` the value.
    """

    def __init__(self, saves: str):
        self._saves = saves

    def _node(self, path: str) -> str:
        parts = ["model", *(path.split(".") if path else ())]
        return "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in parts)[1:]

    def read(self, path: str, side: str) -> str:
        return f"{self._node(path)}.{side}"

    def write(self, path: str, side: str, value: str) -> str:
        return f"{self._node(path)}.{side} = {value}"

    def skip(self, path: str, value: str) -> str:
        return f"{self._node(path)}.skip({value})"

    def call(self, path: str, value: str) -> str:
        return f"{self._node(path)}({value})"

    def save(self, name: str, value: str) -> str:
        return self._saves.format(name, value)

    def stop(self) -> str:
        return "tracer.stop()"

    def steps(self, which: str, body: Lines) -> Lines:
        return [f"for step in tracer.iter[{which}]:", *indented(body)]


class Generator:
    """As a generator that yields the requests of ``hooked``."""

    def read(self, path: str, side: str) -> str:
        return f"(yield Read({path!r}, {side!r}))"

    def write(self, path: str, side: str, value: str) -> str:
        return f"yield Write({path!r}, {side!r}, {value})"

    def skip(self, path: str, value: str) -> str:
        return f"yield Skip({path!r}, {value})"

    def call(self, path: str, value: str) -> str:
        return f"(yield Call({path!r}, ({value},)))"

    def save(self, name: str, value: str) -> str:
        return f"kept[{name!r}] = {value}"

    def stop(self) -> str:
        return "yield Stop()"

    def steps(self, which: str, body: Lines) -> Lines:
        return [
            f"for step in numbers({which!r}, (yield Now())):",
            "    if not (yield Enter(step)):",
            "        break",
            *indented(body),
        ]


def numbers(which: str, now: int) -> list[int]:
    """The steps that `tracer.iter[which]` stands for, at most 20 of them."""
    if ":" not in which:
        found = eval(which)
        return found if isinstance(found, list) else [found]
    start, _, stop = which.partition(":")
    begin = int(start) if start else now
    return list(range(begin, int(stop) if stop else begin + 20))


def indented(lines: Lines) -> Lines:
    """One level deeper; nothing is `pass`."""
    return [f"    {line}" for line in lines or ["pass"]]
