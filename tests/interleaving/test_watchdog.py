"""A block that runs too long is ended, and nothing else is hit."""

# ruff: noqa: BLE001, SIM105  # blocks that catch what they should not are what this is about

from __future__ import annotations

import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import greenlet
import pytest
import torch

from midstream.errors import LimitExceededError
from midstream.interleaving import run as runs
from midstream.interleaving import watchdog
from midstream.interleaving.run import Run
from midstream.interleaving.watchdog import WATCHDOG, Clock


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attempts follow each other quickly."""
    monkeypatch.setattr(watchdog, "GRACE", 0.1)


def wait() -> None:
    """Give control back, as a block does that waits for a location."""
    greenlet.getcurrent().parent.switch()


def for_ever() -> None:
    """Run Python without end."""
    while True:
        pass


def with_torch() -> None:
    """Run PyTorch without end."""
    value = torch.zeros(64)
    while True:
        value = value + 1


def catching_errors() -> None:
    """Catch what ordinary code catches."""
    while True:
        try:
            for_ever()
        except Exception:
            pass


def in_a_clause() -> None:
    """Go on in `finally`."""
    try:
        for_ever()
    finally:
        for_ever()


def catching_everything() -> None:
    """Do not let go."""
    while True:
        try:
            for_ever()
        except BaseException:
            pass


def waiting_meanwhile() -> None:
    """Catch the interruption, and go on as if nothing had been."""
    try:
        for_ever()
    except BaseException:
        wait()


def ending_well() -> None:
    """Catch the interruption, and end."""
    try:
        for_ever()
    except BaseException:
        pass


def with_greenlets() -> None:
    """Do not let go, in a greenlet of its own."""
    greenlet.greenlet(catching_everything).switch()


def failing_in_a_clause() -> None:
    """Raise something else when interrupted."""
    try:
        for_ever()
    finally:
        raise KeyError("other")


BLOCKS = [
    for_ever, with_torch, catching_errors, in_a_clause, catching_everything, waiting_meanwhile,
    ending_well, with_greenlets, failing_in_a_clause,
]  # fmt: skip


@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_that_runs_too_long_is_ended(block: Callable[[], None]) -> None:
    """Whatever it does about it, it ends soon, with an error that names limit, place and fix."""
    run = Run(block, clock=Clock(0.2))
    begun = time.monotonic()
    run.resume()
    assert time.monotonic() - begun < 10
    assert run.done
    assert isinstance(run.error, LimitExceededError)
    assert "block_timeout=0.2 s" in str(run.error)
    assert f'File "{__file__}", line ' in run.error.__notes__[0]
    sum(range(100_000))  # nothing comes later


def test_the_traceback_is_the_blocks() -> None:
    """An interrupted block fails like any other: its frames are shown."""
    run = Run(for_ever, clock=Clock(0.1))
    run.resume()
    assert run.error is not None
    frames = []
    trace = run.error.__traceback__
    while trace is not None:
        frames.append(trace.tb_frame.f_code.co_name)
        trace = trace.tb_next
    assert frames[-1] == "for_ever"


def test_the_visits_of_a_step_add_up() -> None:
    """Many short visits count as one long one; another step counts anew."""

    def block() -> None:
        while True:
            time.sleep(0.06)
            wait()

    run = Run(block, clock=Clock(1.0))
    for _ in range(12):
        run.begin_step()
        for _ in range(3):
            run.resume()
    assert not run.done
    for _ in range(20):
        run.resume()
    assert isinstance(run.error, LimitExceededError)


def test_blocks_share_the_time_of_a_step() -> None:
    """When a step's time is used up, blocks that come later do not begin; the next step is new."""
    clock = Clock(10, step=0.2)
    begun = []

    def block() -> None:
        begun.append(1)
        time.sleep(0.07)

    made = [Run(block, clock=clock) for _ in range(6)]
    for run in made:
        run.resume()
    failed = [run for run in made if run.error is not None]
    assert len(begun) < 6
    assert len(failed) >= 6 - len(begun) > 0
    assert "together ran longer than 0.2 s" in str(failed[-1].error)
    clock.begin_step()
    run = Run(block, clock=clock)
    run.resume()
    assert run.error is None


