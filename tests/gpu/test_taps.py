"""Declared taps on a GPU in bf16: graphs captured at the build, launched for every decode step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from midstream.errors import InterventionError, OutOfOrderError
from tests.gpu.test_graphs import GREEDY, LAYERS, PROMPT, cosines, engine, prompt, stacked, whole
from tests.support.checkpoints import A, checkpoint
from tests.support.groups import give_experts_a_group

pytestmark = pytest.mark.gpu

STEPS = GREEDY["max_tokens"]
ACTIVATION = "model.layers.*.mlp.source.self_down_proj_0.input"
ATTENTION = "model.layers.*.self_attn.source.self_attn_0.output"
TAPS = (
    *("model.layers.*.output", "model.layers.*.mlp.output"),
    *("model.layers.*.input_layernorm.input", ACTIVATION, ATTENTION),
)


@pytest.fixture(scope="module")
def tapped() -> Iterator[Any]:
    """An engine with declared taps."""
    with engine(taps=TAPS) as model:
        yield model


@pytest.fixture(scope="module")
def eager() -> Iterator[Any]:
    """Without taps and graphs with breaks: every step with a block inside the forward is eager."""
    with engine(max_graphs=0) as model:
        yield model


def test_graphs_are_captured_at_the_build(tapped: Any) -> None:
    """One for each size that vLLM captures for decoding, before any trace, and none afterwards."""
    before = tapped.stats().graphs
    assert before["captures"] == before["held"] >= 8
    assert before["bytes"] > 0
    tapped.trace(PROMPT, block=forced_block("none"), **GREEDY)
    after = tapped.stats().graphs
    assert after["captures"] == before["captures"]
    assert after["replays"] > before["replays"]
    assert after["wrong_guesses"] == after["evictions"] == 0


def forced_block(how: str, tokens: list[int] | None = None) -> Any:
    """A block that reads the streams of all steps, with something written on the way.

    Args:
        tokens: given to the model in every step, so that two engines see the same text.
    """

    def block(model: Any, tracer: Any) -> list[Any]:
        rows = []
        for step in tracer.iter[:]:
            layers = model.model.layers
            if step and how == "norm":
                layers[2].input_layernorm.input = layers[2].input_layernorm.input * 2
            if step and how == "attention":
                heads = layers[2].self_attn.source.self_attn_0
                heads.output = heads.output * 1.5
            if step and how == "activation":
                layers[2].mlp.source.self_down_proj_0.input[:] *= 2
            if step and how == "replace":
                layers[2].mlp.output = layers[2].mlp.output * 3
            if step and how == "steer":
                layers[2].output[0][:] += 4.0
            if step and how == "pair":
                hidden, residual = layers[2].output
                layers[2].output = (hidden * 2, residual * 0.5)
            if step:
                rows.append([sum(layers[i].output)[-1] for i in LAYERS])
            if tokens is not None:
                model.samples[:] = tokens[step]
        return rows

    return block


def forced(model: Any, how: str, tokens: list[int]) -> torch.Tensor:
    """The streams of a request that is given its tokens, [steps, layers, width]."""
    block = forced_block(how, tokens)
    return stacked(model.trace(PROMPT, block=block, **GREEDY).saves["return"])


HOWS = ["none", "norm", "attention", "activation", "replace", "steer", "pair"]


@pytest.mark.parametrize("how", HOWS)
def test_values_are_those_of_eager_steps(tapped: Any, eager: Any, how: str) -> None:
    """Reads and writes at modules and operations are those of an eager engine, in every step.

    (D1, D4, D5, D14).
    """
    tokens = list(
        eager.trace(PROMPT, block=forced_block("none"), **GREEDY).result.outputs[0].token_ids
    )
    before = tapped.stats().steps
    mine, its = forced(tapped, how, tokens), forced(eager, how, tokens)
    after = tapped.stats().steps
    assert after["tapped"] - before["tapped"] == STEPS - 1
    assert after["eager"] - before["eager"] == 1  # the prompt
    assert cosines(mine, its).min() > 0.99
    assert cosines(mine, its).median() > 0.999
    if how != "none":
        clean = forced(tapped, "none", tokens)
        assert cosines(mine[:, 1:], clean[:, 1:]).median() < 0.99
        assert cosines(clean, forced(eager, "none", tokens)).min() > 0.99  # nothing is left behind


def test_values_of_operations(tapped: Any, eager: Any) -> None:
    """An operation's values in replays are the eager engine's, of each step its own (D4, D6)."""

    def block(model: Any, tracer: Any) -> list[Any]:
        rows = []
        for step in tracer.iter[:]:
            if step:
                layer = model.model.layers[LAYERS[1]]
                heads = layer.self_attn.source.self_attn_0.output
                rows.append([heads[-1], layer.mlp.source.self_down_proj_0.input[-1]])
            model.samples[:] = 500 + step
        return rows

    found = [
        model.trace(PROMPT, block=block, **GREEDY).saves["return"] for model in (tapped, eager)
    ]
    for part in (0, 1):
        mine, its = (torch.stack([row[part].float().cpu() for row in rows]) for rows in found)
        assert len(mine) == STEPS - 1
        assert cosines(mine, its).min() > 0.99
        assert cosines(mine[1:], mine[:-1]).median() < 0.99


@pytest.mark.parametrize("count", [1, 3, 8, 64, 200])
def test_batches(tapped: Any, count: int) -> None:
    """Requests of different lengths each have their own rows of a padded graph (D7)."""
    ids = [prompt(i, 5 + i % 23) for i in range(count)]
    with tapped.trace() as tracer:
        for i in range(count):
            with tracer.invoke(ids[i], temperature=0.0, max_tokens=6 + i % 7, ignore_eos=True):
                rows = [].save()
                for _ in tracer.iter[1:]:
                    rows.append([sum(tapped.model.layers[k].output)[-1] for k in LAYERS])
    results = tracer.result if count > 1 else [tracer.result]
    for i in sorted({0, count // 3, count // 2, count - 1}):
        tokens = list(results[i].outputs[0].token_ids)
        saved = rows[i] if count > 1 else rows
        right = whole(tapped, ids[i] + tokens[:-1], len(ids[i]))
        assert cosines(stacked(saved), right).median() > 0.999
        assert cosines(stacked(saved), right).min() > 0.99


def test_a_request_without_a_block_is_as_it_was(tapped: Any) -> None:
    """Plain requests run vLLM's own graphs, before and after edited ones (D1)."""
    before = tapped.stats().steps
    (plain,) = tapped.generate(PROMPT, **GREEDY)
    after = tapped.stats().steps
    assert after["tapped"] == before["tapped"]
    assert after["eager"] == before["eager"]
    tapped.trace(PROMPT, block=forced_block("steer"), **GREEDY)
    (again,) = tapped.generate(PROMPT, **GREEDY)
    assert again.outputs[0].token_ids == plain.outputs[0].token_ids


