"""Which tensors of a record lie, unchanged, in mirrors: found for all of them at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import compress
from operator import attrgetter
from typing import Any, TypeAlias

import numpy as np
import torch

from midstream.modeling.vllm.payloads.mirrors import Mirror, Mirrors
from midstream.modeling.vllm.payloads.nodes import DTYPE_NAMES, Rows
from midstream.modeling.vllm.payloads.segments import Handle

_Array: TypeAlias = np.ndarray[Any, Any]
_TENSORS = {torch.Tensor}
_LOOKED_AT = {torch.Tensor, list, tuple, dict}


class Sources:
    """The mirrors to which one message refers.

    Args:
        mirrors: the worker's; None if there are none.

    Attributes:
        handles: their segments, in the order of their numbers.
    """

    def __init__(self, mirrors: Mirrors | None):
        self.handles: list[Handle] = []
        self._mirrors = mirrors
        self._used: list[Mirror] = []
        self._numbers: dict[int, int] = {}

    @cached_property
    def table(self) -> Table:
        """Where the copies are that records may have views of."""
        return Table(self._mirrors.live if self._mirrors is not None else [])

    def may_refer(self, sender: Any) -> bool:
        """Whether a record's tensors may be looked for."""
        return self._mirrors is not None and self._mirrors.is_trusted(sender)

    def number(self, mirror: Mirror) -> int:
        """A mirror's number in the message, -1 if its copies have not arrived; waits for them."""
        if id(mirror) not in self._numbers:
            handle = mirror.handle
            self._numbers[id(mirror)] = -1 if handle is None else len(self.handles)
            self._used.append(mirror)
            if handle is not None:
                self.handles.append(handle)
        return self._numbers[id(mirror)]

    def send(self, senders: Sequence[Any]) -> dict[str, int]:
        """Note that the message goes, with the last of some senders; see ``Mirrors.release``."""
        if self._mirrors is None:
            return {}
        for mirror in self._used:
            mirror.messages += mirror.handle is not None
        return self._mirrors.release(senders)


class Table:
    """The memory of the copies in some mirrors."""

    def __init__(self, mirrors: Sequence[Mirror]):
        self.mirrors = mirrors
        alive = [mirror.alive() for mirror in mirrors]

        def joined(arrays: list[_Array]) -> _Array:
            found = [array[mask] for array, mask in zip(arrays, alive, strict=True)]
            return np.concatenate(found) if found else np.zeros(0, np.int64)

        starts = joined([mirror.starts for mirror in mirrors])
        order = np.argsort(starts, kind="stable")
        self._starts = starts[order]
        self._ends = joined([mirror.ends for mirror in mirrors])[order]
        self._versions = joined([mirror.versions for mirror in mirrors])[order]
        self._offsets = joined([mirror.offsets[mirror.read] for mirror in mirrors])[order]
        numbers = [np.full(len(mirror.read), i) for i, mirror in enumerate(mirrors)]
        self._mirrors = joined(numbers)[order]

    def __len__(self) -> int:
        return len(self._starts)

    def find(self, starts: _Array, sizes: _Array, versions: _Array) -> tuple[_Array, _Array]:
        """Which mirror has the bytes of each of some tensors (-1: none), and where in it."""
        at = np.maximum(np.searchsorted(self._starts, starts, "right") - 1, 0)
        found = (self._starts[at] <= starts) & (starts + sizes <= self._ends[at])
        found &= (self._versions[at] == versions) & (sizes > 0)
        mirrors = np.where(found, self._mirrors[at], -1)
        return mirrors, self._offsets[at] + starts - self._starts[at]


