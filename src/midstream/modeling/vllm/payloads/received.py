"""The memory of a message in the client, and the tensors in it."""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, repeat
from operator import mul
from typing import Any

import numpy as np
import torch

from midstream.errors import TransportError
from midstream.modeling.vllm.payloads import nodes, segments


class Bytes:
    """The buffers of a message; maps its segments.

    Attributes:
        message: the message.
        mirrors: the segments to which other messages refer too.
        sheets: those that have been read, by their number.

    Raises:
        TransportError: A segment is gone, or the bytes are not as many as the message says.
    """

    def __init__(self, message: nodes.Message) -> None:
        self.message = message
        self.mirrors = _mirrors(message)
        self.sheets: dict[int, Any] = {}
        self._sizes = message.sizes
        self._places: list[tuple[memoryview, int]] = []
        if message.parts:
            counts = [part.count for part in message.parts]
            memories = segments.open_all([part.segment for part in message.parts])
        else:
            counts, memories = [len(message.sizes)], [memoryview(message.inline)]
        fits = min(message.sizes + counts, default=0) >= 0 and sum(counts) == len(message.sizes)
        for memory, count in zip(memories, counts, strict=True):
            first = len(self._places)
            offsets, total = segments.layout(message.sizes[first : first + count])
            fits = fits and memory.nbytes == total
            self._places += ((memory, offset) for offset in offsets)
        if not fits:
            raise TransportError("a message of the engine does not hold the bytes it announces")

    def at(self, index: int) -> tuple[memoryview, int, int]:
        """Return the memory that holds a buffer, its offset in it and its size, in bytes."""
        if not 0 <= index < len(self._sizes):
            raise TransportError(f"buffer {index} of {len(self._sizes)}")
        return *self._places[index], self._sizes[index]


def _mirrors(message: nodes.Message) -> list[memoryview]:
    """Map the segments to which other messages refer too."""
    try:
        return segments.open_all(message.mirrors, shared=True)
    finally:
        _READERS.note([handle.name for handle in message.mirrors], message.over)


class _Readers:
    """How many messages have been read that refer to a segment; the last removes its name.

    Messages of one engine may be read in another order than they were written in.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._read: Counter[str] = Counter()
        self._all: dict[str, int] = {}

    def note(self, names: Iterable[str], over: Mapping[str, int]) -> None:
        """Take in what a message says."""
        names = list(names)
        with self._lock:
            self._read.update(names)
            self._all.update(over)
            known = [name for name in {*names, *over} if name in self._all]
            done = [name for name in known if self._read[name] >= self._all[name]]
            for name in done:
                del self._read[name], self._all[name]
        segments.remove(done)


_READERS = _Readers()


def rows_at(rows: nodes.Rows, memories: Sequence[memoryview]) -> list[torch.Tensor]:
    """Make the tensors of a record that lie in segments of several messages; see `tensors_at`.

    Raises:
        TransportError: there is nothing where they are said to lie.
    """
    made: list[torch.Tensor] = []
    for kind, segment, offset, step, count in _lines(rows, len(memories)):
        name, shape = rows.kinds[kind]
        dtype = nodes.DTYPES[name]
        try:
            made += tensors_at(memories[segment], offset, dtype, (count, *shape), step)
        except (ValueError, TypeError) as error:  # numpy looks whether they are inside
            raise TransportError(f"tensors outside of their segment: {error}") from None
    return made


def _lines(rows: nodes.Rows, segments: int) -> list[list[int]]:
    table = np.frombuffer(rows.lines, np.int64).reshape(-1, 5)
    known = (table[:, :2] >= 0) & (table[:, :2] < [len(rows.kinds), segments])
    if not known.all() or (table[:, 4] < 1).any():
        raise TransportError("a message of the engine has tensors in no segment of its own")
    return table.tolist()


def tensors_at(
    memory: memoryview,
    offset: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    step: int | None = None,
) -> list[torch.Tensor]:
    """Make tensors that lie in memory, which is not copied.

    Each has a storage of its own. Slices of one tensor would be made in half the time, but each
    of them would be pickled and saved to a file with all the others, and a write into one would
    count, for autograd, as one into each.

    Args:
        memory: what holds them, writable.
        offset: where the first begins, in bytes.
        dtype: their dtype.
        shape: their number, at least 1, and then the shape of each, no length of which is 0.
        step: bytes from one to the next; they lie one behind the other if it is left out.

    Raises:
        ValueError: they do not lie in it.
    """
    rows = np.ndarray(shape, numpy_dtype(dtype), memory, offset, _strides(shape, dtype, step))
    each = rows if len(shape) > 1 else (rows[i, ...] for i in range(len(rows)))
    found = list(map(torch.from_numpy, each))
    if found[0].dtype is dtype:
        return found
    return list(map(torch.Tensor.view, found, repeat(dtype)))


def _strides(
    shape: tuple[int, ...], dtype: torch.dtype, step: int | None
) -> tuple[int, ...] | None:
    if step is None:
        return None
    inner = accumulate(reversed(shape[2:]), mul, initial=dtype.itemsize)
    return (step, *reversed(list(inner)[: len(shape) - 1]))


@functools.cache
def numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """NumPy's dtype of the same name, or integers of that size where it has none."""
    try:
        return torch.empty(0, dtype=dtype, device="cpu").numpy().dtype
    except TypeError:
        return np.dtype(f"u{dtype.itemsize}")
