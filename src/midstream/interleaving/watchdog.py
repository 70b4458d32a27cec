"""Blocks that run too long are interrupted, by a thread of its own.

Python lets one thread raise an exception in another. It must hit the block and nothing else: the
engine runs in the same thread. So that it cannot, three rules hold together.

- The thread raises only while it holds the clock's lock, after it has announced that it may
  (`fired`), and after it has then seen that the block still executes (`run`).
- The forward thread takes back `run` first, by a plain store, before which nothing can interrupt
  it outside the `try` around the switch; then it looks at `fired`.
- If that is set it waits for the lock and takes back what was raised but has not arrived.

Whichever of the two comes first sees what the other has announced.
"""

from __future__ import annotations

import ctypes
import math
import os
import signal
import sys
import threading
import time
import weakref
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING

import greenlet

from midstream.errors import LimitExceededError
from midstream.interleaving.frames import user_line

if TYPE_CHECKING:
    from midstream.interleaving.run import Run

GRACE = 0.5
"""Seconds between two attempts to end a block; also what its `finally` clauses have."""

ATTEMPTS = 4
"""The last of them leaves the block where it stands."""

_POLLS_BEFORE_REST = 40
_LONGEST_REST = 1.0  # seconds
_raise_in_thread = ctypes.pythonapi.PyThreadState_SetAsyncExc
_raise_in_thread.argtypes = (ctypes.c_ulong, ctypes.py_object)
_thread_state = ctypes.pythonapi.PyThreadState_Get
_thread_state.restype = ctypes.c_void_p


class TimeUp(BaseException):
    """Unwinds a block that ran too long; no `except Exception` of the user's holds it up."""


class Abandon(TimeUp):
    """Gives a block up: while Python makes this exception, the block is left, for good."""

    def __init__(self) -> None:
        super().__init__()
        leave_block()


class _TakenBack(BaseException):
    """Takes the place of an exception that was raised in this thread and has not arrived."""


def _take_back() -> None:
    """Drop what another thread has raised in this one and has not arrived.

    Python can be told that there is nothing to raise, but up to 3.12 it then looks for it for ever:
    every call pays for that, and with a trace function set the first instruction of a function
    never ends. So something is raised here instead, and waited for.
    """
    try:
        _raise_in_thread(threading.get_ident(), _TakenBack)
        while True:
            pass
    except _TakenBack:
        pass


def _recursion_headroom() -> ctypes.c_int | None:
    """Python 3.11's count of exceptions that are being made in this thread; None elsewhere.

    It lies behind the recursion limit in the thread's state, which shows whether it is there.
    """
    if sys.implementation.name != "cpython" or sys.version_info[:2] != (3, 11):
        return None
    state = _thread_state()
    limit = ctypes.c_int.from_address(state + 36)
    return ctypes.c_int.from_address(state + 40) if limit.value == sys.getrecursionlimit() else None


def leave_block() -> None:
    """Go on in the engine, if a block executes; nobody comes back here.

    While Python 3.11 makes an exception, a recursion that is too deep ends the process. It would
    believe for ever that it still makes the one in which the block is left.
    """
    headroom = _recursion_headroom()
    if headroom is not None and headroom.value > 0:
        headroom.value -= 1
    current = greenlet.getcurrent()
    while current is not None and getattr(current, "block_run", None) is None:
        current = current.parent  # a block may use greenlets too
    if current is not None:
        current.parent.switch()


