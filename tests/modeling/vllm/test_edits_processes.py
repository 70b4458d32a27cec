"""Edits and stored objects where the engine has a process of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.modeling.vllm.scripts.running import Program
from tests.support.changes import scale_layer
from tests.support.checkpoints import A, B
from tests.support.oracle import Oracle

HALVED = [scale_layer(1, 0.5)]


@pytest.fixture(scope="module")
def program() -> Iterator[Program]:
    """A program that takes one model through the scenes of the tests below."""
    program = Program(Path(__file__).parent / "scripts/installing.py")
    yield program
    program.end()


def test_edit_with_a_stored_module(program: Program, hf: Oracle) -> None:
    """Code, a module of the program's own and values travel to the process and back."""
    facts = program.facts("installed")
    assert facts["tokens"] == [hf.generate(prompt, 6, changes=HALVED).tokens for prompt in (A, B)]
    assert facts["norms"] == [6, 6]
    assert facts["counts"] == [0, 1, ["scale"]]


def test_what_the_process_cannot_take_in(program: Program) -> None:
    """The process's own problem with an edit is the error of the one who installs it."""
    facts = program.facts("refused")
    assert "`value` cannot be rebuilt where the block runs: ValueError" in facts["text"]
    assert facts["counts"] == [0, 1, ["scale"]]


def test_clearing_while_another_thread_generates(program: Program, hf: Oracle) -> None:
    """Clearing waits for nobody, and a request that runs keeps its edit to the end."""
    facts = program.facts("cleared")
    assert facts["waited"] < 1.0
    assert facts["still_running"]
    assert facts["tokens"] == hf.generate(A, 200, changes=HALVED).tokens
    assert facts["counts"] == [0, 0, ["scale"]]
    assert facts["clean"] == hf.generate(A, 6).tokens


def test_engine_that_ended(program: Program, hf: Oracle) -> None:
    """An engine that died takes edits and objects along; the next one starts without any."""
    facts = program.facts("ended")
    assert "the engine ended" in facts["text"].lower()
    assert facts["left"] == [0, 0, True]
    assert facts["clean"] == hf.generate(A, 6).tokens
    assert facts["counts"] == [0, 0, []]


def test_engine_that_ends_without_an_answer(program: Program) -> None:
    """A call that the engine was answering when it died is an error, too, in bounded time."""
    facts = program.facts("ended_in_a_call")
    assert "the engine ended" in facts["text"].lower()
    assert facts["seconds"] < 40
    assert facts["left"] == [0, False]
