"""How one tensor is divided among ranks: put together in one GPU's order, and cut again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch


class Part(NamedTuple):
    """A stretch of a rank's tensor that is divided by itself, such as the keys of a fused q/k/v.

    Attributes:
        size: what one rank has of it, along the divided axis.
        copies: how many neighbouring ranks have the same, as where there are more ranks than heads
            of keys.
    """

    size: int
    copies: int = 1


@dataclass(frozen=True)
class Layout:
    """A tensor of which each rank has a piece.

    Attributes:
        parts: in the order in which a rank has them: ``[q | k | v]`` of its heads.
        ranks: among how many it is divided.
        axis: along which axis, counted from the last: -1.
    """

    parts: tuple[Part, ...]
    ranks: int
    axis: int = -1

    @cached_property
    def local(self) -> int:
        """Size of a piece along the axis."""
        return sum(part.size for part in self.parts)

    @cached_property
    def size(self) -> int:
        """Size of the whole along the axis."""
        return sum(part.size * self.ranks // part.copies for part in self.parts)

    @cached_property
    def starts(self) -> list[int]:
        """Where each part begins in a piece."""
        return [0, *accumulate(part.size for part in self.parts)][:-1]

    def fits(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor can be a piece."""
        return tensor.dim() >= -self.axis and tensor.shape[self.axis] == self.local

    def join(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        """The whole, from all ranks' pieces in their order."""
        found = [
            piece.narrow(self.axis, start, part.size)
            for start, part in zip(self.starts, self.parts, strict=True)
            for piece in pieces[:: part.copies]
        ]
        return torch.cat(found, dim=self.axis)

    def piece(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """What a rank has of a whole."""
        found, start = [], 0
        for part in self.parts:
            at = start + rank // part.copies * part.size
            found.append(whole.narrow(self.axis, at, part.size))
            start += part.size * self.ranks // part.copies
        return found[0] if len(found) == 1 else torch.cat(found, dim=self.axis)

    def between(self, start: int, stop: int) -> Layout | None:
        """The layout of a stretch of a piece; None if it cuts a part in two."""
        ends = [at + part.size for at, part in zip(self.starts, self.parts, strict=True)]
        if len(self.parts) == 1 or start not in self.starts or stop not in ends:
            return self if (start, stop) == (0, self.local) else None
        low, high = self.starts.index(start), ends.index(stop) + 1
        return Layout(self.parts[low:high], self.ranks, self.axis) if low < high else None

    def in_heads(self, size: int) -> Layout | None:
        """The layout where the axis is split into heads of a size; None if it does not divide."""
        if any(part.size % size for part in self.parts):
            return None
        parts = tuple(part._replace(size=part.size // size) for part in self.parts)
        return Layout(parts, self.ranks, self.axis - 1)


@dataclass(frozen=True)
class Sum:
    """A tensor that is the sum of what the ranks have, as before an all-reduce.

    What is written stands on the first rank, and zeros on the others: their sum is exact.
    """

    def fits(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor can be a piece."""
        return tensor.is_floating_point()

    def join(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        """The whole, from all ranks' pieces."""
        total = pieces[0].clone()
        for piece in pieces[1:]:
            total += piece
        return total

    def piece(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """What a rank has of a whole."""
        return whole if rank == 0 else torch.zeros_like(whole)


@dataclass(frozen=True)
class Same:
    """A tensor that all ranks have whole."""


SAME = Same()
Divided = Layout | Sum
Kind = Layout | Sum | Same