def test_time_outside_the_block_does_not_count() -> None:
    """A block that waits may wait for long."""
    run = Run(lambda: (wait(), wait()), clock=Clock(0.1))  # type: ignore[func-returns-value]
    for _ in range(3):
        run.resume()
        time.sleep(0.2)
    assert run.done
    assert run.error is None


@pytest.fixture
def without_finalizers() -> Iterator[None]:
    """No garbage of earlier tests is cleared, whose `__del__` an interruption would rather hit."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("without_finalizers")
def test_an_interruption_hits_no_code_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that give control back just as they are interrupted leave nothing behind."""
    monkeypatch.setattr(watchdog, "ATTEMPTS", 10**9)
    clock, done = Clock(1000), threading.Event()

    def interrupt() -> None:
        while not done.is_set():
            run, started = clock.run, clock.started
            if run is not None:
                clock._fire(run, started, LimitExceededError("now"))
            time.sleep(1e-5)

    class Forward:
        in_forward = True  # generators stay installed, which makes visits short

    def block() -> None:
        while True:
            wait()

    thread = threading.Thread(target=interrupt)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    thread.start()
    interrupted = 0
    try:
        deadline = time.monotonic() + 3
        while time.monotonic() < deadline:
            run = Run(block, clock=clock)
            run.interleaver = Forward()  # type: ignore[assignment]
            while not run.done:
                run.resume()  # raises TimeUp here, or in the next line, if anything can
                sum(range(20))
            assert isinstance(run.error, LimitExceededError)
            interrupted += 1
    finally:
        done.set()
        thread.join()
        sys.setswitchinterval(before)
    assert interrupted > 30


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_late_interruption_is_taken_back(monkeypatch: pytest.MonkeyPatch, goes_on: bool) -> None:
    """One that was decided while the block executed, and comes when it has been left."""
    real, decided = watchdog._raise_in_thread, threading.Event()

    def late(thread: int, kind: object) -> None:
        if kind is not watchdog._TakenBack:
            decided.set()
            time.sleep(0.3)
        real(thread, kind)

    def block() -> None:
        decided.wait()
        if goes_on:
            wait()

    monkeypatch.setattr(watchdog, "_raise_in_thread", late)
    run = Run(block, clock=Clock(0.1))
    run.resume()
    for _ in range(100):  # TimeUp comes here, if at all
        sum(range(100))
        time.sleep(0.005)
    assert isinstance(run.error, LimitExceededError)


