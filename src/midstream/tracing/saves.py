"""Marks on values that go back to the caller, and the names they go back under."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from typing import Any, TypeVar

from midstream.errors import NotInTraceError

__all__ = ["HELPER_NAMES", "Scope", "current_scope", "helpers", "save", "scoped"]

T = TypeVar("T")

_METHOD_HELPER = "__midstream_save_method__"
_CALL_HELPER = "__midstream_save_call__"
HELPER_NAMES = (_METHOD_HELPER, _CALL_HELPER)
"""Names under which a compiled block calls `save_method` and `save_call`."""

_scope: ContextVar[Scope | None] = ContextVar("midstream_save_scope", default=None)


class Scope:
    """The saves of one running block.

    A mark belongs to an object, not to a value that compares equal to it, and a dead object's mark
    dies with it: objects that cannot be weakly referenced are kept alive instead, so an id is never
    taken for another object's. A loop that saves a tensor per step keeps the last one only.
    """

    def __init__(self) -> None:
        self._marks: dict[int, _Mark] = {}

    def mark(self, value: Any, name: str | None = None) -> None:
        """Mark `value` as saved, under the variable `name` where the source shows it."""
        mark = self._marks.get(id(value))
        if mark is None:
            mark = self._marks[id(value)] = _Mark(value, self._marks)
        if name is not None:
            mark.names.add(name)

    def collect(self, namespace: Mapping[str, Any]) -> dict[str, Any]:
        """Return the names of `namespace` whose value is a marked object.

        An object that Python shares between unrelated names (`True`, small numbers, strings) comes
        back only under the names that its save was bound to.
        """
        return {
            name: value
            for name, value in list(namespace.items())
            if name not in HELPER_NAMES and self._returns(name, value)
        }

    def _returns(self, name: str, value: Any) -> bool:
        mark = self._marks.get(id(value))
        return mark is not None and (name in mark.names or not _is_shared(value))


class _Mark:
    """One marked object: weakly held where its type allows, else strongly."""

    __slots__ = ("__weakref__", "names", "value")

    def __init__(self, value: Any, marks: dict[int, _Mark]) -> None:
        self.names: set[str] = set()
        key = id(value)
        try:
            # The callback holds only the dict, so a mark keeps neither its scope nor itself alive.
            self.value: Any = weakref.ref(value, lambda _: marks.pop(key, None))
        except TypeError:
            self.value = value


_SHARED_TYPES = (bool, float, complex, str, bytes, frozenset, type, Enum)


def _is_shared(value: Any) -> bool:
    """Whether Python, or a library, may hand the same object to unrelated names."""
    if isinstance(value, int) and not isinstance(value, bool):
        return isinstance(value, Enum) or -5 <= value <= 256
    if isinstance(value, tuple):
        return not value or all(_is_shared(item) for item in value)
    if value is None or value is Ellipsis or value is NotImplemented:
        return True
    # dtypes and devices of torch and numpy are looked up, not made: by name, to import neither.
    singleton = type(value).__module__ in ("torch", "numpy") and "type" in type(value).__name__
    return singleton or isinstance(value, _SHARED_TYPES)


def current_scope() -> Scope:
    """Return the scope of the running block.

    Raises:
        NotInTraceError: no block is running here.
    """
    scope = _scope.get()
    if scope is None:
        raise NotInTraceError(
            "save() was called outside a running block. It marks a value inside the body of "
            "`with model.trace(...)`; move the call there."
        )
    return scope


@contextmanager
def scoped(scope: Scope) -> Iterator[Scope]:
    """Make `scope` the one that `save` marks in. Each greenlet and thread has its own."""
    token = _scope.set(scope)
    try:
        yield scope
    finally:
        _scope.reset(token)


def save(value: T) -> T:
    """Mark `value` to be returned under the names that hold it when the block ends; return it.

    Containers may be filled after the call; what they hold needs no save of its own.

    Raises:
        NotInTraceError: (a `ValueError`) the call is not inside a running block.
    """
    current_scope().mark(value)
    return value


def helpers() -> dict[str, Callable[..., Any]]:
    """Return what a compiled block calls in place of `x.save()` and `save(x)`."""
    return {_METHOD_HELPER: save_method, _CALL_HELPER: save_call}


def save_method(value: Any, names: tuple[str, ...], /, *args: Any, **kwargs: Any) -> Any:
    """Do what `value.save(...)` means in a block: mark, unless `value` can save itself."""
    own = getattr(value, "save", None)
    if own is save:  # `midstream.save(x)`
        return save_call(own, names, *args, **kwargs)
    function = getattr(own, "__func__", own)
    if function is save:  # a class that has our save as its method
        return _mark(value, names)
    if own is not None and function is getattr(object, "save", None):
        return _mark(value, names)  # another library gave every object this method
    if own is not None or args or kwargs:
        return value.save(*args, **kwargs)
    return _mark(value, names)


def save_call(function: Any, names: tuple[str, ...], /, *args: Any, **kwargs: Any) -> Any:
    """Do what `save(x)` means in a block, whatever `save` is there."""
    value = function(*args, **kwargs)
    return _mark(value, names) if function is save else value


def _mark(value: T, names: Iterable[str]) -> T:
    scope = current_scope()
    scope.mark(value)
    for name in names:
        scope.mark(value, name)
    return value
