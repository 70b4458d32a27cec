"""Rows of a step's tensors: each request's, and the copies of them that blocks are given."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from midstream.interleaving.locations import Location

if TYPE_CHECKING:
    from midstream.interleaving.replays import WriteLog


class Rows(NamedTuple):
    """Rows ``start:stop`` of a step's tensors that belong to one request."""

    start: int
    stop: int


class BatchSizes(tuple[int, ...]):
    """Sizes of a step whose rows are those of a batch, along the first axis of a tensor only."""

    __slots__ = ()


class Put(NamedTuple):
    """One leaf of a value as a block left it, for its request's rows; see ``Event.put``."""

    leaf: int
    rows: Rows
    value: torch.Tensor
    replace: bool


class Edit(NamedTuple):
    """What one block has left of one leaf, for its request's rows.

    Attributes:
        replace: see ``Event.put``.
        log: keeps it.
    """

    rows: Rows
    value: torch.Tensor
    location: Location
    replace: bool
    log: WriteLog | None


class Copies:
    """The copy of one leaf that several blocks share, each with its own rows.

    Args:
        hull: the rows from the first block's to the last one's.
        axis: over which they run.
        spans: rows of the blocks, in the step.
    """

    def __init__(self, hull: torch.Tensor, axis: int, spans: Sequence[Rows]):
        self.hull, self._axis, self._spans = hull, axis, spans
        self.storage = weakref.ref(hull.untyped_storage())
        self.row_bytes = hull.nbytes // max(1, hull.shape[axis])
        self._low = min(span.start for span in spans)
        self._parts: dict[Rows, torch.Tensor] | None = None

    @property
    def sharers(self) -> int:
        """How many blocks share it."""
        return len(self._spans)

    def rows(self, rows: Rows) -> torch.Tensor:
        """One block's rows; the same object each time."""
        if self._parts is None:
            self._parts = self._split()
        part = self._parts.get(rows)
        if part is None:
            start, stop = rows.start - self._low, rows.stop - self._low
            part = self._parts[rows] = cut(self.hull, self._axis, start, stop)
        return part

    def several(self, spans: Sequence[Rows]) -> list[torch.Tensor]:
        """The rows of some blocks, see ``rows``."""
        if self._parts is None:
            self._parts = self._split()
        found = list(map(self._parts.get, spans))
        return [
            part if part is not None else self.rows(s) for part, s in zip(found, spans, strict=True)
        ]

    def _split(self) -> dict[Rows, torch.Tensor]:
        """All blocks' rows at once, which is faster than one after the other."""
        if len(self._spans) == 1:
            return {self._spans[0]: self.hull}
        spans = sorted(set(self._spans), key=lambda span: span.start)
        if any(a.stop > b.start for a, b in pairwise(spans)):
            return {}
        places: list[int] = []
        sizes: list[int] = []
        at = spans[0].start
        for span in spans:
            if span.start > at:  # rows of others
                sizes.append(span.start - at)
            places.append(len(sizes))
            sizes.append(span.stop - span.start)
            at = span.stop
        parts = self.hull.split(sizes, self._axis)
        return {span: parts[place] for span, place in zip(spans, places, strict=True)}

    def are_all(self, edits: Sequence[Edit]) -> bool:
        """Whether edits are of all these rows, and in this copy."""
        parts = self._parts or {}
        return (
            len(edits) == len(parts) == len(self._spans)
            and sum(rows.stop - rows.start for rows in parts) == self.hull.shape[self._axis]
            and all(not edit.replace and parts.get(edit.rows) is edit.value for edit in edits)
            and all(map(self._is_here, edits))
        )

    def _is_here(self, edit: Edit) -> bool:
        """Whether an edit's tensor is still in this memory: `x.data = y` gives it other memory."""
        offset = (edit.rows.start - self._low) * self.hull.stride(self._axis)
        at = self.hull.data_ptr() + offset * self.hull.itemsize
        return edit.value.data_ptr() == at and edit.value.stride() == self.hull.stride()

    def cloned(self) -> Copies:
        """The same with memory of its own."""
        return Copies(self.hull.clone(), self._axis, self._spans)


def row_axis(leaf: Any, sizes: Sequence[int]) -> int | None:
    """The axis of a leaf that has one of the sizes, and so runs over rows; None if none does."""
    if type(leaf) is not torch.Tensor and (  # most are, and asking about parameters takes longer
        not isinstance(leaf, torch.Tensor) or isinstance(leaf, torch.nn.Parameter)
    ):
        return None
    shape = leaf.shape
    if shape and shape[0] in sizes:
        return 0
    if len(shape) < 2 or isinstance(sizes, BatchSizes):
        return None
    if shape[0] == 1 and shape[1] in sizes:
        return 1
    return None


def cut(leaf: Any, axis: int | None, start: int, stop: int) -> Any:
    """Rows of a tensor; the tensor itself where those are all it has."""
    if axis is None or (start == 0 and stop == leaf.shape[axis]):
        return leaf
    return leaf.narrow(axis, start, stop - start)


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equality that holds for NaN too."""
    return torch.equal(a, b) or torch.equal(
        a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)
    )


def counting_edits() -> AbstractContextManager[Any]:
    """Leave the inference mode a block may be in: tensors made in it count no edits."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()
