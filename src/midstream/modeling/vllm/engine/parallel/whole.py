"""One hand-over where each rank has a piece: blocks get the whole, and what they write is cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from midstream.interleaving.copies import Copies, Rows, counting_edits, cut
from midstream.interleaving.events import Event
from midstream.modeling.vllm.engine.parallel.sharding import Divided


class WholeEvent(Event):
    """The live value of one location, of whose tensors this rank has pieces.

    Args:
        value, sizes, spans, others: as in ``Event``.
        rank: this one.

    Attributes:
        wholes: by leaf, the whole tensor's rows from the first span's to the last one's, and how
            it is divided; filled by who makes the event.
    """

    def __init__(
        self, value: Any, sizes: Sequence[int], spans: Sequence[Rows], rank: int, *others: Any
    ):
        super().__init__(value, sizes, spans, *others)
        self._rank = rank
        self.wholes: dict[int, tuple[torch.Tensor, Divided]] = {}

    def rows_of(self, index: int) -> torch.Tensor:
        """The piece that is here of the rows that blocks wait for."""
        piece: torch.Tensor = cut(self.leaves[index], self.axis(index), self._low, self._high)
        return piece

    def _cut(self, index: int, rows: Rows) -> torch.Tensor:
        whole, axis = self.wholes[index][0], self.axis(index)
        found: torch.Tensor = cut(whole, axis, rows.start - self._low, rows.stop - self._low)
        return found

    def live(self, index: int, rows: Rows) -> Any:
        """A leaf's rows, whole."""
        if index not in self.wholes:
            return super().live(index, rows)
        replaced = self._replaced.get(index, {}).get(rows)
        return self._cut(index, rows) if replaced is None else replaced

    def copy(self, index: int, rows: Rows) -> Any:
        """A private copy of a leaf's rows, whole."""
        if index not in self.wholes:
            return super().copy(index, rows)
        axis, copies = self.axis(index), self._copies.get(index)
        with counting_edits():
            if axis is None:
                return self.wholes[index][0].clone()
            if copies is None:
                hull = self.wholes[index][0].clone()
                copies = self._copies[index] = Copies(hull, axis, self._spans)
        return copies.rows(rows)

    def _write(self, index: int, rows: Rows, value: torch.Tensor) -> None:
        if index not in self.wholes:
            super()._write(index, rows, value)
            return
        self._cut(index, rows).copy_(value)
        super()._write(index, rows, self._piece(index, self._cut(index, rows)))

    def _with_replaced(self, index: int) -> torch.Tensor:
        if index in self.wholes:
            pieces = {rows: self._piece(index, v) for rows, v in self._replaced[index].items()}
            self._replaced[index] = pieces
        return super()._with_replaced(index)

    def _piece(self, index: int, whole: torch.Tensor) -> torch.Tensor:
        return self.wholes[index][1].piece(whole, self._rank)
