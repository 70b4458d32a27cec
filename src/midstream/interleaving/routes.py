"""Which locations the code of a block visits, learned from the steps that have run.

A step can be prepared for the locations that will be visited in it only if they are known before.
Blocks of the same code mostly visit the same ones; what is learned here is a guess, and whoever
prepares for it has to serve a block that does something else right, too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from midstream.interleaving.locations import SKIP, Location

MOST_CODES = 1024
"""Blocks whose locations are remembered; the one that was seen longest ago is forgotten."""
MOST_WRONG = 8
"""Wrong guesses after which there are no more for a code."""
MOST_PATIENCE = 8
"""Steps that a guess is waited for at most, see ``Guess``."""

Leaf = tuple[Location, int]
"""A tensor of the value at a location, by its place among them."""


class Needs(NamedTuple):
    """What a prepared forward has to offer.

    Attributes:
        locations: where blocks meet it.
        replaced: leaves of their values in whose place a block gives the model another tensor.
        written: where a block changes what the model goes on with; elsewhere it only reads.
    """

    locations: frozenset[Location] = frozenset()
    replaced: frozenset[Leaf] = frozenset()
    written: frozenset[Location] = frozenset()

    def within(self, other: Needs) -> bool:
        """Whether another one's offer is enough."""
        return all(mine <= its for mine, its in zip(self, other, strict=True))

    def joined(self, other: Needs) -> Needs:
        """What both need."""
        return Needs(
            self.locations | other.locations,
            self.replaced | other.replaced,
            self.written | other.written,
        )


class Guess(NamedTuple):
    """What blocks will need, as far as known.

    Attributes:
        patience: how many steps have to need it before it is worth preparing for. It is 1 for code
            that has always gone to the same places, and more the oftener there were others, as in
            a sweep over layers.
    """

    needs: Needs
    patience: int = 1


@dataclass
class Route:
    """What one code has needed so far.

    Attributes:
        seen: all locations it has met, those behind the forward too.
        preparable: whether all that it needs can be prepared.
        changes: how often it has needed something new.
        wrong: how often it has asked for something else than what was prepared.
    """

    needs: Needs = field(default_factory=Needs)
    seen: set[Location] = field(default_factory=set)
    preparable: bool = True
    changes: int = 0
    wrong: int = 0

    @property
    def known(self) -> bool:
        """Whether there is a guess, and it is worth preparing for."""
        return self.preparable and self.wrong < MOST_WRONG

    def learn(
        self,
        visited: Set[Location],
        replaced: Set[Leaf],
        written: Set[Location],
        is_behind: Callable[[Location], bool],
    ) -> None:
        """Take in what was met in a step.

        Args:
            is_behind: whether a location is behind the forward, where nothing is prepared.
        """
        before = self.needs
        if (
            self.seen >= visited
            and before.replaced >= replaced
            and before.written >= {location for location in written if not is_behind(location)}
        ):
            return
        self.seen |= visited
        self.needs = Needs(
            frozenset(location for location in self.seen if not is_behind(location)),
            before.replaced.union(replaced),
            before.written.union(place for place in written if not is_behind(place)),
        )
        self.changes += self.needs != before
        self.preparable = all(map(_can_be_prepared, self.needs.locations))


class Routes:
    """The routes of the codes that an engine has run."""

    def __init__(self) -> None:
        self._by_code: OrderedDict[str, Route] = OrderedDict()

    def of(self, code: str) -> Route:
        """The route of a code, to learn more of it."""
        route = self._by_code.get(code)
        if route is None:
            route = self._by_code[code] = Route()
            if len(self._by_code) > MOST_CODES:
                self._by_code.popitem(last=False)
        return route

    def count_wrong(self, code: str | None) -> None:
        """Note that a block of a code has asked for something that was not prepared."""
        route = self._by_code.get(code) if code is not None else None
        if route is not None:
            route.wrong += 1

    def guess(self, codes: Collection[str | None]) -> Guess | None:
        """What to prepare for a step with blocks of these codes; None if there is no guess."""
        joined, patience = Needs(), 1
        for code in codes:
            route = self._by_code.get(code) if code is not None else None
            if code is None or route is None or not route.known:
                return None
            self._by_code.move_to_end(code)
            joined = joined.joined(route.needs)
            patience = max(patience, min(route.changes, MOST_PATIENCE))
        return Guess(joined, patience)


def _can_be_prepared(location: Location) -> bool:
    """A skip leaves its module out, and operations belong to instrumented copies of forwards."""
    return location.side != SKIP and location.within is None