class Places:
    """Where the tensors of one record lie in mirrors.

    Args:
        saves: what the record has; lists, tuples and dictionaries in it are looked through.
    """

    def __init__(self, saves: Mapping[str, Any], sources: Sources):
        self._tensors: list[torch.Tensor] = []
        self._slices: dict[int, range | list[int]] = {}  # which of them a container has, by its id
        self._count = [0]  # of tensors found before each
        self.rows: Rows | None = None
        if len(sources.table):
            self._collect(saves)
        if self._tensors:
            self._find(sources)

    def of(self, owner: object) -> list[int] | None:
        """By value of a container of tensors, its place in the record's rows, or -1."""
        indices = self._slices.get(id(owner))
        if self.rows is None or indices is None:
            return None
        count = self._count
        return [count[i] if count[i + 1] > count[i] else -1 for i in indices]

    def all_of(self, owner: object) -> tuple[int, int] | None:
        """Place of the first value of a container, and how many; None unless all are found."""
        indices = self._slices.get(id(owner))
        if self.rows is None or not isinstance(indices, range):
            return None
        first = self._count[indices.start]
        found = self._count[indices.stop] - first
        return (first, found) if found == len(indices) else None

    def of_tensor(self, tensor: torch.Tensor) -> int | None:
        """A tensor's place in the record's rows; None if it has none."""
        return self._by_id.get(id(tensor)) if self.rows is not None else None

    @cached_property
    def _by_id(self) -> dict[int, int]:
        pairs = zip(self._tensors, self._count, self._count[1:], strict=False)
        return {id(tensor): place for tensor, place, after in pairs if after > place}

    def _collect(self, saves: Mapping[str, Any]) -> None:
        left, seen = list(saves.values()), set[int]()
        while left:
            value = left.pop()
            if type(value) is torch.Tensor:
                self._tensors.append(value)
            elif type(value) in (list, tuple, dict) and value and id(value) not in seen:
                seen.add(id(value))
                items = list(value.values()) if type(value) is dict else value
                types = set(map(type, items))
                if types == _TENSORS:
                    end = len(self._tensors)
                    self._slices[id(value)] = range(end, end + len(items))
                    self._tensors += items
                elif not types.isdisjoint(_LOOKED_AT):
                    left += items

    def _join_same(self) -> bool:
        """Have each object there once, as it comes home once; whether one was there twice."""
        ids = list(map(id, self._tensors))
        if len(set(ids)) == len(ids):
            return False
        self._tensors = list(dict(zip(ids, self._tensors, strict=True)).values())
        index = {id(tensor): i for i, tensor in enumerate(self._tensors)}
        for owner, indices in self._slices.items():
            self._slices[owner] = [index[ids[i]] for i in indices]
        return True

    def _find(self, sources: Sources) -> None:
        starts, sizes, versions, contiguous = (
            _each(read, self._tensors)
            for read in (
                torch.Tensor.data_ptr,
                attrgetter("nbytes"),
                attrgetter("_version"),
                torch.Tensor.is_contiguous,
            )
        )
        mirrors, offsets = sources.table.find(starts, sizes, versions)
        mirrors = np.where(contiguous == 1, mirrors, -1)
        overlapping = _overlapping(mirrors, offsets, sizes)
        if len(overlapping) and self._join_same():
            self._find(sources)
            return
        mirrors[overlapping] = -1
        self._take(mirrors, offsets, sources)

    def _take(self, mirrors: _Array, offsets: _Array, sources: Sources) -> None:
        """Keep what was found in mirrors that have arrived."""
        numbers = np.full(len(sources.table.mirrors) + 1, -1)  # the last for none
        for index in np.unique(mirrors[mirrors >= 0]).tolist():
            numbers[index] = sources.number(sources.table.mirrors[index])
        segments = numbers[mirrors]
        found = segments >= 0
        if not found.any():
            return
        self._count = [0, *np.cumsum(found).tolist()]
        kinds, kind = _kinds(self._tensors, found)
        lines = _in_steps(kind, segments[found], offsets[found])
        self.rows = Rows(kinds, lines.tobytes())


def _kinds(
    tensors: Sequence[torch.Tensor], found: _Array
) -> tuple[list[tuple[str, tuple[int, ...]]], _Array]:
    """The kinds of tensors that were found, and by tensor which it is of."""
    here = tensors if found.all() else list(compress(tensors, found.tolist()))
    every = list(map(attrgetter("dtype", "shape"), here))
    numbers = {kind: number for number, kind in enumerate(dict.fromkeys(every))}
    names = [(DTYPE_NAMES[dtype], tuple(shape)) for dtype, shape in numbers]
    if len(names) == 1:
        return names, np.zeros(len(here), np.int64)
    return names, np.array([numbers[kind] for kind in every], np.int64)


def _each(read: Callable[[torch.Tensor], int], tensors: Sequence[torch.Tensor]) -> _Array:
    """What is read of each tensor; -1 where there is nothing, as the version of some."""
    try:
        return np.fromiter(map(read, tensors), np.int64, len(tensors))
    except (RuntimeError, NotImplementedError):
        return np.array([_read(read, tensor) for tensor in tensors], np.int64)


def _read(read: Callable[[torch.Tensor], int], tensor: torch.Tensor) -> int:
    try:
        return read(tensor)
    except (RuntimeError, NotImplementedError):
        return -1


def _overlapping(mirrors: _Array, offsets: _Array, sizes: _Array) -> _Array:
    """Indices of tensors that have bytes of another one: each is to come home with its own."""
    at = np.where(mirrors < 0, -(1 << 50), mirrors * (1 << 44) + offsets)
    order = np.argsort(at, kind="stable")
    ends = np.maximum.accumulate((at + sizes)[order])
    return order[1:][at[order][1:] < ends[:-1]]


def _in_steps(kinds: _Array, segments: _Array, offsets: _Array) -> _Array:
    """Neighbours of one kind in one segment, at even distances, as one line.

    Returns:
        int64 [lines, 5]: kind, segment, offset of the first, bytes to the next, number.
    """
    count = len(kinds)
    steps = np.diff(offsets)
    apart = np.ones(count, np.bool_)
    apart[1:] = (kinds[1:] != kinds[:-1]) | (segments[1:] != segments[:-1])
    apart[2:] |= (steps[1:] != steps[:-1]) & ~apart[1:-1]
    first = np.flatnonzero(apart)
    lengths = np.diff(np.append(first, count))
    stride = np.append(steps, 0)[first]
    return np.stack([kinds[first], segments[first], offsets[first], stride, lengths], 1)
