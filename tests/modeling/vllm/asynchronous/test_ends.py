"""How asynchronous engines end: they are closed, or die."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.modeling.vllm.scripts.running import Program
from tests.support.checkpoints import A
from tests.support.oracle import Oracle

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.fixture(scope="module")
def program() -> Iterator[Program]:
    """A program whose engines end."""
    program = Program(SCRIPTS / "dying.py")
    yield program
    program.end()


def test_one_engine_one_loop(program: Program) -> None:
    """An engine that was built before there was a loop belongs to the first (O18, A23)."""
    assert "belongs to the event loop" in program.facts("another_loop")["text"]


def test_closed_while_a_trace_runs(program: Program) -> None:
    """`aclose` ends the engine's processes, and the trace's reader is told (O13)."""
    facts = program.facts("closed")
    assert "closed while this request ran" in facts["text"]
    assert (facts["left"], facts["dispatched"]) == ([], False)


def test_the_next_engine(program: Program, hf: Oracle) -> None:
    """The next trace builds a new engine (O13)."""
    assert program.facts("built_again")["tokens"] == hf.generate(A, 3).tokens


def test_death_reaches_everyone(program: Program) -> None:
    """Who waits for a dead engine is told at once, with the blocks that ran (O10)."""
    facts = program.facts("core_killed")
    assert facts["types"] == ["EngineDeadError"] * 3
    assert all("dying.py, line " in text for text in facts["texts"])
    assert facts["cause"] == "vllm.v1.engine.exceptions.EngineDeadError"
    assert (facts["dispatched"], facts["cleared"]) == (False, True)
    assert facts["seconds"] < 40
    assert program.wait(60) == 0
