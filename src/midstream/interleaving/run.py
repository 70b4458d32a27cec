"""One block beside one request: a greenlet that waits for locations of the forward pass."""

from __future__ import annotations

import itertools
import sys
from _thread import get_ident
from collections.abc import Callable
from contextlib import nullcontext
from time import monotonic
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import greenlet
from greenlet import getcurrent

from midstream.errors import LimitExceededError, NotInTraceError, OutOfOrderError
from midstream.interleaving.frames import user_frame, user_line
from midstream.interleaving.generators import Exchange, Generators
from midstream.interleaving.locations import Location
from midstream.interleaving.modes import BlockModes
from midstream.interleaving.neutral import NEUTRAL
from midstream.interleaving.notes import advise
from midstream.interleaving.printing import Notice, Output
from midstream.interleaving.snapshots import Snapshots
from midstream.interleaving.watchdog import ATTEMPTS, WATCHDOG, Clock, TimeUp

if TYPE_CHECKING:
    from midstream.interleaving.gathering import Reads
    from midstream.interleaving.interleaver import Interleaver
    from midstream.interleaving.offers import Offers
    from midstream.interleaving.recording import Recorder
    from midstream.interleaving.replays import WriteLog
    from midstream.interleaving.served import Served
    from midstream.interleaving.standing import Edit


EXCHANGE = Exchange()
"""Whose random generators this process has; there is one set, whatever the number of models."""


_ABANDONED: list[greenlet.greenlet] = []


class _BlockGreenlet(greenlet.greenlet):  # type: ignore[misc]  # greenlet has no types
    """A greenlet that knows its run, so that `node.output` finds it without a table."""

    block_run: Run | None = None


def current_run(what: str) -> Run:
    """The run whose block is executing, for an access named by ``what``.

    Raises:
        NotInTraceError: outside a running block.
    """
    run = running()
    if run is None:
        raise NotInTraceError(
            f"{what} was asked for outside a running block. Values of the forward pass exist only "
            "inside `with model.trace(...)`; save what you need there with `.save()`."
        )
    return run


def running() -> Run | None:
    """The run whose block is executing, if one is."""
    return getattr(greenlet.getcurrent(), "block_run", None)


