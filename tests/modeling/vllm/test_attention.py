"""Attention: what enters it, and its pattern, which no kernel gives out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.checkpoints import C
from tests.support.compare import assert_close
from tests.support.oracle import Oracle

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 1}
NAMES = ["T-LLAMA", "T-QWEN3"]
LAYER, HEADS, SIZE = 1, 4, 64


def scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Scaled products [heads, queries, keys]; a group of heads shares its keys."""
    queries = q.unflatten(1, (HEADS, SIZE)).transpose(0, 1)
    keys = k.unflatten(1, (-1, SIZE)).repeat_interleave(HEADS * SIZE // k.shape[1], 1)
    return queries @ keys.permute(1, 2, 0) * SIZE**-0.5


def pattern(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """The causal pattern; queries are the last of the positions that keys have."""
    found = scores(q, k)
    hidden = torch.ones(found.shape[1:], dtype=torch.bool).triu(k.shape[0] - q.shape[0] + 1)
    return found.masked_fill(hidden, -torch.inf).softmax(-1)


def attentions(oracle: Oracle, ids: list[int]) -> torch.Tensor:
    """HuggingFace's pattern of the layer, [heads, tokens, tokens]."""
    with torch.no_grad():
        output = oracle.model(torch.tensor([ids]), output_attentions=True)
    return output.attentions[LAYER][0]


@pytest.mark.parametrize("name", NAMES)
def test_pattern_from_queries_and_keys(
    name: str, engine: Any, oracle: Callable[[str], Oracle]
) -> None:
    """Softmax of the q and k that attention is given is HuggingFace's; times v it is z (B28)."""
    model = engine(name)
    with model.trace(C, **GREEDY):
        attention = model.model.layers[LAYER].self_attn.attn
        q, k, v = attention.inputs[0]
        found = (q.clone(), k.clone(), v.clone()).save()
        z = attention.output.save()
    q, k, v = found
    right = attentions(oracle(name), C)
    assert_close(pattern(q, k), right, scores(q, k).softmax(-1))
    values = v.unflatten(1, (-1, SIZE)).repeat_interleave(HEADS * SIZE // v.shape[1], 1)
    mixed = torch.einsum("hqk,khd->qhd", right, values).flatten(1)
    assert_close(z, mixed, values.flatten(1))


def test_pattern_of_a_generated_token_needs_the_earlier_keys(llama: Any, hf: Oracle) -> None:
    """A later step has one q and one k; with the keys kept from before it has its pattern (B28)."""
    with llama.trace(C, temperature=0.0, max_tokens=4, ignore_eos=True) as tracer:
        keys, rows = [], []
        for _ in tracer.iter[:4]:
            q, k, _ = llama.model.layers[LAYER].self_attn.attn.inputs[0]
            keys.append(k)
            rows.append(pattern(q, torch.cat(keys))[:, -1])
        rows.save()
    ids = [*C, *tracer.result.outputs[0].token_ids[:3]]
    right = attentions(hf, ids)
    for step, row in enumerate(rows):
        query = len(C) - 1 + step
        other = right[:, query, : query + 1].roll(1, -1)
        assert_close(row, right[:, query, : query + 1], other)


@pytest.mark.parametrize("name", NAMES)
def test_attention_called_by_keywords_has_an_input(
    name: str, engine: Any, oracle: Callable[[str], Oracle]
) -> None:
    """Its hidden states are the normed stream that the fused projection receives (B20, case 12)."""
    model = engine(name)
    with model.trace(C, **GREEDY):
        attention = model.model.layers[LAYER].self_attn
        args, kwargs = attention.inputs
        given = kwargs["hidden_states"].save()
        positional = len(args).save()
        projected = attention.qkv_proj.input.save()
    right = oracle(name).reads(C, layers=[LAYER])
    stream = right[f"residual.{LAYER - 1}"]
    assert positional == 0
    assert torch.equal(given, projected)
    assert_close(given, right[f"model.layers.{LAYER}.self_attn.qkv_proj.input"], stream)
