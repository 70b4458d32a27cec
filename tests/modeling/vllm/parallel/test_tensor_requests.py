"""Many requests, edits, stored objects and sessions on two ranks."""

from __future__ import annotations

from typing import Any

import torch

from tests.modeling.vllm.conftest import plain_tokens
from tests.modeling.vllm.parallel.checking import (
    GREEDY,
    LAYER,
)
from tests.support.checkpoints import LONG, A
from tests.support.compare import assert_close
from tests.support.oracle import Oracle, edit_module


def test_many_requests_end_out_of_order(two: Any) -> None:
    """Twenty-four at once, of all lengths, are each what they are alone (F17)."""
    prompts = [LONG[i * 5 :][: 3 + (i * 11) % 28] for i in range(24)]
    lengths = [1 + (i * 7) % 12 for i in range(24)]

    def alone(ids: list[int], length: int, scale: float) -> Any:
        with two.trace(ids, temperature=0.0, ignore_eos=True, max_tokens=length) as tracer:
            values = [].save()
            for _ in tracer.all():
                two.get(LAYER).mlp.act_fn.output[:, ::3] *= scale
                values.append(two.get("model.layers.2").self_attn.qkv_proj.output[0][-1].clone())
        return values, list(tracer.result.outputs[0].token_ids)

    with two.trace(temperature=0.0, ignore_eos=True) as tracer:
        found = [].save()
        for i in range(24):
            with tracer.invoke(prompts[i], max_tokens=lengths[i]):
                values = []
                for _ in tracer.all():
                    two.get(LAYER).mlp.act_fn.output[:, ::3] *= i / 8
                    key = two.get("model.layers.2").self_attn.qkv_proj.output[0][-1]
                    values.append(key.clone())
                found.append((i, values))
    together = dict(found)
    assert sorted(together) == list(range(24))
    for i in (0, 5, 11, 17, 23):
        values, _ = alone(prompts[i], lengths[i], i / 8)
        assert len(together[i]) == len(values) == lengths[i]
        right, got = torch.stack(values), torch.stack(together[i])
        assert_close(got, right, torch.stack(together[(i + 1) % 24])[:1].expand_as(right))


def test_random_numbers_agree(two: Any, llama: Any) -> None:
    """Numbers drawn in a block are the same on both ranks, and as on one (F9)."""

    def block(model: Any, tracer: Any) -> dict[str, Any]:
        rows = model.get(LAYER).mlp.act_fn.output
        noise = torch.randn(rows.shape)
        rows += noise
        return {"noise": noise, "logits": model.logits}

    got, right = (model.trace(A, block=block, **GREEDY).saves for model in (two, llama))
    assert torch.equal(got["noise"], right["noise"])
    assert_close(got["logits"], right["logits"], right["logits"].roll(1, -1))


def test_edits_stored_objects_and_sessions(two: Any, hf: Oracle) -> None:
    """An installed edit, an object of the engine's and a session work on both ranks.

    (C89).
    """
    vector = two.put("vector", torch.full((256,), 2.0))
    with two.edit(name="scaled"):
        two.get(LAYER).mlp.act_fn.output[:] *= vector
    try:
        with two.session():
            with two.trace(A, **GREEDY):
                rows = two.get(LAYER).mlp.down_proj.input.clone().save()
                logits = two.logits.save()
            with two.trace(A, edits=[], **GREEDY):
                down = two.get(LAYER).mlp.down_proj
                down.input = rows
                again = two.logits.save()
    finally:
        two.clear_edits()
    change = edit_module(f"{LAYER}.mlp.down_proj", lambda rows: rows * 2, "input")
    right = hf.run(A, [change]).logits
    assert_close(logits, right, hf.run(A).logits)
    assert_close(again, right, hf.run(A).logits)


def _exchanges(worker: Any) -> int:
    return int(worker.model_runner.ranks.group.exchanges)


def test_no_exchange_without_a_block(two: Any) -> None:
    """Steps in which no block waits exchange nothing between ranks (F12)."""

    def count() -> int:
        first, second = two.vllm_entrypoint.collective_rpc(_exchanges)
        assert first == second
        return first

    before = count()
    plain_tokens(two, A, max_tokens=8)
    assert count() == before
    with two.trace(A, temperature=0.0, max_tokens=8, ignore_eos=True):
        two.get(LAYER).output[0]
    once = count() - before
    assert 0 < once <= 4
    with two.trace(A, temperature=0.0, max_tokens=1):
        two.get(LAYER).output[0]
    assert count() - before == 2 * once


def test_ranks_draw_the_same_tokens(two: Any, hf: Oracle) -> None:
    """Tokens that are drawn at random, with a seed or without, are the ones both ranks go on with.

    A rank with other tokens would add what belongs to them to the stream (F9).
    """
    for seed in (None, 3):
        with two.trace(A, temperature=1.0, seed=seed, max_tokens=6, ignore_eos=True) as tracer:
            streams = []
            for _ in tracer.all():
                streams.append(sum(two.model.layers[2].output)[-1:].clone())
            streams.save()
        ids = [*A, *tracer.result.outputs[0].token_ids[:-1]]
        right = hf.reads(ids, layers=())["residual.2"][len(A) - 1 :]
        assert_close(torch.cat(streams), right, right.roll(1, 0))
