"""Skips, caches and results in installed edits, and beside them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from midstream.errors import InterventionError, MidstreamWarning, UnsupportedError
from tests.modeling.vllm.conftest import line_of
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


def opening_invokes(model: Any, tracer: Any) -> None:
    """An edit that opens an invoke."""
    with tracer.invoke(A):  # a function
        model.logits[:] = 0


def test_invokes_in_an_edit_are_refused(model: Any) -> None:
    """When it is installed, with the line and what to write instead; nothing is installed."""
    said = r"`tracer\.invoke\(\)` in an edit .*_controls\.py, line (\d+)\): an edit has no"
    with pytest.raises(UnsupportedError, match=said) as body:
        with model.edit() as (tracer, _):
            with tracer.invoke(A):  # a body
                model.logits[:] = 0
    with pytest.raises(UnsupportedError, match=said) as function:
        model.edit(name="given", block=opening_invokes)
    for caught, mark in ((body, "a body"), (function, "a function")):
        assert f", line {line_of(__file__, mark)})" in str(caught.value)
        assert caught.value.__context__ is None
    assert model.edits == ()


def test_what_only_looks_like_an_invoke_is_installed(model: Any) -> None:
    """Another object's `invoke` is the user's, in a body and in a function."""

    class Chain:
        def invoke(self, value: int) -> int:
            return value + 1

    def calling(model: Any, tracer: Any) -> Any:
        chain = Chain()
        return {"two": chain.invoke(1)}

    chain = Chain()
    with model.edit():
        three = chain.invoke(2)
        three.save()
    model.edit(block=calling)
    (output,) = model.generate([A], max_tokens=1, **GREEDY)
    assert output.saves == {"three": 3, "two": 2}


def test_an_invoke_that_a_helper_opens_in_an_edit(model: Any) -> None:
    """It is an error of the edit beside the request, which goes on."""

    def helper(opening: Any) -> None:
        with opening.invoke(A):
            pass

    with model.edit() as (tracer, _):
        helper(tracer)
    with pytest.raises(InterventionError, match=r"^UnsupportedError: `tracer\.invoke\(\)` inside"):
        with model.trace(A, max_tokens=1, **GREEDY):
            rows = len(model.model.layers[0].output[0]).save()
    assert rows == len(A)
