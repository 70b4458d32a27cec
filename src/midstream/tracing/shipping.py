"""A block as bytes: its source as text, its values pickled one by one."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import msgspec

from midstream._version import __version__
from midstream.errors import DataVersionError, TransportError
from midstream.tracing.block import Block, Code
from midstream.tracing.pickling import BY_VALUE_LOCK, Pickler, Unpickler, pruned

__all__ = ["Opened", "Written", "dumps", "loads", "write"]

_FUNCTION = "<function>"


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


class _Rest(msgspec.Struct, array_like=True):
    names: list[str]
    payload: bytes


def _versions() -> _Versions:
    return _Versions(__version__, f"{sys.version_info.major}.{sys.version_info.minor}")


_here = lru_cache(maxsize=1)(_versions)


class Written(msgspec.Struct):
    """A block whose values have been pickled, one after the other.

    A later value may refer to what an earlier one holds, so a part is read after those before it.

    Attributes:
        code: the block's source; None for the function form.
        listing: see ``Block``.
        names: names of the values.
        parts: the pickled values, in the order of the names.
    """

    code: Code | None
    listing: Code | None
    names: list[str]
    parts: list[bytes]

    def head(self, count: int | None = None) -> bytes:
        """The block with its first `count` values, with all of them by default; for ``loads``."""
        names, payload = self.names[:count], b"".join(self.parts[:count])
        here = _here()
        return msgspec.msgpack.encode(
            _Envelope(here.midstream, here.python, self.code, self.listing, names, payload)
        )

    def rest(self, count: int) -> bytes:
        """The values behind the first `count`; never empty bytes, which would be a block alone."""
        names, payload = self.names[count:], b"".join(self.parts[count:])
        return msgspec.msgpack.encode(_Rest(names, payload))


def write(
    block: Block,
    persistent_id: Callable[[Any], str | None],
    lasting: Mapping[str, Any] = MappingProxyType({}),
) -> Written:
    """Pickle the values of a block.

    Args:
        block: what to send.
        persistent_id: gives a text for objects that the other side has of its own (modules of the
            model, the tracer), None for all others.
        lasting: values, by name, that other blocks are likely to share; those come first.

    Raises:
        TransportError: a value cannot be pickled; the text names its variable.
    """
    values = block.values if block.function is None else {_FUNCTION: block.function}
    names = sorted(values, key=lambda name: (lasting.get(name, lasting) is not values[name], name))
    stream, ends = io.BytesIO(), [0]
    with BY_VALUE_LOCK:
        pickler = Pickler(stream, persistent_id)
        try:
            for name in names:
                _dump(pickler, name, pruned(block, name, values[name]))
                ends.append(stream.tell())
        finally:
            pickler.release_modules()
    payload = stream.getvalue()
    parts = [payload[start:end] for start, end in pairwise(ends)]
    return Written(block.code, block.listing, names, parts)


def dumps(block: Block, persistent_id: Callable[[Any], str | None]) -> bytes:
    """Return a block as bytes: ``write`` in one piece."""
    return write(block, persistent_id).head()


class Opened:
    """What `Written.head` wrote, of which any number of blocks can be made.

    Raises:
        DataVersionError: (a `ValueError`) another version of midstream or Python wrote it, or it is
            no block.
    """

    def __init__(self, data: bytes) -> None:
        self._envelope = _decode(data)

    def block(self, persistent_load: Callable[[str], Any], rest: bytes = b"") -> Block:
        """Return the block, with values of its own at every call.

        Args:
            persistent_load: gives the object for a text that `persistent_id` gave.
            rest: what `Written.rest` wrote.

        Raises:
            TransportError: a value cannot be rebuilt here; the text names its variable.
        """
        envelope = self._envelope
        names, payload = envelope.names, envelope.payload
        if rest:
            more = msgspec.msgpack.decode(rest, type=_Rest)
            names, payload = [*names, *more.names], payload + more.payload
        unpickler = Unpickler(io.BytesIO(payload), persistent_load)
        values = {name: _load(unpickler, name) for name in names}
        if envelope.code is None:
            return Block(function=values[_FUNCTION], listing=envelope.listing)
        return Block(code=envelope.code, values=values)


def loads(data: bytes, persistent_load: Callable[[str], Any]) -> Block:
    """Return the block that `dumps` wrote, see ``Opened``."""
    return Opened(data).block(persistent_load)


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


def _dump(pickler: Pickler, name: str, value: Any) -> None:
    try:
        pickler.dump(value)
    except Exception as error:  # a value's own pickling may raise anything
        raise TransportError(
            f"{_described(name, type(value))} cannot travel to the engine: {_reason(error)}. "
            "Compute what the block needs of it before the `with`, or make it inside the block"
        ) from error


def _load(unpickler: Unpickler, name: str) -> Any:
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
