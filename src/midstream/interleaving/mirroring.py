"""Copies for blocks that are sent home while later steps run: what is told to who sends them.

The layers above decide what is worth it; here they are told what there is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch

from midstream.interleaving.copies import Copies
from midstream.interleaving.locations import Location

if TYPE_CHECKING:
    from midstream.interleaving.run import Run


class Spot(Protocol):
    """Where a copy goes."""

    @property
    def mirror(self) -> Any:
        """What it is part of."""

    @property
    def index(self) -> int:
        """Its place there."""

    def load(self) -> torch.Tensor | None:
        """What has got there, on the CPU, for the caller alone; waits. None if nothing has."""


class Mirroring(Protocol):
    """Sends copies home that blocks will save."""

    def made(self, location: Location, leaf: int, copies: Copies) -> None:
        """Take in that rows of a value have been copied for blocks, which are about to get them.

        Args:
            leaf: which tensor of the value it is.
        """

    @property
    def takes_caches(self) -> bool:
        """Whether recorded tensors that are wanted on the CPU may stay where they are.

        It is told of them, and brings them there.
        """

    def keep(
        self, copy: torch.Tensor, runs: frozenset[Run], arrived: Callable[[], None]
    ) -> Spot | None:
        """Send a recorded tensor home; None if it cannot be.

        Args:
            runs: the blocks that record it.
            arrived: called when it is there, so that the copy need not be kept.
        """

    def end_step(self) -> None:
        """The step has ended."""
