"""Skips, caches and results in installed edits, and beside them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from midstream.errors import InterventionError, MidstreamWarning
from tests.support.changes import Change
from tests.support.checkpoints import A
from tests.support.oracle import Oracle, assert_close

GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
VALUE = torch.randn(1, 128, generator=torch.Generator().manual_seed(8)) * 3
SKIPPED = [Change("mlp", lambda rows, start: VALUE.expand_as(rows).clone(), 1)]


@pytest.fixture
def model(serving: Any) -> Iterator[Any]:
    """The engine on T-LLAMA, without an edit before and after."""
    yield serving
    serving.clear_edits()


def install_skip(model: Any) -> None:
    """Install an edit that skips an MLP in every step."""
    with model.edit() as (tracer, _):
        for _ in tracer.all():
            rows = len(model.model.layers[1].mlp.input)
            model.model.layers[1].mlp.skip(VALUE.expand(rows, 128))


def test_an_edit_that_skips(model: Any, hf: Oracle) -> None:
    """It acts on plain and on traced requests in every step, as on HuggingFace."""
    right, clean = hf.generate(A, 5, changes=SKIPPED), hf.generate(A, 5)
    assert right.tokens != clean.tokens
    install_skip(model)
    (plain,) = model.generate(A, max_tokens=5, **GREEDY)
    with model.trace(A, max_tokens=5, **GREEDY) as tracer:
        outputs, logits = [], []
        for _ in tracer.iter[:5]:
            outputs.append(model.model.layers[1].mlp.output)
            logits.append(model.logits)
        outputs.save()
        logits.save()
    assert list(plain.outputs[0].token_ids) == right.tokens
    assert_close(torch.cat(logits), right.logits, clean.logits)
    assert torch.equal(torch.cat(outputs), VALUE.expand(len(A) + 4, 128))


def test_what_an_edit_skips_did_not_run_for_the_trace(model: Any) -> None:
    """The trace's block cannot read inside it either."""
    install_skip(model)
    with pytest.raises(InterventionError, match=r"^OutOfOrderError: .*down_proj.*did not run"):
        with model.trace(A, max_tokens=1, **GREEDY):
            model.model.layers[1].mlp.down_proj.output


def test_an_edit_that_records(model: Any) -> None:
    """Its cache is on the output of a plain request, with every step."""
    with model.edit() as (tracer, _):
        cache = tracer.cache("model.layers.1.mlp")
    (output,) = model.generate(A, max_tokens=3, **GREEDY)
    recorded = output.saves["cache"]["model.layers.1.mlp"].output
    assert [len(part) for part in recorded] == [len(A), 1, 1]


def test_an_edit_that_asks_for_the_result(model: Any) -> None:
    """Nobody sends it one: that is its error, at its line, and what it saved before is kept."""
    with model.edit() as (tracer, _):
        seen = [].save()
        seen.append("before")
        seen.append(tracer.result)
    with pytest.warns(MidstreamWarning, match="An installed edit failed in 1 of 1 requests"):
        (output,) = model.generate(A, max_tokens=2, **GREEDY)
    assert output.saves["seen"] == ["before"]
    text = str(output.edit_error)
    assert text.startswith("UnsupportedError: `tracer.result` in an edit is not supported")
    assert "seen.append(tracer.result)" in text