@pytest.fixture
def resting(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock that has been watched, with the watchdog at rest."""
    monkeypatch.setattr(watchdog, "_POLLS_BEFORE_REST", 1)
    clock = Clock(0.1)
    Run(lambda: None, clock=clock).resume()
    deadline = time.monotonic() + 10
    while not WATCHDOG.rests and time.monotonic() < deadline:
        time.sleep(0.05)
    assert WATCHDOG.rests
    return clock


def test_the_watchdog_rests_when_no_block_runs(resting: Clock) -> None:
    """Without blocks the thread waits, and it wakes with the next block."""
    run = Run(for_ever, clock=resting)
    run.resume()
    assert isinstance(run.error, LimitExceededError)


def test_a_block_that_could_not_wake_the_watchdog_is_ended(resting: Clock) -> None:
    """Waking may be cut short by what ends another block; the thread looks by itself soon."""
    WATCHDOG.rests = False  # as after a wake that was cut short: nobody will wake it
    run = Run(for_ever, clock=resting)
    run.resume()
    assert isinstance(run.error, LimitExceededError)


@pytest.fixture
def listening(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Signals as an engine's own process has them."""
    monkeypatch.setattr(watchdog, "_signals", [])
    before = signal.getsignal(signal.SIGCONT)
    watchdog.listen(signal.SIGCONT)
    yield
    signal.signal(signal.SIGCONT, before)


def sleeping() -> None:
    """Wait in C."""
    time.sleep(20)


def locked() -> None:
    """Wait for a lock that nobody lets go."""
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def sleeping_on() -> None:
    """Wait in C whatever happens."""
    for _ in itertools.count():
        try:
            time.sleep(20)
        except BaseException:
            pass


@pytest.mark.parametrize("block", [sleeping, locked, sleeping_on, *BLOCKS])
@pytest.mark.usefixtures("listening")
def test_a_signal_ends_a_wait(block: Callable[[], None]) -> None:
    """In an engine's own process a block that waits in C is interrupted too."""
    test_a_block_that_runs_too_long_is_ended(block)


@pytest.mark.usefixtures("listening")
def test_a_signal_of_another_kind_interrupts_nothing() -> None:
    """The signal is used to wake the process too; a block that is in time does not notice."""

    def block() -> None:
        os.kill(os.getpid(), signal.SIGCONT)
        sum(range(100_000))

    os.kill(os.getpid(), signal.SIGCONT)
    run = Run(block, clock=Clock(5))
    run.resume()
    assert run.error is None


def test_a_block_that_cannot_be_ended_is_kept() -> None:
    """Python would unwind an abandoned block once more if it were freed."""
    before = len(runs._ABANDONED)
    Run(catching_everything, clock=Clock(0.1)).resume()
    assert len(runs._ABANDONED) == before + 1


def test_python_traces_functions_after_an_interruption() -> None:
    """A trace function set later, a debugger's or a capture's, does not hold up the next call."""
    code = """
import sys
from midstream.interleaving.run import Run
from midstream.interleaving.watchdog import Clock

def endless():
    while True:
        pass

class Held:
    def __init__(self):
        self.seen = True

run = Run(endless, clock=Clock(0.1))
run.resume()
assert run.error is not None
sys.settrace(lambda frame, event, arg: None)
Held()
sys.settrace(None)
print("went on")
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ran.stdout == "went on\n", ran.stderr


def test_recursion_stays_an_error_after_a_block_was_abandoned() -> None:
    """A recursion that is too deep raises in a later block, and does not end the process."""
    code = """
from midstream.interleaving.run import Run
from midstream.interleaving.watchdog import Clock

def stubborn():
    while True:
        try:
            while True:
                pass
        except BaseException:
            pass

def deep():
    deep()

abandoned = Run(stubborn, clock=Clock(0.1))
abandoned.resume()
assert abandoned.done
run = Run(deep)
run.resume()
print(type(run.error).__name__)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ran.stdout == "RecursionError\n", ran.stderr


def test_what_is_held_is_not_interrupted() -> None:
    """A block that does little else than what must not be left halfway ends between two of these.

    Its time is looked at before each, and the error names the line.
    """
    clock, done = Clock(block=0.3), []

    def block() -> None:
        while True:
            held = clock.hold()
            time.sleep(0.1)
            done.append(len(done))
            clock.release(held)

    run = Run(block, clock=clock)
    began = time.monotonic()
    run.resume()
    assert time.monotonic() - began < 3
    assert isinstance(run.error, LimitExceededError)
    assert __file__ in run.error.__notes__[0]
    assert len(done) in (3, 4)
    assert clock.run is None


def test_a_held_block_that_was_interrupted_before_ends() -> None:
    """What was raised and has not arrived ends it before the next thing is begun."""
    clock, began = Clock(block=0.2), []

    def block() -> None:
        while True:
            for _ in range(100_000):
                pass
            held = clock.hold()
            began.append(1)
            clock.release(held)

    run = Run(block, clock=clock)
    run.resume()
    assert isinstance(run.error, LimitExceededError)
    assert began
