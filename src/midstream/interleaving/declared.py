"""Locations that were declared before: blocks may ask for these and for no others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from midstream.errors import OutOfOrderError
from midstream.interleaving.locations import ENGINE_ORDER, SKIP, Location
from midstream.interleaving.routes import Guess, Needs

if TYPE_CHECKING:
    from midstream.interleaving.run import Run

_SHOWN = 8


class Declared:
    """The declared locations of one model.

    Args:
        locations: in the order in which they are shown.

    Attributes:
        guess: what the blocks of any step will need: no more than all of them.
    """

    def __init__(self, locations: Iterable[Location]):
        self._shown = tuple(locations)
        self._served = frozenset((*self._shown, *ENGINE_ORDER))
        self.guess = Guess(Needs(frozenset(self._shown)))

    def __contains__(self, location: Location) -> bool:
        return location in self._served

    def check(self, run: Run, location: Location) -> None:
        """Refuse a location that was not declared.

        Raises:
            OutOfOrderError: with what to declare.
        """
        if location not in self._served:
            raise OutOfOrderError(self._refusal(location.label(run.visit), location))

    def recorded(self, locations: Iterable[Location], *, chosen: bool) -> frozenset[Location]:
        """What of some locations a cache can record.

        Args:
            chosen: whether each of them was asked for by name; else those that were not declared
                are left out.

        Raises:
            OutOfOrderError: one that was asked for, or all of them, were not declared.
        """
        wanted = list(locations)
        found = frozenset(location for location in wanted if location in self._served)
        missing = [location for location in wanted if location not in found]
        if missing and (chosen or not found):
            raise OutOfOrderError("`tracer.cache()`: " + self._refusal(missing[0].name, missing[0]))
        return found

    def _refusal(self, label: str, location: Location) -> str:
        listed = ", ".join(f"'{_written(each)}'" for each in self._shown[:_SHOWN])
        more = f", ... ({len(self._shown)} in all)" if len(self._shown) > _SHOWN else ""
        return (
            f"'{label}' is not a declared tap, and this engine serves the declared ones, "
            f"`model.logits`, `model.samples` and `tracer.result` alone. {_advice(location)} "
            f"Without taps= every location is served. Declared: {listed}{more}."
        )


def _advice(location: Location) -> str:
    if location.side == SKIP:
        output = Location(location.path, "output")
        return f"A skip is never one: assign '{_written(output)}', declared as a tap, instead."
    return f"Declare it when the model is built: taps=[..., '{_written(location)}']."


def _written(location: Location) -> str:
    """A location as a tap is written."""
    return ".".join(part for part in (location.path, location.side) if part)