class Mark(NamedTuple):
    """A line of a block that asked for a value, and got it."""

    location: Location
    code: CodeType | None
    at: int

    @property
    def file(self) -> str:
        """The file of the line."""
        return self.code.co_filename if self.code is not None else ""

    @property
    def line(self) -> int:
        """Its number; worked out when an error asks, since a visit has no time for it."""
        if self.code is None:
            return 0
        positions = itertools.islice(self.code.co_positions(), self.at // 2, None)
        return next(positions, (None,))[0] or 0


class StopTrace(BaseException):
    """Unwinds a block that ends its request; no `except Exception` of the user's holds it up.

    Args:
        keeps_token: whether the step's token belongs to the request.
    """

    def __init__(self, *, keeps_token: bool):
        super().__init__()
        self.keeps_token = keeps_token


class Run:
    """One block's execution. It is switched into by the forward thread, never by another.

    Attributes:
        visit: step of the request the block is in, counted from 0 (the prefill).
        context: what the engine around it keeps with the block.
        turn: place among the blocks of its request, which are served one after the other.
        wanted: the location the block waits for; None while it executes or when it is done.
        awaited: the step the block waits for, if it does.
        last_step: the last step of the loop that it is in, if that has an end.
        gets_result: whether the block can be given what the request ended with.
        waits_for_result: whether the block waits for what the request ended with.
        closed: whether the request has ended, so that no further step comes.
        stopped: whether the block has asked for the request's end, and with it whether the step's
            token is to be kept.
        output: what is to be printed and warned about in the caller's process.
        recorders: what is recorded for the block, until its request ends.
        error: what the block raised, if it did.
        code: what its code is known by; None until it executes.
        plain: whether it does nothing but compute, so that no mode, stream or generator of the
            thread has to be exchanged around its visits.
        visited: locations that it has met in this step.
        replaced: leaves of their values in whose place it has given the model another tensor.
        wrote: locations where it has changed what the model goes on with.
        wrote_tensors: those of them whose value is one tensor.
        habit: what its loop over steps does in each, if that is known to be always the same.
        stood: the last step in which that has been done in its place; -1 if it never has.
        took_turn: whether it has executed from the beginning of the step under way.
        offers: gives it, while it executes, what the forward has passed and kept.
        uses_source: whether the block may ask for operations inside a forward.
        snapshots: the values it was given and still holds.
        log: keeps what it writes, if its request may be run anew.
        clock: how long the engine's blocks have been executing.
        seconds: how long this one has, in this step.
        overrun: why it was interrupted, if it was.
        attempts, next_attempt, interrupted: how often, when again, and whether it is still to see
            that it was (the watchdog's).
    """

    def __init__(
        self,
        target: Callable[[], None],
        *,
        seed: int = 0,
        clock: Clock | None = None,
        snapshots: Snapshots | None = None,
        log: WriteLog | None = None,
    ):
        self._target = target
        self._greenlet = _BlockGreenlet(self._main)
        self._greenlet.block_run = self
        self._modes = BlockModes()
        self._generators: Generators | None = None
        self._seed = seed
        self.interleaver: Interleaver | None = None
        self.visit = 0
        self.turn = 0
        self.context: Any = None
        self.wanted: Location | None = None
        self.place: Location | None = None
        self.served: Served | None = None
        self.error: BaseException | None = None
        self.awaited: int | None = None
        self.gets_result = True
        self.waits_for_result = False
        self._result: Any = None
        self.closed = False
        self.stopped: StopTrace | None = None
        self.output = Output()
        self.recorders: list[Recorder] = []
        self._abandoned = False
        self.code: str | None = None
        self.plain = False
        self.visited: set[Location] = set()
        self.replaced: set[tuple[Location, int]] = set()
        self.wrote: set[Location] = set()
        self.wrote_tensors: set[Location] = set()
        self.offers: Offers | None = None
        self.habit: Edit | Reads | None = None
        self.stood = -1
        self.took_turn = False
        self._refused: BaseException | None = None
        self.last_step: int | None = None
        self.uses_source = False
        self._marked: tuple[Location, CodeType | None, int] | None = None
        self.snapshots = snapshots or Snapshots()
        self.log = log
        self.clock = clock or Clock()
        self.seconds = 0.0
        self.overrun: LimitExceededError | None = None
        self.attempts, self.next_attempt, self.interrupted = 0, 0.0, False

    @property
    def marks(self) -> Mark | None:
        """Where in the user's code the last value was asked for, for error texts."""
        return None if self._marked is None else Mark(*self._marked)

    @property
    def done(self) -> bool:
        """Whether the block has ended, by itself or by an error."""
        return self._abandoned or bool(self._greenlet.dead)

    @property
    def records(self) -> bool:
        """Whether modules are recorded for the block, whatever it does itself."""
        self.recorders = [recorder for recorder in self.recorders if recorder.open]
        return bool(self.recorders) and self.error is None and self.stopped is None

    @property
    def started(self) -> bool:
        """Whether the block has begun to execute."""
        return bool(self._greenlet) or self.done

    @property
    def enters(self) -> bool:
        """Whether there is something to do for the block in the step of its request."""
        if self.recorders and self.records:
            return True
        if self.done:
            return False
        return not self.started or (self.awaited is not None and self.awaited <= self.visit)

    def resume(self, error: BaseException | None = None) -> None:
        """Let the block execute until it waits again or ends.

        Args:
            error: raised inside the block, at the line where it waits.
        """
        if self.done:
            return
        if self.seconds > self.clock.block or self.clock.in_step > self.clock.step:
            self.overrun = self.clock.exceeded(self)
        if self.overrun is None:
            self._visit(error)
        if self.overrun is not None:
            self.fail(self.overrun)

    def resume_plainly(self) -> None:
        """As ``resume``, for a plain block while the thread is as all blocks find it at first.

        Nothing is exchanged around it: a step may have thousands of visits.
        """
        block, clock = self._greenlet, self.clock
        late = self.seconds > clock.block or clock.in_step > clock.step
        if late or self.overrun is not None or self.done:
            self.resume()
            return
        current = getcurrent()
        if block.parent is not current:
            block.parent = current
        self.wanted = None
        self._switch(None)
        if self.overrun is not None:
            self.fail(self.overrun)

    def _visit(self, error: BaseException | None) -> None:
        with NEUTRAL.left() if NEUTRAL.entered else nullcontext():
            self._visit_with_exchange(error)

    def _visit_with_exchange(self, error: BaseException | None) -> None:
        self._greenlet.parent = greenlet.getcurrent()
        self.wanted = None
        if self._generators is None:
            self._generators = Generators(self._seed)
        EXCHANGE.give(self._generators)
        with self._modes, self.output:
            self._switch(error)
        if self.done:
            EXCHANGE.retire()
        if not self.keeps_generators:
            EXCHANGE.give(None)

    def _switch(self, error: BaseException | None) -> None:
        """Execute the block on the clock. The order of these lines matters, see `watchdog`."""
        clock = self.clock
        clock.thread, clock.started = get_ident(), monotonic()
        try:
            clock.run = self
            if WATCHDOG.rests:
                WATCHDOG.wake()
            if error is None:
                self._greenlet.switch()
            else:
                self._greenlet.throw(error)
        except TimeUp:  # arrived as the block gave control back
            pass
        finally:
            clock.run = None
        if clock.fired:
            try:
                clock.disarm()
            except TimeUp:
                clock.disarm()
        seconds = monotonic() - clock.started
        self.seconds += seconds
        clock.in_step += seconds
        clock.total += seconds

    @property
    def is_at_loop(self) -> bool:
        """Whether the block waits for the step under way, at the head of a loop that takes it."""
        last = self.last_step
        return (
            self.awaited is not None
            and self.awaited <= self.visit
            and (last is None or self.visit < last)  # behind the last turn the block goes on
            and self.overrun is None
        )

    def begin_step(self) -> None:
        """Begin to count the seconds of another step."""
        self.seconds = 0.0

    @property
    def keeps_generators(self) -> bool:
        """Whether the block's generators may stay installed while the forward goes on."""
        interleaver = self.interleaver
        return interleaver is not None and (interleaver.in_forward or interleaver.starting)

    def kill(self) -> None:
        """Unwind the block where it waits; its `finally` clauses run, nothing is recorded.

        A block that does not let itself be unwound, or that belongs to another thread, is never
        resumed again. It is kept, since Python would unwind it once more to free it.
        """
        if self.done:
            return
        if self.attempts < ATTEMPTS:
            try:
                self._visit(greenlet.GreenletExit())
            except greenlet.error:
                EXCHANGE.give(None)
        if not self.done:
            self._abandoned = True
            _ABANDONED.append(self._greenlet)

    def fail(self, error: BaseException) -> None:
        """End the block with an error that the machinery, not the block, met."""
        self.kill()
        self.error = error

    def refuse(self, error: BaseException) -> None:
        """Let a block, which waits at its loop's head, meet an error where it asks for a value.

        Args:
            error: what went wrong as the step was done in its place.
        """
        self.stood, self._refused = self.visit - 1, error
        self.resume()
        if self._refused is not None:  # it has not asked
            self._refused = None
            self.fail(self.error or error)

    def _main(self) -> None:
        try:
            self._target()
        except greenlet.GreenletExit:
            pass
        except StopTrace as stop:
            self.stopped = stop
        except TimeUp as up:
            if self.overrun is not None:
                self.overrun.__traceback__ = up.__traceback__
        except BaseException as error:  # noqa: BLE001  # a block may raise anything, and the engine lives on
            self.error = error
            advise(error)

    def close(self, *, may_wait: bool = False) -> None:
        """Tell the block that its request has ended: loops over steps end, and the rest runs.

        Args:
            may_wait: leave a block that then waits for the request's result to wait for it.
        """
        self.closed = True
        if self.awaited is not None:
            self.resume()
        if not (may_wait and self.waits_for_result):
            self.kill()

    def give_result(self, result: Any) -> None:
        """Let a block that waits for the request's result have it, or an error in its place.

        Args:
            result: what the request ended with; an exception is raised at the block's line.
        """
        self.waits_for_result, self._result = False, result
        self.resume(result if isinstance(result, BaseException) else None)
        self.kill()

    # Called from inside the block's greenlet.

    def enter(self, step: int) -> bool:
        """Wait for a step of the request to begin.

        Returns:
            Whether it has; False once the request has ended.

        Raises:
            OutOfOrderError: the step has passed.
        """
        if self.closed:
            return False
        if step < self.visit:
            raise OutOfOrderError(
                f"Step {step} has passed: the block is in step {self.visit} of its request."
            )
        if step > self.visit:
            self.awaited = step
            self._park()
            self.awaited = None
        return not self.closed

    def result(self) -> Any:
        """What the request ended with. The block waits for it, and no step comes after it."""
        if self._result is None:
            self.waits_for_result = True
            self._park()
        return self._result

    def warn(self, message: str, category: type[Warning]) -> None:
        """Warn in the caller's process, with the user's line."""
        self.output.warn(Notice(message, category, *user_line()))

    def stop(self) -> NoReturn:
        """End the request here: the block is unwound, and what it saved comes back."""
        interleaver = self.interleaver
        self.stopped = StopTrace(keeps_token=interleaver is not None and interleaver.has_sampled)
        raise self.stopped

    def _park(self) -> None:
        if self.stopped is not None:  # the block caught it, as `except BaseException` does
            raise self.stopped
        parent = self._greenlet.parent
        assert parent is not None
        parent.switch()

    def at(self, location: Location) -> Served:
        """What is served at a location, waiting for the forward to reach it.

        Raises:
            OutOfOrderError: this step has passed the location, or ended without it.
        """
        if location == self.place and self.served is not None:
            return self.served
        if self.offers is not None and (given := self.offers.give(self, location)) is not None:
            self._mark(location, sys._getframe(1))
            return given
        return self._wait(location)

    def _mark(self, location: Location, frame: FrameType) -> None:
        found = user_frame(frame)
        self._marked = (location, found.f_code, found.f_lasti) if found else (location, None, 0)

    def _wait(self, location: Location) -> Served:
        frame = user_frame(sys._getframe(2))
        code, at = (frame.f_code, frame.f_lasti) if frame is not None else (None, 0)
        del frame  # it would keep the block's variables alive while the block waits
        if self._refused is not None:
            error, self._refused = self._refused, None
            raise error
        if self.interleaver is None:
            raise NotInTraceError(f"{location.label(self.visit)} was asked for outside a forward.")
        if not self.interleaver.is_ahead(location):
            self.interleaver.asking.check(self, location)
        self.wanted = location
        self._park()
        self._marked = (location, code, at)
        assert self.served is not None
        return self.served
