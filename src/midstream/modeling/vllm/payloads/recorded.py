"""Caches in the client: values are made of the message's memory when somebody looks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from midstream.errors import TransportError
from midstream.interleaving.caches import Values
from midstream.modeling.vllm.payloads import nodes
from midstream.modeling.vllm.payloads.received import numpy_dtype

Fill = Callable[[nodes.Node, Sequence[torch.Tensor]], Any]
"""Makes a value of its form and the tensors in it."""


class Placed(NamedTuple):
    """A recorded tensor of several requests, and its numbers where they lie."""

    leaf: nodes.LeafNode
    dtype: torch.dtype
    numbers: np.ndarray[Any, Any]

    @classmethod
    def at(cls, leaf: nodes.LeafNode, memory: memoryview, offset: int) -> Placed:
        """Find it in a segment.

        Raises:
            TransportError: it is not there.
        """
        dtype = nodes.DTYPES[leaf.dtype]
        try:
            return cls(leaf, dtype, np.ndarray(leaf.shape, numpy_dtype(dtype), memory, offset))
        except (ValueError, TypeError) as error:  # numpy looks whether it is inside
            raise TransportError(f"a cache's tensor outside of its segment: {error}") from None


class ReadSheet:
    """The recorded calls of several requests.

    Args:
        node: of the message.
        layouts, memories: of the message.

    Attributes:
        calls: with the tensors of each.
        numbers: their places among all calls.

    Raises:
        TransportError: the message makes no sense.
    """

    def __init__(
        self,
        node: nodes.SheetNode,
        layouts: Sequence[Sequence[nodes.CallNode]],
        memories: Sequence[memoryview],
    ):
        if not 0 <= node.layout < len(layouts):
            raise TransportError(f"layout {node.layout} of {len(layouts)}")
        self._segments = np.frombuffer(node.segments, np.int32).tolist()
        self._offsets = np.frombuffer(node.offsets, np.int64).tolist()
        self.numbers = np.frombuffer(node.numbers, np.int64).tolist()
        calls = layouts[node.layout]
        count = sum(len(call.leaves) for call in calls)
        if not (len(self.numbers) == len(calls) and len(self._segments) == count):
            raise TransportError("a sheet of a cache has not the calls that its layout has")
        if self._segments and not 0 <= min(self._segments) <= max(self._segments) < len(memories):
            raise TransportError("a sheet of a cache lies in no segment of its message")
        self.calls = list(self._placed(calls, memories))

    def _placed(self, calls: Sequence[nodes.CallNode], memories: Sequence[memoryview]) -> Any:
        at = iter(zip(self._segments, self._offsets, strict=True))
        for call in calls:
            places = [(leaf, *next(at)) for leaf in call.leaves]
            yield call, [Placed.at(leaf, memories[s], offset) for leaf, s, offset in places]


class Part(NamedTuple):
    """One cache's part of a sheet: some of its calls, and its rows of their tensors."""

    sheet: ReadSheet
    first: int
    stop: int
    start: int
    rows: int


class Unmade:
    """What a cache has that nobody has looked at."""

    def __init__(self, parts: list[Part], fill: Fill):
        self._parts, self._fill = parts, fill

    @property
    def bytes(self) -> int:
        """How much it is."""
        leaves = (
            (placed.leaf, part.rows)
            for part in self._parts
            for _, found in part.sheet.calls[part.first : part.stop]
            for placed in found
        )
        return sum(_bytes(leaf, rows) for leaf, rows in leaves)

    def move_to(self, visits: Values) -> None:
        """Make the values, and put them where they are read.

        Raises:
            TransportError: the message made no sense.
        """
        parts, self._parts = self._parts, []
        found = [
            (part.sheet.numbers[index], part, *part.sheet.calls[index])
            for part in parts
            for index in range(part.first, part.stop)
        ]
        found.sort(key=lambda each: each[0])  # a step may have filled several sheets
        with torch.inference_mode(False):
            for _, part, call, leaves in found:
                value = self._value(call.form, [_tensor(leaf, part) for leaf in leaves])
                side = "inputs" if call.side == "input" else call.side
                visits.setdefault(call.path, {}).setdefault(side, []).append(value)

    def _value(self, form: nodes.Node, tensors: list[torch.Tensor]) -> Any:
        """A value of its form; the two that most have take no reading of nodes."""
        if type(form) is nodes.Leaf:
            return tensors[0]
        return tuple(tensors) if _is_flat(form) else self._fill(form, tensors)


def _is_flat(form: nodes.Node) -> bool:
    """Whether it is of a tuple of tensors alone."""
    if not isinstance(form, nodes.Made) or form.kind != "tuple":
        return False
    return all(type(part) is nodes.Leaf for part in form.parts)


def _bytes(leaf: nodes.LeafNode, rows: int) -> int:
    shape = [rows if axis == leaf.axis else size for axis, size in enumerate(leaf.shape)]
    return math.prod(shape) * nodes.DTYPES[leaf.dtype].itemsize


def _tensor(placed: Placed, part: Part) -> torch.Tensor:
    """One request's rows; a copy of its own of what is all requests'."""
    leaf, dtype, numbers = placed
    if leaf.axis >= 0:
        rows = slice(part.start, part.start + part.rows)
        numbers = numbers[rows] if leaf.axis == 0 else numbers[:, rows]
        if numbers.shape[leaf.axis] != part.rows:
            raise TransportError(f"rows {rows} of a cache's tensor of {leaf.shape}")
    found = torch.from_numpy(numbers)
    found = found if found.dtype is dtype else found.view(dtype)
    return found if leaf.axis >= 0 else found.clone()
