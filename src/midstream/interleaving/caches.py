"""What `tracer.cache()` gives: values of many modules, recorded without reading them one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

_ROOT = "model."  # paths may be written as error texts and the reference's keys show them


Values = dict[str, dict[str, list[Any]]]
"""By path, the values of each side ("output", "inputs"), one for each call."""


class Unread(Protocol):
    """What has been recorded and nobody has looked at."""

    @property
    def bytes(self) -> int:
        """How much it is."""

    def move_to(self, visits: Values) -> None:
        """Put it where it is read."""


class _Visits:
    """The field `Cache.visits`: who looks at it finds all that has been recorded."""

    def __get__(self, cache: Cache | None, kind: type[Cache]) -> Values:
        if cache is None or "visits" not in cache.__dict__:
            raise AttributeError("visits")
        visits: Values = cache.__dict__["visits"]
        unread: Unread | None = cache.__dict__.get("_unread")
        if unread is not None:
            unread.move_to(visits)
        return visits

    def __set__(self, cache: Cache, visits: Values) -> None:
        cache.__dict__["visits"] = visits


@dataclass(eq=False)
class Cache:
    """The recorded values of a request, by module.

    ``cache["model.layers.3.mlp"].output`` and ``cache.model.layers[3].mlp.output`` are the same
    value. A module that was called once has the value itself; called several times, as in several
    steps, it has a list of them. Keys are the paths of the modules that were called, in the order
    in which they first returned.

    Attributes:
        visits: by path, the values of each side, one for each call.
        aliases: further names of recorded modules and of those they are in, by path.
    """

    visits: _Visits = _Visits()  # no default: it stays what the attribute is
    aliases: dict[str, str] = field(default_factory=dict)

    def _follow(self, unread: Unread) -> None:
        """Take in what is recorded when somebody looks."""
        self.__dict__["_unread"] = unread

    @property
    def unread_bytes(self) -> int:
        """In the engine: how much has been recorded and nobody has looked at."""
        unread: Unread | None = self.__dict__.get("_unread")
        return 0 if unread is None else unread.bytes

    def __getstate__(self) -> dict[str, Any]:
        return {"visits": self.visits, "aliases": self.aliases}

    def keys(self) -> list[str]:
        """Paths of the recorded modules."""
        return list(self.visits)

    def values(self) -> list[CachedModule]:
        """The recorded modules."""
        return [self[path] for path in self.visits]

    def items(self) -> list[tuple[str, CachedModule]]:
        """The recorded modules with their paths."""
        return [(path, self[path]) for path in self.visits]

    def __len__(self) -> int:
        return len(self.visits)

    def __iter__(self) -> Iterator[str]:
        return iter(self.visits)

    def __contains__(self, path: object) -> bool:
        wanted = _path_of(path)
        return wanted is not None and self._find(wanted, self.visits.__contains__) is not None

    def __getitem__(self, path: Any) -> CachedModule:
        """The values of one module.

        Args:
            path: its dotted path, or the module itself.

        Raises:
            KeyError: it was not recorded.
        """
        wanted = _path_of(path)
        if wanted is None:
            raise TypeError(f"A cache is read by a module's path; got {type(path).__name__}.")
        found = self._find(wanted, self.visits.__contains__)
        if found is None:
            raise KeyError(f"'{wanted}' was not recorded. Recorded were: {_short(self.keys())}.")
        return CachedModule(self, found)

    def __getattr__(self, name: str) -> CachedModule:
        if name.startswith("_") or "visits" not in self.__dict__:
            raise AttributeError(name)
        return self._below("", name)

    def _below(self, path: str, name: str) -> CachedModule:
        wanted = f"{path}.{name}" if path else name
        found = self._find(wanted, self._leads_on)
        if found is None:
            raise AttributeError(f"'{wanted}' was not recorded, nor anything inside it.")
        return CachedModule(self, found)

    def _leads_on(self, path: str) -> bool:
        return not path or any(key == path or key.startswith(f"{path}.") for key in self.visits)

    def _find(self, path: str, known: Callable[[str], bool]) -> str | None:
        """The path as it was recorded; None if it is not ``known``."""
        for written in (path, path.removeprefix(_ROOT), *([""] if path == "model" else [])):
            found = self._without_aliases(written)
            if known(found):
                return found
        return None

    def _without_aliases(self, path: str) -> str:
        parts = path.split(".")
        for count in range(len(parts), 0, -1):
            named = self.aliases.get(".".join(parts[:count]))
            if named is not None:
                return self._without_aliases(".".join([named, *parts[count:]]))
        return path

    def __repr__(self) -> str:
        return f"Cache({_short(self.keys())})"


class CachedModule:
    """One module in a cache. Its attributes are what was recorded inside it."""

    def __init__(self, cache: Cache, path: str):
        self._cache, self._path = cache, path

    @property
    def path(self) -> str:
        """Dotted path of the module."""
        return self._path

    @property
    def output(self) -> Any:
        """What the module returned after all edits; a list of it if it was called several times.

        Raises:
            KeyError: it was not recorded.
        """
        return _one_or_all(self._recorded("output", "include_output=True"))

    @property
    def inputs(self) -> Any:
        """What it was called with, ``(args, kwargs)``, after all edits; a list as ``output``.

        Raises:
            KeyError: it was not recorded.
        """
        return _one_or_all(self._recorded("inputs", "include_inputs=True"))

    @property
    def input(self) -> Any:
        """The first argument, positional or keyword; None if there is none. A list as ``output``.

        Raises:
            KeyError: it was not recorded.
        """
        calls = self._recorded("inputs", "include_inputs=True")
        return _one_or_all([next(iter((*args, *kwargs.values())), None) for args, kwargs in calls])

    def _recorded(self, side: str, argument: str) -> list[Any]:
        sides = self._cache.visits.get(self._path)
        if sides is None:
            raise KeyError(f"'{self._path}' was not recorded, only modules inside it were.")
        if side not in sides:
            raise KeyError(
                f"The {side} of '{self._path}' was not recorded: `tracer.cache({argument})`."
            )
        return sides[side]

    def __getattr__(self, name: str) -> CachedModule:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._cache._below(self._path, name)

    def __getitem__(self, index: int | str) -> CachedModule:
        name = str(index)
        if isinstance(index, int) and index < 0:
            prefix = f"{self._path}." if self._path else ""
            below = [key.removeprefix(prefix) for key in self._cache if key.startswith(prefix)]
            numbers = [int(key.split(".")[0]) for key in below if key.split(".")[0].isdigit()]
            name = str(max(numbers, default=-1) + 1 + index)
        try:
            return self._cache._below(self._path, name)
        except AttributeError as error:
            raise KeyError(str(error)) from None

    def __repr__(self) -> str:
        return f"CachedModule('{self._path or 'model'}')"


def _path_of(module: Any) -> str | None:
    path = module if isinstance(module, str) else getattr(module, "path", None)
    return path if isinstance(path, str) else None


def _one_or_all(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else values


def _short(paths: list[str], most: int = 8) -> str:
    shown = ", ".join(paths[:most]) or "nothing"
    return f"{shown}, ... ({len(paths)})" if len(paths) > most else shown
