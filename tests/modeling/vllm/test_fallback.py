"""Models that vLLM runs through transformers' own code."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.modeling.vllm.scripts.running import Program
from tests.support.checkpoints import A, B
from tests.support.device import TOLERANCE


@pytest.fixture(scope="module")
def fallback() -> Iterator[Program]:
    """A program that runs T-LLAMA so."""
    program = Program(Path(__file__).parent / "scripts" / "fallback.py")
    yield program
    program.end()


def test_rows_stand_behind_an_axis_of_one(fallback: Program) -> None:
    """Each request of a batch reads its own rows, with HuggingFace's values (B11)."""
    facts = fallback.facts("traced")
    assert facts["shapes"] == [[[1, len(ids), 128], *[[1, 1, 128]] * 3] for ids in (A, B)]
    assert max(facts["errors"]) < TOLERANCE
    assert facts["tokens_are_right"]


def test_edits_land_in_their_request(fallback: Program) -> None:
    """An edit in place acts as on HuggingFace, a replacement beside it on its own rows (B11)."""
    facts = fallback.facts("edited")
    assert facts["right"][0] != facts["clean"][0]
    assert facts["tokens"] == facts["right"]
