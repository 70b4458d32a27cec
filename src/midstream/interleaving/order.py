"""In which order a forward meets its locations, and how far a step has got."""

from __future__ import annotations

from collections.abc import Collection

from midstream.interleaving.locations import ENGINE_ORDER, LOGITS, SAMPLES, Location


class Order:
    """The places of a model's locations, learned from the first step that is accompanied.

    Args:
        modules: paths of the model's modules.

    Attributes:
        places: the place of each location that is known; a later one is greater.
        position: the place that the step has got to.
        known: whether the order of modules is known.
        learning: whether this step shows it.
        charting: whose operations the call under way shows the order of.
        current: the location that was handed over last.
    """

    def __init__(self, modules: Collection[str]):
        self._modules = modules
        self.places: dict[Location, int] = {}
        self.known = self.learning = False
        self.charting: str | None = None
        self.current: Location | None = None
        self.position = -1
        self._passed: set[Location] = set()
        self._around: dict[Location, list[str]] = {}

    def begin_step(self) -> None:
        """A forward begins."""
        self.position, self.current = -1, None
        self._passed.clear()

    def finish_step(self, *, learned: bool) -> None:
        """It has ended; ``learned`` tells whether it ran to its end."""
        self.known = self.known or (learned and self.learning)
        self.learning = False

    @property
    def has_sampled(self) -> bool:
        """Whether the step's tokens have been drawn."""
        return self.position >= ENGINE_ORDER[SAMPLES]

    def reach(self, location: Location) -> None:
        """The step has got to a location."""
        index = ENGINE_ORDER.get(location, self.places.get(location))
        if index is None:
            index = self._learn(location)
        if index is None:  # a module the first step did not call: its place in the order is unknown
            self._passed.add(location)
        else:
            self.position = max(self.position, index)

    def _learn(self, location: Location) -> int | None:
        """The place of a location met for the first time; None where this step does not show it.

        Operations get places between those of the modules around them, every second one, so that
        what happens inside an operation has a place too.
        """
        if location.within is None:
            index = len(self.places) << 20 if self.learning else None
        else:
            index = self.position + 2 if location.within == self.charting else None
        if index is not None:
            self.places[location] = index
        return index

    def has_passed(self, location: Location) -> bool:
        """Whether the step has passed a location."""
        index = ENGINE_ORDER.get(location, self.places.get(location))
        if index is None:  # wherever it is, it comes before what it is part of has ended
            index = self._end_of(location.within) - 1
        return location in self._passed or index <= self.position

    def _end_of(self, owner: str | None) -> int:
        """Position at which a module or operation ends; None is the whole forward."""
        if owner is None:
            return ENGINE_ORDER[LOGITS]
        outer = self.owner(owner)
        leave = Location(owner, "output", outer)
        if leave in self._passed:
            return -1
        index = self.places.get(leave)
        return self._end_of(outer) - 1 if index is None else index

    def is_behind_forward(self, location: Location) -> bool:
        """Whether a location is known to be reached after the model's own forward has returned."""
        index = ENGINE_ORDER.get(location, self.places.get(location))
        end = self.places.get(Location("", "output"), ENGINE_ORDER[LOGITS] - 1)
        return index is not None and index > end

    def place_skip(self, location: Location) -> None:
        """Give a skip its place in the order: behind all that is in the module."""
        leave = self.places.get(Location(location.path, "output"))
        if leave is not None:
            self.places.setdefault(location, leave - 1)

    def owner(self, path: str) -> str | None:
        """What an operation's path lies within; None for a module's path."""
        if path in self._modules:
            return None
        return f".{path}".rpartition(".source.")[0][1:]

    def entry_of(self, owner: str) -> Location:
        """Where a module or operation is entered."""
        return Location(owner, "input", self.owner(owner))

    def has_begun(self, owner: str) -> bool:
        """Whether a module or operation was entered in this step, before the present hand-over."""
        entry = self.entry_of(owner)
        if entry == self.current:
            return False
        return entry in self._passed or self.places.get(entry, self.position) < self.position

    def is_at(self, location: Location) -> bool:
        """Whether nothing behind a location, whose place is known, has been reached."""
        return self.places.get(location) == self.position

    def paths(self, location: Location) -> list[str]:
        """The location's module, and those whose call is under way when it is reached.

        A block that was given the one may go on to the output of the others, and a call that is
        under way can no longer be replaced.
        """
        found = self._around.get(location)
        if found is None:
            if location.within is None:
                found = [location.path, *self._callers(location)]
            else:
                found = [location.within, *self.paths(self.entry_of(location.within))]
            if self.known:
                self._around[location] = found
        return found

    def _callers(self, location: Location) -> list[str]:
        places, index = self.places, self.places.get(location)
        if index is None or not self.known:  # not called in the first step: as the tree has it
            parts = location.path.split(".")
            return [".".join(parts[:count]) for count in range(len(parts))]
        return [
            path
            for path in self._modules
            if places.get(Location(path, "input"), index) < index
            and index < places.get(Location(path, "output"), index)
        ]
