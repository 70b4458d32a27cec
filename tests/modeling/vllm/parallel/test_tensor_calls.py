"""What a block calls on two ranks takes and gives whole tensors; parameters are whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from midstream.errors import InterventionError
from tests.modeling.vllm.parallel.checking import (
    GREEDY,
    HEAD,
    LAYER,
    PARAMETERS,
    weight_of,
)
from tests.support.checkpoints import B, C
from tests.support.compare import assert_close
from tests.support.oracle import Oracle


def test_modules_called_by_a_block(two: Any, hf: Oracle) -> None:
    """Whole tensors go in and come out, divided inside or not (F7)."""
    right = hf.reads(C, layers=[1])
    with two.trace(C, **GREEDY):
        layer = two.get(LAYER)
        again = layer.self_attn.qkv_proj(layer.self_attn.qkv_proj.input)[0].save()
        fused = layer.self_attn.qkv_proj.output[0].clone()
        z = layer.self_attn.o_proj.input
        projected = layer.self_attn.o_proj(z)[0].save()
        both = layer.mlp.gate_up_proj.output[0]
        neurons = layer.mlp.act_fn(both).save()
        down = layer.mlp.down_proj(neurons)[0].save()
        stream = sum(layer.output)
        lens = two.logits_processor(two.lm_head, two.model.norm(stream)).save()
        fused.save()
    assert torch.equal(again, fused)
    for got, key in ((projected, "self_attn.o_proj"), (neurons, "mlp.act_fn"), (down, "mlp")):
        expected = right[f"{LAYER}.{key}.output"]
        expected = expected[0] if isinstance(expected, tuple) else expected
        assert_close(got, expected, expected.roll(HEAD, -1))
    with torch.no_grad():
        normed = hf.model.model.norm(right["residual.1"])
        expected = hf.model.lm_head(normed)
    assert_close(lens, expected, expected.roll(64, -1))


def test_whole_parameters(two: Any, llama: Any, hf: Oracle) -> None:
    """`param` gives the whole in one GPU's order, as on one rank; `.weight` this rank's piece.

    (B35, F5, F8).
    """

    def block(model: Any, tracer: Any) -> dict[str, Any]:
        return {path: model.get(path).param("weight").clone() for path in PARAMETERS}

    for model in (two, llama):
        got = model.trace(B, block=block, **GREEDY).saves
        for path, theirs in PARAMETERS.items():
            assert torch.equal(got[path], weight_of(hf, theirs)), path
    with two.trace(B, **GREEDY):
        piece = two.lm_head.weight.shape.save()
    assert tuple(piece) == (64, 128)


def test_a_tokens_row_of_the_head(two: Any, hf: Oracle) -> None:
    """Tokens of both ranks' halves have their own rows, which give their logits (case 42)."""
    tokens = [3, 63, 64, 100]
    with two.trace(C, **GREEDY):
        last = two.model.norm.output[0][-1].clone()
        rows = two.lm_head.param("weight")[tokens]
        products = (rows @ last).save()
        rows = rows.clone().save()
        logits = two.logits[0, tokens].save()
    weight = hf.model.lm_head.weight
    assert torch.equal(rows, weight[tokens])
    assert_close(products, logits, logits.roll(1))


@pytest.mark.parametrize(
    ("statement", "match"),
    [
        (lambda model: model.lm_head.param("wait"), "has no parameter 'wait'"),
        (lambda model: model.lm_head.param("weight").zero_(), "shared by all requests"),
        (lambda model: model.get(LAYER).mlp.act_fn(torch.zeros(2, 128)), "it takes 512"),
    ],
)
def test_refused_calls(two: Any, statement: Callable[[Any], Any], match: str) -> None:
    """A parameter there is not, a write into one, and a piece in the place of a whole."""
    with pytest.raises(InterventionError, match=match):
        two.trace(B, block=lambda model, tracer: statement(model), **GREEDY)