class Clock:
    """How long the blocks of one engine have been executing, and how long they may.

    Args:
        block: seconds that one block may take in a step of its request.
        step: seconds that all blocks of a step may take together.

    Attributes:
        run: the block that executes; None while the engine does.
        thread: the thread it executes in.
        started: when it began to, in seconds of `time.monotonic`.
        fired: whether something may have been raised in the thread.
        in_step: seconds that blocks have taken in this step.
        total: seconds that blocks have taken in all steps.
    """

    def __init__(self, block: float = math.inf, step: float = math.inf):
        self.block, self.step = block, step
        self.run: Run | None = None
        self.thread, self.started = 0, 0.0
        self.fired = False
        self.in_step = self.total = 0.0
        self._lock = threading.Lock()
        if not math.isinf(min(block, step)):
            WATCHDOG.watch(self)

    def begin_step(self) -> None:
        """Begin to count anew."""
        self.in_step = 0.0

    def exceeded(self, run: Run, seconds: float = 0.0) -> LimitExceededError | None:
        """The error of a block that has taken too long, if it has.

        Args:
            seconds: what the present visit has taken, beside the earlier ones.
        """
        if run.seconds + seconds > self.block:
            return LimitExceededError(
                f"The block ran longer than block_timeout={self.block:g} s in one step of its "
                "request. Do less in it, or build the model with a longer `block_timeout`."
            )
        if self.in_step + seconds > self.step:
            return LimitExceededError(
                f"The blocks of one step together ran longer than {self.step:g} s, the most that "
                "they may add to a step. Run fewer requests with blocks at once, or do less in "
                "them."
            )
        return None

    def hold(self) -> Run | None:
        """Interrupt nothing from here on: the block begins what other processes take part in.

        Called while it executes. Its time goes on, and is looked at before each of these: the
        watchdog may never meet a block that does little else.

        Returns:
            What ``release`` is to be given.

        Raises:
            TimeUp: it has been interrupted, or has taken too long, and is to end.
        """
        run, self.run = self.run, None
        if self.fired:
            try:
                self.disarm()
            except TimeUp:
                self.disarm()
        if run is not None:
            error = self.exceeded(run, time.monotonic() - self.started)
            if error is not None and run.overrun is None:
                file, line = user_line()
                error.add_note(f'It was at File "{file}", line {line}.')
                run.overrun = error
            if run.overrun is not None:
                run.interrupted = False
                self.run = run
                raise exception_of(run)
        return run

    def release(self, run: Run | None) -> None:
        """The block may be interrupted again."""
        self.run = run

    def check(self) -> bool:
        """Called by the watchdog: interrupt the block if it is time; whether one executes."""
        run, started = self.run, self.started
        if run is None:
            return False
        now = time.monotonic()
        if now >= run.next_attempt:
            error = self.exceeded(run, now - started)
            if error is not None:
                self._fire(run, started, error)
        return True

    def _fire(self, run: Run, started: float, error: LimitExceededError) -> None:
        file, line = user_line(sys._current_frames().get(self.thread))
        with self._lock:
            self.fired = True
            if self.run is not run or self.started != started:
                return
            if run.overrun is None:
                error.add_note(f'It was at File "{file}", line {line}.')
                run.overrun = error
            run.attempts += 1
            run.next_attempt = time.monotonic() + GRACE
            run.interrupted = True
            _raise_in_thread(self.thread, exception_of(run))
            _interrupt_wait(self.thread)

    def disarm(self) -> None:
        """Take back what was raised and has not arrived. Called by the forward thread."""
        with self._lock:
            _take_back()
            self.fired = False


def exception_of(run: Run) -> type[TimeUp]:
    """What is to end a block: after several attempts, what leaves it."""
    return TimeUp if run.attempts < ATTEMPTS else Abandon


class Watchdog:
    """The thread that looks at the clocks of this process, and rests while no block executes.

    Attributes:
        rests: whether it has to be woken when a block executes.
    """

    def __init__(self) -> None:
        self._begin()
        os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        """A new process has no thread yet, and no engine."""
        self.rests = True
        self._clocks: weakref.WeakSet[Clock] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._gate = threading.Lock()  # open when a block has begun
        self._gate.acquire()
        self._thread: threading.Thread | None = None

    def watch(self, clock: Clock) -> None:
        """Look at a clock as long as it is in use."""
        with self._lock:
            self._clocks.add(clock)
            # Not when a block begins: what is raised in a thread that starts another may hit that.
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._look, name="midstream-watchdog", daemon=True
                )
                self._thread.start()

    def wake(self) -> None:
        """Begin to look; called after a clock's `run` is set, if the thread rests.

        What ends an earlier block may still arrive between any two of these lines, so each is one
        that Python does not divide, and the thread looks now and then without being woken.
        """
        with suppress(RuntimeError):  # another engine's block has opened it
            self._gate.release()
        self.rests = False

    def _look(self) -> None:
        while True:
            self._rest()
            idle = 0
            while idle < _POLLS_BEFORE_REST:
                time.sleep(self._period())
                idle = 0 if self._check() else idle + 1

    def _check(self) -> bool:
        with self._lock:
            clocks = list(self._clocks)
        busy = False
        for clock in clocks:
            busy = clock.check() or busy
        return busy

    def _period(self) -> float:
        with self._lock:
            shortest = min((min(c.block, c.step) for c in self._clocks), default=1.0)
        return min(0.25, max(0.01, shortest / 8))

    def _rest(self) -> None:
        self._gate.acquire(blocking=False)
        self.rests = True  # a block that begins after this wakes the thread; others are seen now
        while not self._check():
            if self._gate.acquire(timeout=_LONGEST_REST):
                break
        self.rests = False


WATCHDOG = Watchdog()


# A wait in C (`time.sleep`, a lock, a socket) sees an exception only when it ends, but a signal at
# once. Signals are answered in the main thread, where an engine's own process runs its forward.

_signals: list[int] = []


def listen(number: int) -> None:
    """Let a signal end a block's wait; called in the main thread of an engine's process."""
    if number not in _signals:
        _signals.append(number)
    signal.signal(number, _on_signal)


def _interrupt_wait(thread: int) -> None:
    if _signals and thread == threading.main_thread().ident:
        signal.pthread_kill(thread, _signals[0])


def _on_signal(number: int, frame: FrameType | None) -> None:
    """Raise in the block that was to be interrupted; nothing anywhere else."""
    run: Run | None = getattr(greenlet.getcurrent(), "block_run", None)
    if run is None or not run.interrupted:  # the engine's turn
        return
    run.interrupted = False
    _take_back()  # once is enough
    raise exception_of(run)
