"""Engines in processes of their own, as they are by default: how requests and engines end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from midstream.modeling.vllm._bootstrap.follow import PARENT
from midstream.modeling.vllm.ending import _waking
from tests.modeling.vllm.scripts.reporting import engine_processes
from tests.modeling.vllm.scripts.running import Program, gone, kill
from tests.support.checkpoints import EOS

SCRIPTS = Path(__file__).parent / "scripts"


@pytest.fixture(scope="module")
def unguarded() -> Iterator[Program]:
    """A script that forgets its guard."""
    program = Program(SCRIPTS / "unguarded.py")
    yield program
    program.end()


@pytest.fixture(scope="module")
def served(
    tmp_path_factory: pytest.TempPathFactory,
    unguarded: Program,  # runs beside it, which saves time
) -> Iterator[Program]:
    """A program that takes one model through everything, in the order of the tests below."""
    program = Program(SCRIPTS / "serving.py", tmp_path_factory.mktemp("serving"))
    yield program
    program.end()


def test_failed_build(served: Program) -> None:
    """What fails in an engine process is the caller's error, in full, and leaves no process.

    (O12).
    """
    facts = served.facts("failed_build")
    assert "SafetensorError: " in facts["text"].splitlines()[0]
    assert facts["seconds"] < 90
    after = served.facts("after_failed_build")
    assert after["processes"] == []
    assert after["dispatched"] is False


def test_length(served: Program) -> None:
    """A request that ends by length brings its saves home."""
    facts = served.facts("length")
    assert facts["shape"] == [5, 128]
    assert (facts["reason"], len(facts["tokens"])) == ("length", 3)


def test_eos(served: Program) -> None:
    """A request that ends by the end-of-sequence token brings its saves home."""
    facts = served.facts("eos")
    assert facts["shape"] == [1, 128]
    assert (facts["reason"], facts["tokens"]) == ("stop", [EOS])


def test_stop_string(served: Program) -> None:
    """A stop string ends a request in the client; the saves come home all the same."""
    facts = served.facts("stop")
    assert facts["shape"] == [1, 128]
    assert (facts["reason"], facts["stop_reason"]) == ("stop", "t77")


def test_abort(served: Program) -> None:
    """An aborted request brings its saves home and has no result, in bounded time."""
    facts = served.facts("abort")
    assert facts["shape"] == [5, 128]
    assert facts["result"] is None


def test_abort_at_once(served: Program) -> None:
    """A request aborted as soon as it is sent ends its trace."""
    facts = served.facts("abort_at_once")
    assert (facts["result"], facts["live"]) == (None, 0)


def test_results_in_blocks(served: Program) -> None:
    """Each sequence's block is given its finished request, whenever and however it ended."""
    facts = served.facts("results")
    assert facts["found"] == facts["right"]
    assert [reason for _, reason in facts["found"]] == ["length"] * 3 + ["stop"] * 3 + [
        "length"
    ] * 3
    assert facts["live"] == 0


def test_result_of_an_aborted_request(served: Program) -> None:
    """A block that waits for the result of an aborted request is told so."""
    facts = served.facts("result_of_an_aborted")
    assert facts["text"].startswith("MidstreamError: The request was aborted")
    assert (facts["shape"], facts["live"]) == ([5, 128], 0)


def test_interrupted_for_a_result(served: Program) -> None:
    """Ctrl-C ends the trace while its block waits for a result and while it goes on with it."""
    facts = served.facts("result_interrupted")
    assert (facts["while_waiting"], facts["while_it_runs"]) == (0, 0)
    assert facts["right_after"]


def test_a_cache_and_a_skip(served: Program) -> None:
    """A cache comes home from another process with what a skip put in its place."""
    facts = served.facts("recorded")
    assert facts["keys"] == ["model.layers.1", "model.layers.2"]
    assert facts["shapes"] == [[5, 128], [1, 128], [1, 128]]
    assert facts["skipped"] == [True, False, False]


def test_two_threads(served: Program) -> None:
    """Traces of two threads wait for each other, and both are right (O13)."""
    facts = served.facts("two_threads")
    assert facts["found"] == facts["expected"]
    assert [len(tokens) for tokens in facts["found"]] == [12, 3] * 3


def test_prompt_over_the_budget(served: Program) -> None:
    """A prompt that does not fit a step is refused, naming both numbers and the argument."""
    assert "max_num_batched_tokens=" in served.facts("too_long")["text"]