def test_other_locations_are_errors(tapped: Any) -> None:
    """In a replay too, at the block's line; the engine goes on (D3, G35)."""

    def block(model: Any, tracer: Any) -> None:
        for step in tracer.iter[:]:
            model.model.layers[3].output
            if step == 3:
                model.model.layers[4].self_attn.output

    with pytest.raises(InterventionError) as failure:
        tapped.trace(PROMPT, block=block, **GREEDY)
    assert isinstance(failure.value.__cause__, OutOfOrderError)
    assert "taps=[..., 'model.layers.4.self_attn.output']" in str(failure.value)
    rows = tapped.trace(PROMPT, block=forced_block("none"), **GREEDY).saves["return"]
    assert len(rows) == STEPS - 1


def test_a_cache(tapped: Any) -> None:
    """`tracer.cache` records the declared outputs in replays (D8)."""
    with tapped.trace(PROMPT, **GREEDY) as tracer:
        cache = tracer.cache(modules=["model.layers.3", "model.layers.5.mlp"]).save()
    assert len(cache["model.layers.3"].output) == STEPS
    tokens = list(tracer.result.outputs[0].token_ids)
    right = whole(tapped, PROMPT + tokens[:-1], len(PROMPT))
    with tapped.trace(PROMPT, **GREEDY) as tracer:
        cache = tracer.cache(modules=[f"model.layers.{i}" for i in LAYERS]).save()
    visits = [[sum(cache[f"model.layers.{i}"].output[k])[-1] for i in LAYERS] for k in range(STEPS)]
    assert cosines(stacked(visits[1:]), right).min() > 0.99


def test_a_hybrid() -> None:
    """Linear attention keeps a state, and its decode steps are graphs all the same (D10)."""
    from midstream import VLLM

    give_experts_a_group()
    path = str(checkpoint("T-HYBRID", with_tokenizer=True))
    taps = ["model.layers.*.output", "model.layers.*.mlp.output"]
    arguments = {"dtype": "bfloat16", "max_model_len": 512, "gpu_memory_utilization": 0.1}
    found = []
    for more in ({"max_graphs": 0}, {"taps": taps}):
        with VLLM(path, dispatch=True, **arguments, **more) as model:
            right = None if not found else found[0][0]
            block = hybrid_block(right)
            traced = model.trace(A, block=block, temperature=0.0, max_tokens=12, ignore_eos=True)
            tokens = list(traced.result.outputs[0].token_ids)
            found.append((tokens, stacked(traced.saves["return"])))
            steps = model.stats().steps
    assert steps["tapped"] == 11
    (_, its), (_, mine) = found
    assert cosines(mine, its).min() > 0.99
    assert cosines(mine[1:], mine[:-1]).median() < 0.99


def hybrid_block(tokens: list[int] | None) -> Any:
    """Read two layers in every step, with an edit of one; given tokens, force them."""

    def block(model: Any, tracer: Any) -> list[Any]:
        rows = []
        for step in tracer.iter[:]:
            model.model.layers[1].mlp.output = model.model.layers[1].mlp.output * 2
            if step:
                rows.append([sum(model.model.layers[i].output)[-1] for i in (2, 3)])
            else:
                model.model.layers[3].output
            if tokens is not None:
                model.samples[:] = tokens[step]
        return rows

    return block
