"""Ranks that run the same blocks say to each other how far these are.

After blocks have executed, all ranks tell each other how each of them stands: whether it failed,
and what it waits for. A block that stands differently on one rank fails on all, so that at every
later place all ranks know alike who waits there. Nothing that takes all ranks can then be begun by
some of them only.

A block itself can begin such a thing, by calling a module. It says so before; a rank whose block
has ended meanwhile answers that it has, and does so until all ranks' blocks are through.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from midstream.errors import MidstreamError
from midstream.interleaving.run import Run

_THROUGH = 1 << 62  # behind all that a block may begin
_CALLS = 20  # bits of the number of a block's calls


class Group(Protocol):
    """The ranks, as they reach each other. Every method has to be called on all of them."""

    rank: int
    size: int

    def words(self, mine: list[int]) -> list[list[int]]:
        """Give all ranks some numbers; all ranks', in their order."""

    def objects(self, mine: Any) -> list[Any]:
        """Give all ranks plain data; all ranks', in their order."""

    def pieces(self, mine: torch.Tensor, room: torch.Tensor) -> list[torch.Tensor]:
        """Give all ranks a tensor of the same shape; all ranks', in their order, in ``room``."""

    def room(self, mine: torch.Tensor) -> torch.Tensor:
        """Memory for what all ranks have of a tensor."""


class Standing(NamedTuple):
    """How a block stands on one rank.

    Attributes:
        failed: why; empty if it has not.
        digest: of what it waits for, and of how it has ended.
        alone: whether it failed only because it has elsewhere.
    """

    failed: str
    digest: int
    alone: bool = False


class _LeftAloneError(MidstreamError):
    """What a block meets where another rank's, which should be there too, is not."""


class Agreement:
    """What the ranks' blocks agree on.

    Args:
        group: the ranks.
        further: more of what must be alike, of one block; it has a `repr` of values only.
    """

    def __init__(self, group: Group, further: Callable[[Run], Any] = lambda run: None):
        self._group, self._further = group, further
        self._places: dict[Run, int] = {}
        self._counts: dict[Run, int] = {}
        self._ending = False

    def begin(self, runs: Sequence[Run]) -> None:
        """Some blocks are going to execute: the plain ones after the others, as `serving` does."""
        order = sorted(runs, key=lambda run: run.plain)
        self._places = {run: place for place, run in enumerate(order)}
        self._counts = dict.fromkeys(order, 0)

    def meet(self, run: Run, digest: int) -> None:
        """Wait until this block is at the same place on all ranks.

        Args:
            digest: of what it is going to do there.

        Raises:
            MidstreamError: on another rank it has failed, or does something else.
        """
        if self._ending or run not in self._places:
            raise MidstreamError("A block that is being ended cannot call the model's modules.")
        self._counts[run] += 1
        place = (self._places[run] << _CALLS) + self._counts[run]
        rows = self._join(place, digest)
        if any(row != [place, digest] for row in rows):
            raise _LeftAloneError(
                "On another rank this block has failed, or gone another way: it cannot call a "
                "module that all ranks run together."
            )

    def all_say(self, mine: int) -> list[int]:
        """One number of each rank, where all of them are at the same place."""
        return [row[0] for row in self._group.words([mine, 0])]

    def agree(self, runs: Sequence[Run]) -> list[Run]:
        """Wait until the blocks have executed on all ranks; those that do not stand alike fail.

        Returns:
            The blocks that have been ended on this rank.
        """
        standings = [self._standing(run) for run in runs]
        alike = [(bool(each.failed), each.digest, each.alone) for each in standings]
        digest = zlib.crc32(repr(alike).encode())
        rows = self._join(_THROUGH, digest)
        self._places, self._counts = {}, {}
        if all(row == rows[0] for row in rows):
            return []
        found = self._group.objects([tuple(standing) for standing in standings])
        self._ending = True
        try:
            return [
                run
                for number, run in enumerate(runs)
                if self._settle(run, [Standing(*each[number]) for each in found])
            ]
        finally:
            self._ending = False

    def _join(self, place: int, digest: int) -> list[list[int]]:
        """Say where this rank's block is, until no rank is behind."""
        while True:
            rows = self._group.words([place, digest])
            if min(row[0] for row in rows) == place:
                return rows

    def _standing(self, run: Run) -> Standing:
        failed = ""
        if run.error is not None:
            failed = f"{type(run.error).__name__}: {run.error}"[:2000]
        stopped = run.stopped.keeps_token if run.stopped is not None else None
        wanted = None if run.done else run.wanted
        state = run.done, stopped, wanted, run.awaited, run.waits_for_result, self._further(run)
        digest = 0 if failed else zlib.crc32(repr(state).encode())
        return Standing(failed, digest, isinstance(run.error, _LeftAloneError))

    def _settle(self, run: Run, standings: Sequence[Standing]) -> bool:
        """Let a block fail here if it has elsewhere, or stands elsewhere; whether it is ended."""
        mine = standings[self._group.rank]
        error = _failed(standings)
        if mine.failed and not (mine.alone and error is not None):
            return False
        if all(each == mine for each in standings):
            return False
        error = error or MidstreamError(_APART)
        if run.done:
            run.error = error
        else:
            run.fail(error)
        return True


def _failed(standings: Sequence[Standing]) -> MidstreamError | None:
    for rank, standing in enumerate(standings):
        if standing.failed and not standing.alone:
            return MidstreamError(f"The block failed on rank {rank}: {standing.failed}")
    return None


_APART = (
    "The block went different ways on the ranks of this engine. All of them run it, on the same "
    "values, so it must not depend on the time, the process, or random numbers of another source "
    "than torch, numpy and random."
)
