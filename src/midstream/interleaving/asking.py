"""What a block may ask for where the forward is: what has passed is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

from midstream.errors import OutOfOrderError
from midstream.interleaving.locations import SKIP, Location

if TYPE_CHECKING:
    from midstream.interleaving.interleaver import Interleaver
    from midstream.interleaving.run import Run


class Asking:
    """Checks the locations that blocks ask for.

    Args:
        interleaver: the model's steps.
    """

    def __init__(self, interleaver: Interleaver):
        self._interleaver = interleaver

    def check(self, run: Run, location: Location) -> None:
        """Refuse a location that this step has passed, or that was not declared.

        Raises:
            OutOfOrderError: naming the location, and where the block stands or what to declare.
        """
        at = self._interleaver
        if at.declared is not None:
            at.declared.check(run, location)
        if not at.in_step:
            raise OutOfOrderError(
                f"'{location.label(run.visit)}' was requested after the forward pass ended."
            )
        if at.skips.values:
            at.skips.refuse_inner(run, location, at.order.places)
            if location.side == SKIP:  # it has been checked, see `check_skip`
                return
        late = ""
        if not at.order.has_passed(location):
            if location.within is None or at.tapping.covers(location):
                return
            run.uses_source = True
            late = at.sources.check(location)
            if not late:
                return
        raise _out_of_order(run, location, late)

    def check_skip(self, run: Run, location: Location) -> None:
        """Refuse to skip a module whose call has begun; being given its arguments is no part of it.

        Raises:
            OutOfOrderError: naming the location and where the block stands.
        """
        order, declared = self._interleaver.order, self._interleaver.declared
        if declared is not None:
            declared.check(run, location)
        order.place_skip(location)
        entry = Location(location.path, "input")
        if entry != run.place and order.has_passed(entry):
            raise _out_of_order(run, location)

    def out_of_order(self, run: Run, location: Location, late: str = "") -> OutOfOrderError:
        """The error for a location that a step has passed."""
        return _out_of_order(run, location, late)


def _out_of_order(run: Run, location: Location, late: str = "") -> OutOfOrderError:
    text = f"'{location.label(run.visit)}' was requested but the model already ran past it"
    if run.marks is not None:
        text += (
            f": the block had already been given '{run.marks.location.label(run.visit)}'. "
            f"Move this access above line {run.marks.line}"
        )
    return OutOfOrderError(f"{text}.{late}")
