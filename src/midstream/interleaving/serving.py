"""Blocks that wait at one location are given their rows, execute, and are taken up again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from midstream.interleaving.copies import Rows
from midstream.interleaving.events import Event
from midstream.interleaving.locations import Location
from midstream.interleaving.neutral import NEUTRAL
from midstream.interleaving.notes import annotate
from midstream.interleaving.run import Run
from midstream.interleaving.served import Served

if TYPE_CHECKING:
    from midstream.interleaving.interleaver import Interleaver

_TRIES = 100
"""How often a block may catch the error of a write, and write again, at one place."""


class Serving:
    """Serves the blocks of one interleaver.

    Args:
        interleaver: the model's steps.
    """

    def __init__(self, interleaver: Interleaver):
        self._interleaver = interleaver

    def serve(
        self, runs: Sequence[Run], location: Location, event: Event, rows: Mapping[Run, Rows]
    ) -> None:
        """Serve those for whom the thread has to be prepared one by one, then the others."""
        if len(runs) == 1 and not runs[0].plain:
            self._serve_one(runs[0], location, event, rows[runs[0]])
            return
        plain = [run for run in runs if run.plain]
        for run in runs if len(plain) < len(runs) else ():
            if not run.plain:
                self._serve_one(run, location, event, rows[run])
        if plain:
            with NEUTRAL:
                self._serve_plainly(plain, location, event, rows)

    def _serve_plainly(
        self, runs: Sequence[Run], location: Location, event: Event, rows: Mapping[Run, Rows]
    ) -> None:
        """As ``_serve_one`` for each, with what they have in common done once."""
        at = self._interleaver
        known, logged = at.tapping.covers(location), at.logged
        last: Location | None = None
        line: list[Run] = []
        for run in runs:
            log = run.log if logged else None
            served = event.serve(rows[run], run.snapshots, location, log)
            run.place, run.served = location, served
            if not known:
                run.visited.add(location)
            run.resume_plainly()
            if not served.is_as_read:
                self.settle(run, served)
                self.note(run, location, served)
            run.place = run.served = None
            wanted = run.wanted
            if wanted is last and wanted is not None and not run.uses_source and not run.done:
                line.append(run)
            else:
                at.after(run)
                last, line = wanted, at.waiting_at(wanted) if wanted is not None else []

    def _serve_one(self, run: Run, location: Location, event: Event, rows: Rows) -> None:
        """Give one block its rows, let it execute, and take back what it changed."""
        at = self._interleaver
        served = event.serve(rows, run.snapshots, location, run.log if at.logged else None)
        run.place, run.served = location, served
        run.visited.add(location)
        try:
            run.resume()
            self.settle(run, served)
        finally:
            run.place = run.served = None
            self.note(run, location, served)
        at.after(run)

    def note(self, run: Run, location: Location, served: Served) -> None:
        """Note what a block has changed at a location, for the steps to come."""
        if served.wrote:
            run.wrote.add(location)
            if served.event.is_tensor:
                run.wrote_tensors.add(location)
        if served.replaced:
            run.replaced.update((location, leaf) for leaf in served.replaced)

    def settle(self, run: Run, served: Served) -> None:
        """Take back what a block has changed; the error of a write that fails is the block's."""
        # a block that catches the error of a write is still here, and may write again
        for tries_left in reversed(range(_TRIES)):
            error = _settled(served, run)
            if error is None:
                break
            run.resume(error) if tries_left and not run.done else run.fail(error)


def _settled(served: Served, run: Run) -> Exception | None:
    """Copy back what a block changed; the error of a write that failed is the block's."""
    try:
        served.settle(run.visit)
    except Exception as error:  # noqa: BLE001  # a failed copy is the block's error, never the engine's
        if run.marks is not None:
            place = f'File "{run.marks.file}", line {run.marks.line}'
            annotate(error, f"Met in the value that was read at {place}.")
        return error
    return None
