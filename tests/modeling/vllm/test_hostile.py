"""Blocks that wait, loop, print and are killed, in an engine process of its own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.modeling.vllm.scripts.running import Program, gone, kill

SCRIPT = Path(__file__).parent / "scripts" / "hostile.py"


@pytest.fixture(scope="module")
def hostile() -> Iterator[Program]:
    """A program that takes an engine through it, in the order of the tests below."""
    program = Program(SCRIPT)
    yield program
    program.end()


def test_prints_and_warnings_cross_from_the_engines_process(hostile: Program) -> None:
    """They arrive where the caller has redirected them, with the caller's line.

    What the block imports, it imports there.

    (C14).
    """
    facts = hostile.facts("printing")
    process = int(facts["text"].removeprefix("process "))
    assert process != facts["here"]
    assert facts["warnings"] == [["RuntimeWarning", str(SCRIPT)]]


@pytest.mark.parametrize("name", ["sleep", "loop", "stubborn"])
def test_a_block_that_takes_too_long(hostile: Program, name: str) -> None:
    """Even a block that sleeps is interrupted; the engine goes on in the same processes."""
    facts = hostile.facts(name)
    assert "block_timeout=1 s" in facts["text"]
    assert f'File "{SCRIPT}", line ' in facts["text"]
    assert facts["seconds"] < 30
    after = hostile.facts(f"after_{name}")
    assert after["right_after"]
    assert after["same_processes"]
    assert after["live"] == 0


def test_stats_of_another_process(hostile: Program) -> None:
    """They are fetched from the engine's process."""
    facts = hostile.facts("stats")
    assert facts["steps"]["eager"] >= 4
    assert facts["block_seconds"] > 3.0
    assert facts["shared_segments"] == 0


def test_an_engine_killed_inside_a_block(hostile: Program) -> None:
    """The error names the block, nothing is left, and the next trace has a new engine."""
    facts = hostile.facts("core_killed")
    assert "hostile.py, line " in facts["text"]
    assert facts["left"] == []
    assert {"psm", "sem.mp"} <= set(facts["gone"])  # what vLLM's processes shared
    assert hostile.facts("after_core_killed")["right_after"]


def test_a_client_killed_inside_a_block(hostile: Program) -> None:
    """Its engine's processes end although a block executes."""
    processes = hostile.facts("inside")["processes"]
    assert processes
    time.sleep(1.0)
    kill(hostile.process.pid)
    assert gone(processes, seconds=10)
