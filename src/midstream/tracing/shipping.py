"""A block as bytes: its source as text, its values pickled one by one.

Functions and classes of the user's own modules go by value, since the process that runs the block
may be unable to import them. What is installed (the standard library, site-packages) goes by name.
"""

from __future__ import annotations

import importlib.metadata
import io
import pickle
import sys
import sysconfig
import threading
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import cloudpickle
import msgspec

from midstream._version import __version__
from midstream.errors import DataVersionError, TransportError
from midstream.tracing.block import Block, Code
from midstream.tracing.tensors import reduce_tensor

__all__ = ["dumps", "loads"]

_FUNCTION = "<function>"
_ENGINE_PACKAGES = frozenset({"midstream", "torch", "transformers", "triton", "vllm"})
"""Importable wherever a block runs, however they were installed."""


class _Versions(msgspec.Struct):
    """What is read before anything else is."""

    midstream: str
    python: str


class _Envelope(msgspec.Struct):
    midstream: str
    python: str
    code: Code | None
    listing: Code | None
    names: list[str]
    payload: bytes


def _versions() -> _Versions:
    return _Versions(__version__, f"{sys.version_info.major}.{sys.version_info.minor}")


_here = lru_cache(maxsize=1)(_versions)


def dumps(block: Block, persistent_id: Callable[[Any], str | None]) -> bytes:
    """Return a block as bytes.

    Args:
        block: what to send.
        persistent_id: gives a text for objects that the other side has of its own (modules of the
            model, the tracer), None for all others.

    Raises:
        TransportError: a value cannot be pickled; the text names its variable.
    """
    stream = io.BytesIO()
    values = dict(block.values)
    if block.function is not None:
        values = {_FUNCTION: block.function}
    with _by_value_lock:
        pickler = _Pickler(stream, persistent_id)
        try:
            for name, value in values.items():
                _dump(pickler, name, _pruned(block, name, value))
        finally:
            pickler.release_modules()
    here = _here()
    envelope = _Envelope(
        here.midstream, here.python, block.code, block.listing, list(values), stream.getvalue()
    )
    return msgspec.msgpack.encode(envelope)


def loads(data: bytes, persistent_load: Callable[[str], Any]) -> Block:
    """Return the block that `dumps` wrote, with values of its own at every call.

    Args:
        data: what `dumps` returned.
        persistent_load: gives the object for a text that `persistent_id` gave.

    Raises:
        DataVersionError: (a `ValueError`) another version of midstream or Python wrote it, or it is
            no block.
        TransportError: a value cannot be rebuilt here; the text names its variable.
    """
    envelope = _decode(data)
    unpickler = _Unpickler(io.BytesIO(envelope.payload), persistent_load)
    values = {name: _load(unpickler, name) for name in envelope.names}
    if envelope.code is None:
        return Block(function=values[_FUNCTION], listing=envelope.listing)
    return Block(code=envelope.code, values=values)


def _decode(data: bytes) -> _Envelope:
    here = _here()
    try:
        there = msgspec.msgpack.decode(data, type=_Versions)
        if there == here:
            return msgspec.msgpack.decode(data, type=_Envelope)
    except msgspec.MsgspecError as error:
        raise DataVersionError(f"these bytes are no block of midstream: {error}") from error
    raise DataVersionError(
        f"the block was written by midstream {there.midstream} on Python {there.python}; here is "
        f"midstream {here.midstream} on Python {here.python}. Write and run it with the same ones"
    )


def _dump(pickler: _Pickler, name: str, value: Any) -> None:
    try:
        pickler.dump(value)
    except Exception as error:  # a value's own pickling may raise anything
        raise TransportError(
            f"{_described(name, type(value))} cannot travel to the engine: {_reason(error)}. "
            "Compute what the block needs of it before the `with`, or make it inside the block"
        ) from error


def _load(unpickler: _Unpickler, name: str) -> Any:
    try:
        return unpickler.load()
    except Exception as error:
        raise TransportError(
            f"{_described(name)} cannot be rebuilt where the block runs: {_reason(error)}"
        ) from error


def _described(name: str, kind: type | None = None) -> str:
    what = "the block's function" if name == _FUNCTION else f"the variable `{name}`"
    return what if kind is None else f"{what} (a {kind.__module__}.{kind.__qualname__})"


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".rstrip(".")


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc] # cloudpickle has no types
    """One pickler for all values of a block, so that what two of them share is sent once."""

    def __init__(self, stream: io.BytesIO, persistent_id: Callable[[Any], str | None]) -> None:
        super().__init__(stream, protocol=5)
        self._identify = persistent_id
        self._registered: list[ModuleType] = []

    def persistent_id(self, obj: Any) -> str | None:
        return self._identify(obj)

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, _PrunedModule):
            return _module, (obj.name, obj.attributes)
        if isinstance(obj, CodeType):
            # cloudpickle leaves the file's name out, and tracebacks would not tell the user's line
            return _code, (*self.dispatch_table[CodeType](obj), obj.co_filename)
        reduced = reduce_tensor(obj)
        if reduced is not None:
            return reduced
        if isinstance(obj, FunctionType | type):
            self._send_by_value(obj.__module__)
        return super().reducer_override(obj)

    def _send_by_value(self, module_name: str | None) -> None:
        module = sys.modules.get(module_name or "")
        if module is None or module_name in cloudpickle.list_registry_pickle_by_value():
            return
        if _is_users(module):
            cloudpickle.register_pickle_by_value(module)
            self._registered.append(module)

    def release_modules(self) -> None:
        """Undo the registrations, which are the whole process's."""
        for module in self._registered:
            cloudpickle.unregister_pickle_by_value(module)


_by_value_lock = threading.RLock()


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, persistent_load: Callable[[str], Any]) -> None:
        super().__init__(stream)
        self._find = persistent_load

    def persistent_load(self, pid: str) -> Any:
        return self._find(pid)


def _is_users(module: ModuleType) -> bool:
    """Whether a module is the user's own: from a file that no installation put there."""
    file = getattr(module, "__file__", None)
    package = module.__name__.partition(".")[0]
    if not file or package in _ENGINE_PACKAGES or package in _installed_packages():
        return False
    return _is_users_file(file)


@lru_cache(maxsize=1)
def _installed_packages() -> frozenset[str]:
    """Top-level packages of all installed distributions, wherever they lie on the path."""
    return frozenset(importlib.metadata.packages_distributions())


@lru_cache(maxsize=1024)
def _is_users_file(file: str) -> bool:
    path = Path(file).resolve()
    if {"site-packages", "dist-packages"} & set(path.parts):
        return False
    installed = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
    return not any(path.is_relative_to(Path(root).resolve()) for root in installed)


def _code(make: Callable[..., CodeType], args: tuple[Any, ...], filename: str) -> CodeType:
    return make(*args).replace(co_filename=filename)


class _PrunedModule:
    """Of a user's module, the attributes that the block uses."""

    def __init__(self, name: str, attributes: dict[str, Any]) -> None:
        self.name, self.attributes = name, attributes


def _pruned(block: Block, name: str, value: Any) -> Any:
    if block.code is None or not isinstance(value, ModuleType) or not _is_users(value):
        return value
    used = block.code.compiled().attributes.get(name)
    if used is None:
        return value
    known = vars(value)
    return _PrunedModule(value.__name__, {key: known[key] for key in used if key in known})


def _module(name: str, attributes: dict[str, Any]) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(attributes)
    return module
