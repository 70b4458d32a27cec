"""What blocks wrote, written again where a request's rows are run anew.

A request that is preempted loses its KV cache. When it comes back its rows are run again, and those
that its blocks had changed have to be changed again: the cache would come out unedited otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from midstream.interleaving.copies import Rows, cut
from midstream.interleaving.events import Event
from midstream.interleaving.locations import SKIP, Location


class Write(NamedTuple):
    """One leaf of one location as a block left it, for some of its request's positions."""

    leaf: int
    first: int
    rows: int
    value: torch.Tensor
    replace: bool


class WriteLog:
    """What one block wrote in the forwards of its request.

    Args:
        limit: bytes it may hold. A log that would hold more holds nothing.

    Attributes:
        first: position, in the request, of the first row that the block is served in this step.
        full: whether something is missing in it.
        writes: by location, in the order in which they were made.
    """

    def __init__(self, limit: float = math.inf):
        self.limit, self._size = limit, 0
        self.first = 0
        self.full = False
        self.writes: dict[Location, list[Write]] = {}

    def add(
        self, location: Location, leaf: int, rows: int, value: torch.Tensor, *, replace: bool
    ) -> None:
        """Keep what was written.

        Args:
            location: where; what stands for a skipped module's output is kept as its output.
            leaf: which of the location's leaves.
            rows: how many rows it has.
            value: what nobody changes any more.
            replace: see ``Event.put``.
        """
        if self.full:
            return
        self._size += value.nbytes
        if self._size > self.limit:
            self.full = True
            self.writes.clear()
            return
        kept = Write(leaf, self.first, rows, value, replace)
        if location.side == SKIP:
            location = location._replace(side="output")
        self.writes.setdefault(location, []).append(kept)

    def __bool__(self) -> bool:
        return self.full or bool(self.writes)


@dataclass
class Replay:
    """Rows of one request that a step runs anew, and what a block of it once wrote there.

    Attributes:
        first, stop: positions, in the request, of the rows.
        failed: called with what went wrong, if something does.
        start: the step's row that the first of them is; known once the batch is laid out.
    """

    log: WriteLog
    first: int
    stop: int
    failed: Callable[[Exception], None]
    start: int = 0

    @property
    def rows(self) -> Rows:
        """The rows of the step."""
        return Rows(self.start, self.start + self.stop - self.first)

    def apply(self, event: Event, location: Location) -> None:
        """Write again what was written at a location."""
        for write in self.log.writes.get(location, ()):
            low, high = max(write.first, self.first), min(write.first + write.rows, self.stop)
            if low >= high:
                continue
            axis = event.axis(write.leaf)
            value = cut(write.value, axis, low - write.first, high - write.first)
            at = self.start - self.first
            event.put(write.leaf, Rows(at + low, at + high), value, replace=write.replace)


class Replays:
    """The replays of one step."""

    def __init__(self) -> None:
        self._all: Sequence[Replay] = ()
        self._locations: frozenset[Location] = frozenset()

    def begin(self, replays: Sequence[Replay]) -> Iterable[Location]:
        """Begin a step; the locations where something is to be written again."""
        self._all = replays
        self._locations = frozenset(place for replay in replays for place in replay.log.writes)
        return self._locations

    def __contains__(self, location: Location) -> bool:
        return location in self._locations

    def __bool__(self) -> bool:
        return bool(self._locations)

    def apply(
        self,
        location: Location,
        value: Any,
        make: Callable[[Location, Any, Sequence[Rows], Sequence[int]], Event],
        sizes: Sequence[int],
    ) -> Any:
        """A value with what is to be written again in it.

        Args:
            make: gives the event of a location's value for the rows of some requests.
            sizes: as in ``Event``.
        """
        for replay in self._all:
            if location not in replay.log.writes:
                continue
            try:
                event = make(location, value, [replay.rows], sizes)
                replay.apply(event, location)
                value = event.result()
            except Exception as error:  # noqa: BLE001  # it is that request's, never the engine's
                replay.failed(error)
        return value
