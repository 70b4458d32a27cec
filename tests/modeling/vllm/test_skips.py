"""`module.skip(value)` in the engine: the same result alone and in a batch, at every step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from midstream.errors import InterventionError
from tests.modeling.vllm.conftest import Neighbour, model_of, place, plain_tokens
from tests.support.checkpoints import A, B, C
from tests.support.oracle import Change, Oracle, assert_close, replace_layer

pytestmark = pytest.mark.usefixtures("serving")

GREEDY = {"temperature": 0.0, "ignore_eos": True}


def random_rows(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, 128, generator=torch.Generator().manual_seed(seed)) * 3


def replace_mlp(layer: int, value: torch.Tensor) -> Change:
    """HuggingFace's counterpart of skipping an MLP: rows of one value, whatever the step."""
    return Change("mlp", lambda rows, start: value[: len(rows)].to(rows), layer)


@contextmanager
def inner_calls(model: Any, path: str) -> Iterator[list[int]]:
    """Rows with which the engine calls a module inside the one that is skipped."""
    seen: list[int] = []
    module = model_of(model).get_submodule(path)
    hook = module.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    try:
        yield seen
    finally:
        hook.remove()


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside-another"])
def test_a_skipped_mlp(llama: Any, hf: Oracle, beside: bool) -> None:
    """Its output is the value, and it runs only if the step has another request (O7, C67, G48)."""
    value = random_rows(len(A), 1)
    right, clean = hf.run(A, [replace_mlp(1, value)]), hf.run(A)
    alone = plain_tokens(llama, B, max_tokens=4)
    with llama.trace(A, max_tokens=1, **GREEDY):  # what modules return is known from here on
        llama.model.layers[3].output
    with inner_calls(llama, "model.layers.1.mlp.gate_up_proj") as calls:
        other = Neighbour(llama, B, max_tokens=4) if beside else None
        with llama.trace(A, max_tokens=1, **GREEDY):
            mlp = llama.model.layers[1].mlp
            mlp.skip(value)
            read = mlp.output.save()
            logits = llama.logits.save()
        calls = calls[:1]  # the step of the trace
    assert_close(logits, right.logits, clean.logits)
    assert torch.equal(read, value)
    assert calls == ([len(A) + len(B)] if beside else [])
    if other is not None:
        assert other.tokens() == alone


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside-another"])
def test_a_skipped_layer_still_fills_its_cache(llama: Any, hf: Oracle, beside: bool) -> None:
    """A layer with attention runs, so that later steps find its keys; its pair is the value.

    (O7, C67, G48).
    """
    pair = random_rows(len(A), 1), random_rows(len(A), 2)
    change = replace_layer(1, sum(pair))
    right = hf.generate(A, 4, changes=[change], when="prefill")
    clean = hf.generate(A, 4)
    assert right.tokens != clean.tokens
    with llama.trace(A, max_tokens=1, **GREEDY):  # what modules return is known from here on
        llama.model.layers[3].output
    other = Neighbour(llama, B, max_tokens=6) if beside else None
    with llama.trace(A, max_tokens=4, **GREEDY) as tracer:
        llama.model.layers[1].skip(pair)
        logits = []
        for _ in tracer.iter[:4]:
            logits.append(llama.logits)
        logits.save()
    assert_close(torch.cat(logits), right.logits, clean.logits)
    assert tracer.result.outputs[0].token_ids == right.tokens
    if other is not None:
        other.tokens()


def test_a_skip_in_every_step(llama: Any, hf: Oracle) -> None:
    """An MLP skipped at the prefill and at each decode step equals HuggingFace's so replaced."""
    value = random_rows(len(A), 4)
    right = hf.generate(A, 5, changes=[replace_mlp(2, value)])
    first = hf.generate(A, 5, changes=[replace_mlp(2, value)], when="prefill")
    with inner_calls(llama, "model.layers.2.mlp.gate_up_proj") as calls:
        with llama.trace(A, max_tokens=5, **GREEDY) as tracer:
            logits = []
            for step in tracer.iter[:5]:
                llama.model.layers[2].mlp.skip(value if step == 0 else value[:1])
                logits.append(llama.logits)
            logits.save()
    assert_close(torch.cat(logits), right.logits, first.logits)
    assert calls[1:] == []


