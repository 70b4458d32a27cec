"""One block on one stage of a pipeline: it meets there what it has met on the others."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from midstream.errors import MidstreamError
from midstream.interleaving.locations import Location
from midstream.interleaving.run import Run, StopTrace
from midstream.modeling.vllm.engine.parallel.pipeline_journal import (
    Did,
    Entry,
    Failed,
    Left,
    Refused,
    Threw,
    Visit,
)

if TYPE_CHECKING:
    from midstream.modeling.vllm.engine.parallel.pipeline_interleaver import StagedInterleaver

CALL = "call"
"""Side of the place where a block waits for what a later stage does with its modules."""

_PATIENCE = 1.0  # seconds for a block that did not give control back on another stage


class State(NamedTuple):
    """Where a block stands, as all stages have to see it.

    Attributes:
        done: it has ended.
        failed, stopped: it has ended so.
        wanted: the location it waits for.
        awaited: the step it waits for.
        waits: for the request's result.
    """

    done: bool
    failed: bool
    stopped: bool
    wanted: Location | None
    awaited: int | None
    waits: bool


class StagedRun(Run):
    """A block that runs on every stage.

    Attributes:
        journal: what it has met in this step, on all stages so far.
        script: what it is still to meet of what other stages have kept.
        behind: whether a later stage has more of its last step.
        went: what it has done with modules of a later stage in this step, which took it there.
        agreed: whether it has something to do in a step, as the last stage saw it: None before
            that stage has had it, else what it records and the step it waits for.
    """

    interleaver: StagedInterleaver | None

    def __init__(self, *args: Any, **settings: Any):
        super().__init__(*args, **settings)
        self.journal: list[Entry] = []
        self.script: deque[Entry] = deque()
        self.went: str | None = None
        self.behind, self._device = False, torch.device("cpu")
        self.agreed: tuple[bool, int | None] | None = None
        self._diverged: MidstreamError | None = None
        self._pending: BaseException | None = None  # to be told to the last stage in the next step
        self._between = False

    @property
    def plain(self) -> bool:
        """Never: each visit is kept for other stages."""
        return False

    @plain.setter
    def plain(self, value: bool) -> None:
        pass

    @property
    def enters(self) -> bool:
        """Whether there is something to do in the step; the same on all stages."""
        if self.agreed is None:
            return not self.done
        records, awaited = self.agreed
        return records or (awaited is not None and awaited <= self.visit)

    @property
    def state(self) -> State:
        """Where it stands."""
        failed, stopped = self.error is not None, self.stopped is not None
        wanted = None if self.done else self.wanted
        awaited = None if self.done else self.awaited
        return State(self.done, failed, stopped, wanted, awaited, self.waits_for_result)

    @property
    def agreement(self) -> tuple[bool, int | None]:
        """What it has to do in later steps, see ``agreed``."""
        return self.records, None if self.done else self.awaited

    def resume(self, error: BaseException | None = None) -> None:
        """Let the block execute; what is raised in it is kept."""
        if error is not None and not self.done:
            self.journal.append(Threw(error))
        super().resume(error)

    def fail(self, error: BaseException) -> None:
        """End the block; what ended it is kept.

        Between two steps nobody could be told: it is then done in the next one.
        """
        if self._between:
            self.kill()
            self._pending = self._pending or error
            return
        self.journal.append(Failed(error))
        super().fail(error)

    @property
    def is_ahead_of_script(self) -> bool:
        """Whether what the block does now is not in the script."""
        return not any(not isinstance(entry, Left) for entry in self.script)

    def refused(self, location: Location) -> Refused | None:
        """Take what the script says of a location that was refused on another stage."""
        entry = self.script[0] if self.script else None
        if isinstance(entry, Refused) and entry.location == location:
            self._next()
            return entry
        return None

    def did(self, what: str) -> Any:
        """Take what another stage did for the block.

        Raises:
            MidstreamError: it did something else.
            BaseException: what was raised there.
        """
        entry = self.script[0] if self.script else None
        if not isinstance(entry, Did) or entry.what != what:
            raise self.differs(f"has {what!r} here, and there {_described(entry)}")
        self._next()
        return entry.result(self._device)

    def await_call(self, path: str) -> None:
        """Wait until a later stage has done something with its modules."""
        self.wanted = Location(path, CALL)
        self._park()

    def differs(self, how: str) -> MidstreamError:
        """The error for a block that does not do the same on all stages; it will fail with it."""
        self._diverged = MidstreamError(
            "With pipeline parallelism every stage runs the whole block, and this block did not do "
            f"the same on all of them: it {how}. What a block asks for must depend on its values "
            "only, not on time, on ids of objects, on files, or on unseeded random numbers."
        )
        return self._diverged

    def begin(self, entries: Iterable[Entry], device: torch.device) -> None:
        """Begin a step, in which the block has met this on the stages before."""
        self.journal.clear()
        self.went = None
        self._device = device
        pending, self._pending = self._pending, None
        if pending is not None:
            self.fail(pending)
        self.script.extend(entries)
        self._hurry()

    def meet(self) -> None:
        """Let the block meet what its script has, from where it waits."""
        while self.script and not self.done:
            self._meet_next()
        rest = [entry for entry in self.script if not isinstance(entry, Left | Failed)]
        ended = [entry for entry in self.script if isinstance(entry, Failed)]
        self._clear()
        if ended and self.error is None:
            super().fail(ended[0].error)
            self.journal.append(ended[0])
        elif rest and self._diverged is None and self.overrun is None:
            self.differs(f"has ended here, and there {_described(rest[0])}")
        self.settle_divergence()

    def settle_divergence(self) -> None:
        """End the block if it has not done the same as on another stage."""
        if self._diverged is not None and self.error is not self._diverged:
            self.fail(self._diverged)

    def compare(self, there: State) -> None:
        """End the block if it does not stand where it stands on another stage."""
        known = self._diverged is not None or self.overrun is not None
        if not known and there != self.state and not _waits_for_call(there):
            self.differs(f"stands here at {_standing(self.state)}, and there at {_standing(there)}")
        self.settle_divergence()

    def catch_up(self, entries: Iterable[Entry], there: State) -> None:
        """Let the block meet what it met on later stages, between two steps.

        If it has not done the same, it fails in the next step that it has, where others see it.
        """
        self._between = True
        try:
            self.script.extend(entries)
            self._hurry()
            self.meet()
            self.compare(there)
        finally:
            self._between = False
        if self.done:  # there it goes on
            self._pending = self._pending or self.error or self.differs("has ended on one of them")
            self.error = self.stopped = None

    def end_as(self, there: State) -> None:
        """End quietly, as on the last stage."""
        self.kill()
        self._clear()
        if there.failed and self.error is None:
            self.error = MidstreamError("The block has failed on another stage.")
        if there.stopped and self.stopped is None:
            self.stopped = StopTrace(keeps_token=True)

    def _meet_next(self) -> None:
        entry = self.script[0]
        if isinstance(entry, Visit) and self.wanted == entry.location:
            self._next()
            self.place, self.served = entry.location, entry.echo(self._device)  # type: ignore[assignment]
            self._go_on()
        elif isinstance(entry, Left):
            self._next()
            self.place = self.served = None
        elif isinstance(entry, Threw):
            self.script.popleft()
            self._hurry()
            self.resume(entry.error)
        elif isinstance(entry, Failed):
            self.script.popleft()
            self.fail(entry.error)
        elif isinstance(entry, Did) and self.wanted is not None and self.wanted.side == CALL:
            self._go_on()
        else:
            self.differs(f"waits here for {self.state.wanted}, and there {_described(entry)}")
            self._clear()

    def _go_on(self) -> None:
        self._hurry()
        super().resume()

    def _hurry(self) -> None:
        """Let a block that did not give control back on another stage have little time here."""
        active = next((e for e in self.script if isinstance(e, Visit | Threw | Failed)), None)
        if isinstance(active, Failed):
            self.seconds = max(self.seconds, self.clock.block - _PATIENCE)

    def _next(self) -> None:
        self.journal.append(self.script.popleft())

    def _clear(self) -> None:
        self.script.clear()
        self.place = self.served = None


def _waits_for_call(state: State) -> bool:
    return state.wanted is not None and state.wanted.side == CALL


def _described(entry: Entry | None) -> str:
    if isinstance(entry, Visit):
        return f"was given '{entry.location.name}'"
    if isinstance(entry, Refused):
        return f"was refused '{entry.location.name}'"
    if isinstance(entry, Did):
        return f"had {entry.what!r}"
    if isinstance(entry, Threw | Failed):
        return f"met {type(entry.error).__name__}: {entry.error}"
    return "nothing more"


def _standing(state: State) -> str:
    if state.done:
        return "its end" if not state.failed else "an error"
    if state.wanted is not None:
        return f"'{state.wanted.name}'"
    return "the request's end" if state.waits else f"step {state.awaited}"
