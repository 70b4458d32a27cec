"""A step's forward that runs once more, because a block asked for what the first run did not offer.

What blocks have been given is not given to them twice. What they have written is written again, at
the same places in the same order, so that they go on where they were.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

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
        self._recorded: Counter[Location] = Counter()
        self._inputs: list[torch.Tensor] = []
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.keeping = self.running = False

    def begin(self, inputs: Iterable[Any]) -> None:
        """A forward begins that may have to run again.

        Args:
            inputs: what it is called with. A later location may show one of these tensors, and an
                edit there must not be in it when the forward begins again.
        """
        self.clear()
        self._inputs = [each for each in inputs if isinstance(each, torch.Tensor)]
        self.keeping = True

    def run(self) -> Iterable[Location]:
        """It runs again; the places where something is to be written."""
        self.keeping, self.running = False, True
        for tensor, before in self._before:
            tensor.copy_(before)
        self._before.clear()
        return self._puts

    def clear(self) -> None:
        """The step has ended."""
        self._puts.clear()
        self._recorded.clear()
        self._inputs.clear()
        self._before.clear()
        self.keeping = self.running = False

    def keep(self, location: Location, event: Event) -> None:
        """Keep what was written at a place."""
        if event.writes:
            self._puts.setdefault(location, []).append(event.writes)

    def has_writes_at(self, location: Location) -> bool:
        """Whether something was written at a place."""
        return location in self._puts

    def spare(self, leaf: torch.Tensor) -> None:
        """Keep an input of the forward as it is before it is written to."""
        at = leaf.data_ptr()
        for index, tensor in enumerate(self._inputs):
            if tensor.data_ptr() <= at < tensor.data_ptr() + tensor.nbytes:
                self._before.append((tensor, tensor.clone()))
                del self._inputs[index]
                return

    def is_recorded(self, location: Location) -> bool:
        """Whether the first run has recorded a place; otherwise it is taken to be recorded now.

        A module may be called several times in a forward, and is recorded each time.
        """
        if not self.running:
            if self.keeping:
                self._recorded[location] += 1
            return False
        self._recorded[location] -= 1
        return self._recorded[location] >= 0

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