def test_interrupt(served: Program) -> None:
    """A terminal's Ctrl-C reaches the caller, ends the request, and leaves the engine right.

    (O13).
    """
    facts = served.facts("interrupt")
    assert facts["raised"] == "KeyboardInterrupt"
    assert facts["live"] == 0
    assert facts["right_after"]
    assert facts["same_processes"]


@pytest.mark.parametrize("what", ["exit", "core_killed"])
def test_death(served: Program, what: str) -> None:
    """A dead engine, by its worker or its core, is an error in bounded time; the next is built.

    (O10).
    """
    facts = served.facts(what)
    assert facts["is_runtime_error"]
    assert "serving.py, line " in facts["text"]  # names the block that ran
    assert facts["cause"] == "vllm.v1.engine.exceptions.EngineDeadError"
    assert facts["seconds"] < 40
    assert facts["dispatched"] is False
    assert facts["left"] == []
    assert served.facts(f"after_{what}")["right_after"]


def test_client_killed(served: Program) -> None:
    """Ten seconds after its client was killed, nothing of an engine is left."""
    facts = served.facts("generating")
    assert len(facts["processes"]) == 2
    assert Path(facts["segment"]).exists()
    kill(served.process.pid)
    assert gone(facts["processes"], seconds=10)
    assert not Path(facts["segment"]).exists()
    assert facts["shared_memory"]
    served.process.wait(10)  # and Python's tracker has removed vLLM's own
    assert vanished([Path("/dev/shm") / name for name in facts["shared_memory"]], seconds=10)


def vanished(paths: list[Path], seconds: float) -> bool:
    """Whether none of the files is there, at the latest after that time."""
    deadline = time.monotonic() + seconds
    while any(path.exists() for path in paths) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not any(path.exists() for path in paths)


def test_client_of_a_fork_killed() -> None:
    """An engine process that vLLM forks, as it does on a GPU, follows its client as well."""
    program = Program(SCRIPTS / "forking.py")
    try:
        pids = program.facts("forked")["processes"]
        assert len(pids) == 1
        assert not gone(pids, seconds=2)
        kill(program.process.pid)
        assert gone(pids, seconds=10)
    finally:
        program.end()


def test_client_killed_while_building() -> None:
    """Ten seconds after its client was killed, nothing of an engine being built is left."""
    program = Program(SCRIPTS / "building.py")
    try:
        program.facts("begins")
        pids = started(program, within=30)
        kill(program.process.pid)
        assert gone(pids, seconds=10)
        assert "built" not in program.seen
    finally:
        program.end()


def started(program: Program, within: float) -> list[int]:
    """The first process of its engine, as soon as there is one."""
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        if found := engine_processes(program.process.pid):
            return [process.pid for process in found]
        time.sleep(0.05)
    pytest.fail(f"No engine process in {within} s.\n{program.tail()}")


def test_core_that_missed_its_signal() -> None:
    """A core that began to wait as it was told to end is woken, and ends."""
    program = Program(SCRIPTS / "waiting.py")
    try:
        program.facts("waits")
        pid = program.process.pid
        os.kill(pid, signal.SIGTERM)
        assert not gone([pid], seconds=1.5)
        with _waking([program.process]):
            assert gone([pid], seconds=5)
    finally:
        program.end()


def test_engine_that_is_told_to_end_while_it_starts() -> None:
    """It says that it has started, and ends; the build fails in bounded time."""
    program = Program(SCRIPTS / "interrupted.py")
    try:
        facts = program.facts("interrupted", 120)
        assert facts["text"].startswith("The engine did not start: ")
        assert "told to end while it started" in facts["text"]
        assert facts["processes"] == []
    finally:
        program.end()


def test_parent_gone_before_anyone_looked() -> None:
    """A process that starts only after its client has ended does not stay."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(30)
    program = Program(SCRIPTS / "waiting.py", environment={PARENT: str(ended.pid)})
    try:
        assert program.wait(60) == -signal.SIGKILL
    finally:
        program.end()


def test_script_without_a_guard(unguarded: Program) -> None:
    """Where vLLM starts its processes afresh, a script without a guard is told to have one.

    (O13, A21, G13).
    """
    facts = unguarded.facts("refused")
    assert "if __name__ == '__main__'" in facts["text"]
    assert facts["processes"] == []
    assert facts["after"] < 60
    assert unguarded.wait(30) == 1
    runs = [name for name in unguarded.seen if name.startswith("run_")]
    assert len(runs) == 2  # the script and the engine core's process; no fork bomb
