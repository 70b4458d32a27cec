"""Forwards of an interleaver that run as recorded ones, see ``Tapped``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from midstream.interleaving.again import Again
from midstream.interleaving.copies import Rows
from midstream.interleaving.locations import Location
from midstream.interleaving.offers import Offers
from midstream.interleaving.routes import Guess, Needs, Routes
from midstream.interleaving.run import Run

if TYPE_CHECKING:
    from midstream.interleaving.interleaver import Interleaver
    from midstream.interleaving.tapped import Tapped


class Tapping:
    """Guesses what a step's blocks will ask for, and sees when they ask for something else.

    Args:
        interleaver: the model's steps.

    Attributes:
        routes: which locations the codes of blocks visit.
        again: what is needed to run the step's forward once more.
        offers: gives blocks what recorded forwards have kept.
        has_missed: whether a block waits for what the recorded forward does not offer, or has
            written where it has no break.
    """

    def __init__(self, interleaver: Interleaver):
        self._interleaver = interleaver
        self.routes, self.again = Routes(), Again()
        self.offers = Offers(interleaver)
        self.has_missed = False
        self._late: set[Location] = set()
        self._tapped: Tapped | None = None

    def guess(self, runs: Sequence[Run]) -> Guess | None:
        """What the blocks of the step that has begun will need of its forward, as far as known.

        Returns:
            None if there is no guess, or if it is wrong already.
        """
        if self._interleaver.runs_anew:
            return None
        if self._interleaver.declared is not None:
            return self._interleaver.declared.guess
        if not self._interleaver.order.known:
            return None
        guess = self.routes.guess({run.code for run in runs})
        if guess is None or not guess.needs.locations.issuperset(self._interleaver.wanted()):
            return None
        return guess

    def learn(self, runs: Sequence[Run]) -> None:
        """Take in what blocks have visited. Their first step is another matter, and comes once."""
        if self._interleaver.declared is not None:
            return
        behind = self._interleaver.order.is_behind_forward
        for run in runs:
            if run.visit and run.code is not None and run.stood != run.visit:
                route = self.routes.of(run.code)
                route.learn(run.visited, run.replaced, run.wrote, behind)

    @contextmanager
    def phase(
        self,
        tapped: Tapped,
        rows: Mapping[Run, Rows],
        sizes: Sequence[int],
        inputs: Iterable[Any] = (),
    ) -> Iterator[None]:
        """The forward of a step as a recorded one; as ``Interleaver.phase`` otherwise.

        Args:
            inputs: what the forward is called with, to begin with the same if it runs again.

        Left by ``Missed``, the forward has to be run again: after ``run_again``, by hand.
        """
        self._tapped, self.has_missed, tapped.live = tapped, False, True
        self._late.clear()
        if tapped.complete:  # it shows the order of the breaks alone
            self._interleaver.order.learning = False
        else:
            self.again.begin(inputs)
        try:
            with self._interleaver.phase(rows, sizes, logged=True, by_hand=False):
                yield
        finally:
            self._tapped, tapped.live, self.again.keeping = None, False, False

    @property
    def is_under_way(self) -> bool:
        """Whether a recorded forward runs."""
        return self._tapped is not None

    def covers(self, location: Location) -> bool:
        """Whether a recorded forward runs that has a break for a location."""
        return self._tapped is not None and location in self._tapped.needs.locations

    def expect(self, location: Location) -> None:
        """Note that a block waits for a location in a recorded forward."""
        tapped = self._tapped
        if tapped is None or tapped.complete:
            return
        if location not in tapped.needs.locations:
            behind = self._interleaver.order.is_behind_forward(location)
            self.has_missed = self.has_missed or not behind

    def is_late(self, location: Location) -> bool:
        """Whether a block has written at a location that the recorded forward has passed."""
        if self.again.has_writes_at(location):
            self._late.add(location)
            self.has_missed = True
        return self.has_missed

    def run_again(self, needs: Needs) -> None:
        """Begin the step's forward once more, for the blocks that wait.

        Args:
            needs: what the recorded forward had to offer.
        """
        waiting = self._interleaver.waiting_in_forward()
        missed = [
            *(run for location, runs in waiting if location not in needs.locations for run in runs),
            *(run for run in self._interleaver.runs if not self._late.isdisjoint(run.wrote)),
        ]
        for code in {run.code for run in missed}:
            self.routes.count_wrong(code)
        self._interleaver.begin_again(self.again.run())

    def end(self) -> None:
        """The step has ended."""
        self.again.clear()
