"""Values that a recorded forward has kept of locations which blocks only read.

A forward need not stand still for a block that only reads: the values are copied as the forward
passes, and the block has them afterwards, one after the other and without waiting for each. A
block that writes all the same has the step's forward run again, see ``Tapping``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from midstream.interleaving.events import Event
from midstream.interleaving.locations import Location
from midstream.interleaving.neutral import NEUTRAL
from midstream.interleaving.run import Run

if TYPE_CHECKING:
    from midstream.interleaving.interleaver import Interleaver
    from midstream.interleaving.served import Served

Offer = tuple[Location, Any]
"""A location that the forward has passed, and the value it had there."""


class Offers:
    """Gives blocks what was kept of the forward so far.

    Args:
        interleaver: the model's steps.
    """

    def __init__(self, interleaver: Interleaver):
        self._interleaver = interleaver
        self._values: dict[Location, Any] = {}
        self._events: dict[Location, Event] = {}

    def serve(self, offers: Sequence[Offer], *, in_turns: bool) -> None:
        """Let blocks read, and caches record, what the forward had at some locations.

        Args:
            offers: in the order of the forward, which has passed all of them.
            in_turns: whether a request has several blocks. One may write what the other is to
                read, so that they have to take turns at each location.
        """
        if in_turns:
            self._serve_in_turns(offers)
            return
        at = self._interleaver
        for location, value in offers:  # of a module that is called again, the first call counts
            self._values.setdefault(location, value)
        try:
            self._serve(at.take_waiting(self._values))
        finally:
            self._values = {}
            self._events.clear()
        for location, value in () if at.tapping.has_missed else offers:
            at.pass_by(location, value)

    def _serve_in_turns(self, offers: Iterable[Offer]) -> None:
        at = self._interleaver
        for location, value in offers:
            at.serve(location, value)
            if at.tapping.is_late(location):
                return

    def _serve(self, runs: Sequence[Run]) -> None:
        """Each block on its own: until it waits for what is not here, or ends."""
        at = self._interleaver
        start = at.order.position
        with NEUTRAL if all(run.plain for run in runs) else nullcontext():
            for run in runs:
                at.order.position = start
                if not at.tapping.has_missed:
                    self._serve_one(run)
                at.after(run)

    def _serve_one(self, run: Run) -> None:
        plainly = run.plain and NEUTRAL.entered
        try:
            while not run.done and run.wanted is not None and run.wanted in self._values:
                self._give(run, run.wanted)
                run.offers = self if plainly else None
                run.resume_plainly() if plainly else run.resume()
                run.offers = None  # what a block does when a write of its own is refused is rare
                self._take_back(run)
                if self._interleaver.tapping.has_missed:
                    return
        finally:
            run.offers = run.served = run.place = None

    def give(self, run: Run, location: Location) -> Served | None:
        """What a block that is executing asks for, if it can have it without waiting.

        It cannot if it has changed what it was given before: that has to be seen to first.
        """
        order = self._interleaver.order
        if (
            location not in self._values
            or order.places[location] <= order.position
            or (run.served is not None and run.served.is_changed)
        ):
            return None
        return self._give(run, location)

    def _give(self, run: Run, location: Location) -> Served:
        at = self._interleaver
        at.order.position, at.order.current = at.order.places[location], location
        event = self._events.get(location)
        if event is None:
            event = self._events[location] = at.event_for_all(location, self._values[location])
        run.place = location
        run.served = served = event.serve(at.rows[run], run.snapshots, location, run.log)
        return served

    def _take_back(self, run: Run) -> None:
        """See to what a block has changed in what it was given last."""
        at, served, place = self._interleaver, run.served, run.place
        if served is None or place is None or not served.is_changed:
            return
        at.serving.settle(run, served)
        at.serving.note(run, place, served)
        for _, error in served.event.flush():
            run.fail(error)
        at.tapping.again.keep(place, served.event)
        at.tapping.is_late(place)
