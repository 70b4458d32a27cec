"""A mixture of experts: router and combined output are served, and experts can be ablated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.conftest import TINY
from tests.support.checkpoints import A, checkpoint
from tests.support.compare import assert_close
from tests.support.groups import give_experts_a_group

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 1}
LAYER, EXPERT = 1, 2


@pytest.fixture(scope="module")
def mixtral() -> Iterator[Any]:
    """An engine on T-MIXTRAL."""
    from midstream import VLLM

    give_experts_a_group()
    with VLLM(str(checkpoint("T-MIXTRAL", with_tokenizer=True)), dispatch=True, **TINY) as model:
        yield model


@pytest.fixture(scope="module")
def reference() -> Any:
    """HuggingFace's model of the same checkpoint."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        checkpoint("T-MIXTRAL", with_tokenizer=True),
        attn_implementation="eager",
        dtype=torch.float32,
    ).eval()


def mixture(block: Any, rows: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """The two likeliest experts of each row, weighed by the softmax over the two."""
    weights, chosen = logits.softmax(-1).topk(2, -1)
    weights = weights / weights.sum(-1, keepdim=True)
    out = torch.zeros_like(rows)
    for row in range(len(rows)):
        for weight, expert in zip(weights[row], chosen[row], strict=True):
            gate, up = (block.experts.gate_up_proj[expert] @ rows[row]).chunk(2)
            down = block.experts.down_proj[expert]
            out[row] += weight * (down @ (torch.nn.functional.silu(gate) * up))
    return out


@torch.no_grad()
def test_router_and_experts_are_locations(mixtral: Any, reference: Any) -> None:
    """Router logits have a column an expert; the experts' output is their mixture (B21, B30)."""
    with mixtral.trace(A, **GREEDY):
        moe = mixtral.model.layers[LAYER].block_sparse_moe
        rows = moe.input.save()
        router = moe.gate.output[0].save()
        combined = moe.experts.output.save()
    block = reference.model.layers[LAYER].mlp
    right = rows @ block.gate.weight.T
    assert router.shape == (len(A), 4)
    assert_close(router, right, right.roll(1, -1))
    assert_close(combined, mixture(block, rows, right), mixture(block, rows, right.roll(1, -1)))


@torch.no_grad()
def test_an_expert_is_ablated_in_the_router(mixtral: Any, reference: Any) -> None:
    """Minus infinity in its router logit leaves the mixture to the other experts (B30)."""
    with mixtral.trace(A, **GREEDY):
        moe = mixtral.model.layers[LAYER].block_sparse_moe
        rows = moe.input.save()
        moe.gate.output[0][:, EXPERT] = -torch.inf
        combined = moe.experts.output.save()
    block = reference.model.layers[LAYER].mlp
    clean = rows @ block.gate.weight.T
    without = clean.index_fill(1, torch.tensor([EXPERT]), -torch.inf)
    assert_close(combined, mixture(block, rows, without), mixture(block, rows, clean))


@torch.no_grad()
def test_chosen_experts_are_read_from_the_router(mixtral: Any, reference: Any) -> None:
    """A row's largest router logits are the experts that HuggingFace's router chooses (B30)."""
    with mixtral.trace(A, **GREEDY):
        moe = mixtral.model.layers[LAYER].block_sparse_moe
        rows = moe.input.save()
        chosen = moe.gate.output[0].topk(2).indices.sort(-1).values.save()
    _, _, indices = reference.model.layers[LAYER].mlp.gate(rows)
    right = indices.sort(-1).values
    assert chosen.tolist() == right.tolist()
    assert len({tuple(row) for row in right.tolist()}) > 1  # rows differ, so that it could be wrong