def test_requests_skip_different_modules(llama: Any, hf: Oracle) -> None:
    """Requests of one step that skip different modules get what each gets alone (O7, C67)."""
    prompts, layers = [A, B, C], [0, 2, 2]
    values = [random_rows(len(prompt), seed) for seed, prompt in enumerate(prompts)]
    with llama.trace(max_tokens=3, **GREEDY) as tracer:
        for prompt, layer, value in zip(prompts, layers, values, strict=True):
            with tracer.invoke(prompt):
                llama.model.layers[layer].mlp.skip(value)
                logits = llama.logits.save()
    for got, prompt, layer, value in zip(logits, prompts, layers, values, strict=True):
        assert_close(got, hf.run(prompt, [replace_mlp(layer, value)]).logits, hf.run(prompt).logits)


def test_the_embedding_and_the_head_can_be_skipped(llama: Any, hf: Oracle) -> None:
    """Modules at both ends, with their one tensor; the logits are then the block's."""
    rows, scores = random_rows(len(A), 5), torch.randn(1, 128)
    scores[0, 77] = 50.0
    embedding = hf.architecture.roles.get("embedding", "model.embed_tokens")
    right = hf.run(A, [Change(embedding, lambda _, start: rows.clone())])
    with llama.trace(A, max_tokens=1, **GREEDY):
        llama.model.embed_tokens.skip(rows)
        logits = llama.logits.save()
    with llama.trace(A, max_tokens=1, **GREEDY) as tracer:
        llama.logits_processor.skip(scores)
        given = llama.logits.save()
    assert_close(logits, right.logits, hf.run(A).logits)
    assert torch.equal(given, scores)
    assert tracer.result.outputs[0].token_ids == [77]


def test_the_whole_model_can_be_skipped(llama: Any, hf: Oracle) -> None:
    """The root's rows go to the head, though the model has run."""
    rows = random_rows(len(A), 6)
    with torch.no_grad():
        right = hf.model.lm_head(rows[-1:])
    with llama.trace(A, max_tokens=1, **GREEDY):
        llama.skip(rows)
        logits = llama.logits.save()
    assert_close(logits, right, hf.run(A).logits)


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside-another"])
def test_a_wrong_shape_fails_at_the_line(llama: Any, beside: bool) -> None:
    """The error names both shapes and the user's line, for this request alone."""
    alone = plain_tokens(llama, B, max_tokens=4)
    other = Neighbour(llama, B, max_tokens=4) if beside else None
    with pytest.raises(InterventionError, match=r"^ValueError: model\.model\.layers\.1\.skip") as e:
        with llama.trace(A, max_tokens=1, **GREEDY):
            llama.model.layers[1].skip(random_rows(len(A), 1))  # one tensor
    assert "[5, 128], but the module returns ([5, 128], [5, 128])" in str(e.value)
    assert place(__file__, "one tensor") in str(e.value)
    assert other is None or other.tokens() == alone


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside-another"])
def test_what_is_inside_cannot_be_read(llama: Any, beside: bool) -> None:
    """A location inside a skipped module did not run, also where it ran for another request."""
    value = random_rows(len(A), 1)
    other = Neighbour(llama, B, max_tokens=4) if beside else None
    with pytest.raises(InterventionError, match=r"did not run in this step: the block skips") as e:
        with llama.trace(A, max_tokens=1, **GREEDY):
            llama.model.layers[1].mlp.skip(value)
            llama.model.layers[1].mlp.down_proj.output  # inside
    assert str(e.value).startswith("OutOfOrderError")
    assert place(__file__, "inside") in str(e.value)
    assert other is None or len(other.tokens()) == 4


def test_a_late_skip_is_refused(llama: Any) -> None:
    """A module that was passed cannot be skipped any more."""
    with pytest.raises(InterventionError, match=r"^OutOfOrderError: .*mlp\.skip\.i0"):
        with llama.trace(A, max_tokens=1, **GREEDY):
            llama.model.layers[2].output
            llama.model.layers[1].mlp.skip(random_rows(len(A), 1))
