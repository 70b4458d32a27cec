"""Blocks beside one stage of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from midstream.errors import OutOfOrderError, UnsupportedError
from midstream.interleaving.asking import Asking
from midstream.interleaving.copies import Rows
from midstream.interleaving.events import Check, Event
from midstream.interleaving.indices import Limit
from midstream.interleaving.interleaver import Interleaver
from midstream.interleaving.locations import Location
from midstream.interleaving.run import Run
from midstream.interleaving.serving import Serving
from midstream.interleaving.skips import Skips
from midstream.modeling.vllm.engine.parallel.pipeline_journal import (
    Did,
    Entry,
    Left,
    Refused,
    Visit,
    Watched,
)
from midstream.modeling.vllm.engine.parallel.pipeline_run import StagedRun, State
from midstream.modeling.vllm.engine.parallel.stages import Stages


class StagedInterleaver(Interleaver):
    """Serves the locations of one stage; blocks that wait for another's wait beside it.

    Args:
        modules, limit, always: as for ``Interleaver``.
        stages: which stage has what.
        device: where blocks are given what other stages read.
    """

    has_all = False

    def __init__(
        self,
        modules: Mapping[str, torch.nn.Module],
        limit: Limit | None,
        always: Collection[str],
        stages: Stages,
        device: torch.device,
    ):
        super().__init__(modules, limit, always)
        self.stages, self._device = stages, device
        self.skips = StagedSkips(always, stages)
        self._skipping = self.skips.values
        self.asking = StagedAsking(self)
        self.serving = StagedServing(self)

    def owns(self, location: Location) -> bool:
        """Whether the location is this stage's."""
        return self.stages.of(location) == self.stages.mine

    def is_ahead(self, location: Location) -> bool:
        """As for one stage; what another stage has is not to be seen at once."""
        return self.owns(location) and super().is_ahead(location)

    def wanted(self) -> Iterator[Location]:
        """What is waited for or recorded inside this stage's forward."""
        return filter(self.owns, super().wanted())

    def hand_over(
        self,
        location: Location,
        value: Any,
        rows: Mapping[Run, Rows] | None = None,
        sizes: Sequence[int] = (),
        check: Check | None = None,
    ) -> Any:
        """As for one stage; what a module that all stages call gives on another is not served."""
        if location.within is None and not self.owns(location):
            self.order.reach(location)
            return value
        return super().hand_over(location, value, rows, sizes, check)

    def perform(self, run: Any, paths: Sequence[str], what: str, do: Callable[[], Any]) -> Any:
        """Do something with modules, on the stage that has them; the others are given the result.

        Raises:
            UnsupportedError: they are on several stages, or on one that the block is past.
        """
        if not isinstance(run, StagedRun):
            return do()
        if not run.is_ahead_of_script:
            return run.did(what)
        stage = self.stages.having(paths, what)
        if stage is None:
            return do()
        run.went = what if stage else run.went
        if stage > self.stages.mine:
            run.await_call(paths[0])
            return run.did(what)
        return self._perform(run, what, do if stage == self.stages.mine else _past(what, stage))

    def _perform(self, run: StagedRun, what: str, do: Callable[[], Any]) -> Any:
        try:
            value = do()
        except Exception as error:
            run.journal.append(Did(what, error=error))
            raise
        run.journal.append(Did(what, value))
        return value

    def _begin(self, run: Run) -> None:
        """As for one stage; then the block meets what it met on the stages before."""
        assert isinstance(run, StagedRun)
        entries, there = self.stages.scripts.pop(run, ((), None))
        run.begin(entries, self._device)
        super()._begin(run)
        run.meet()
        if there is not None:
            run.compare(there)
        if run.wanted is not None and run not in self.waiting_at(run.wanted):
            self.after(run)

    def catch_up(self, run: StagedRun, entries: Sequence[Entry], there: State) -> None:
        """Let a block meet what it met on later stages in its last step, between two steps."""
        run.catch_up(entries, there)
        self.skips.values.pop(run, None)

    def _wait(self, run: Run, location: Location) -> None:
        assert isinstance(run, StagedRun)
        if run.is_ahead_of_script and self.owns(location):
            super()._wait(run, location)

    def _record(self, location: Location, value: Any) -> None:
        if self.owns(location):
            super()._record(location, value)


def _past(what: str, stage: int) -> Callable[[], Any]:
    def refuse() -> Any:
        raise UnsupportedError(
            f"{what} needs modules of pipeline stage {stage}, which this step has passed. Do it "
            "before the block reads or writes anything of a later stage."
        )

    return refuse


class StagedSkips(Skips):
    """What blocks skip; a module that lies on several stages is none of that."""

    def __init__(self, always: Collection[str], stages: Stages):
        super().__init__(always)
        self._stages = stages

    def learn(self, path: str, value: Any, sizes: Sequence[int]) -> None:
        """As for one stage."""
        if not self._stages.is_spanning(path):
            super().learn(path, value, sizes)


class StagedAsking(Asking):
    """What a block may ask for: of this stage as ever, of later ones all, of earlier none."""

    _interleaver: StagedInterleaver

    def check(self, run: Run, location: Location) -> None:
        """Refuse what the step has passed, or what another stage has refused."""
        self._checked(run, location, super().check)

    def check_skip(self, run: Run, location: Location) -> None:
        """As ``check``, for a skip."""
        self._checked(run, location, super().check_skip)

    def _checked(
        self, run: Run, location: Location, check: Callable[[Run, Location], None]
    ) -> None:
        assert isinstance(run, StagedRun)
        refused = run.refused(location)
        if refused is not None:
            raise refused.error
        if run.stopped is not None or not run.is_ahead_of_script:
            return  # another stage has served it, or something else: that is seen there
        try:
            self._check_stage(run, location, check)
        except Exception as error:
            run.journal.append(Refused(location, error))
            raise

    def _check_stage(
        self, run: StagedRun, location: Location, check: Callable[[Run, Location], None]
    ) -> None:
        stages = self._interleaver.stages
        stages.refuse_spanning(location)
        stage = stages.of(location)
        if stage == stages.mine or run.closed:
            check(run, location)
        elif stage < stages.mine:
            raise self._passed(run, location, stage)

    def _passed(self, run: StagedRun, location: Location, stage: int) -> OutOfOrderError:
        if run.went is None:
            late = f" It is on pipeline stage {stage}, and the step has gone on to a later one."
            return self.out_of_order(run, location, late)
        return OutOfOrderError(
            f"'{location.label(run.visit)}' is on pipeline stage {stage}, and the step has gone on "
            f"to a later one, which the block needed before: {run.went}. Read what it needs of the "
            "earlier stages first: values stay what they were."
        )


class StagedServing(Serving):
    """Serves blocks, and keeps what they are given for the other stages."""

    def serve(
        self, runs: Sequence[Run], location: Location, event: Event, rows: Mapping[Run, Rows]
    ) -> None:
        """Serve blocks one after the other."""
        for run in runs:
            assert isinstance(run, StagedRun)
            if not run.done:
                self._serve_staged(run, location, event, rows[run])

    def _serve_staged(self, run: StagedRun, location: Location, event: Event, rows: Rows) -> None:
        at = self._interleaver
        visit = Visit(location, rows.stop - rows.start)
        served = event.serve(rows, run.snapshots, location, run.log if at.logged else None)
        watched = Watched(served, visit)
        run.journal.append(visit)
        run.place, run.served = location, watched  # type: ignore[assignment]
        run.visited.add(location)
        try:
            run.resume()
            self.settle(run, served)
        finally:
            watched.close()
            run.place = run.served = None
        run.journal.append(Left())
        at.after(run)
