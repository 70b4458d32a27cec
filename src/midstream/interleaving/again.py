"""A step's forward that runs once more, because a block asked for what the first run did not offer.

What blocks have been given is not given to them twice. What they have written is written again, at
the same places in the same order, so that they go on where they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from midstream.interleaving.copies import Put, Rows
from midstream.interleaving.events import Event
from midstream.interleaving.locations import Location


class Again:
    """What blocks have written and recorded so far in a step that may have to run again.

    Attributes:
        keeping: whether it may.
        running: whether it does.
    """

    def __init__(self) -> None:
        self._puts: dict[Location, list[list[Put]]] = {}
        self._recorded: set[Location] = set()
        self.keeping = self.running = False

    def begin(self) -> None:
        """A forward begins that may have to run again."""
        self.clear()
        self.keeping = True

    def run(self) -> Iterable[Location]:
        """It runs again; the places where something is to be written."""
        self.keeping, self.running = False, True
        return self._puts

    def clear(self) -> None:
        """The step has ended."""
        self._puts.clear()
        self._recorded.clear()
        self.keeping = self.running = False

    def keep(self, location: Location, event: Event) -> None:
        """Keep what was written at a place."""
        if event.writes:
            self._puts.setdefault(location, []).append(event.writes)

    def is_recorded(self, location: Location) -> bool:
        """Whether the first run has recorded a place; otherwise it is taken to be recorded now."""
        if self.running:
            return location in self._recorded
        self._recorded.add(location)
        return False

    def apply(
        self, location: Location, value: Any, make: Callable[[Any, Sequence[Rows]], Event]
    ) -> Any:
        """A value as the blocks had left it.

        Args:
            make: gives the event of a value for the rows of some requests.
        """
        for puts in self._puts.pop(location, ()):
            event = make(value, [put.rows for put in puts])
            for put in puts:
                event.put(put.leaf, put.rows, put.value, replace=put.replace)
            value = event.result()
        return value
