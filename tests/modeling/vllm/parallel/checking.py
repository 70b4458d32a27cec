"""What tests of two ranks share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.modeling.vllm import test_writes as writes
from tests.support.checkpoints import A
from tests.support.compare import assert_close
from tests.support.oracle import Change, Oracle

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 1}
LONGER: dict[str, Any] = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True}
LAYER = "model.layers.1"
HEAD = 64  # size of one

Block = Callable[[Any, Any], Any]


def check_edit(model: Any, hf: Oracle, block: Block, change: Change, clean: Any) -> None:
    """A block has the effect of a change of HuggingFace's forward, in the logits and tokens."""

    def edited(model: Any, tracer: Any) -> dict[str, Any]:
        block(model, tracer)
        return {"logits": model.logits}

    trace = model.trace(A, block=edited, **writes.GREEDY)
    right = hf.generate(A, 4, changes=[change], when="prefill")
    assert_close(trace.saves["logits"], right.logits[:1], clean)
    assert list(trace.result.outputs[0].token_ids) == right.tokens


PARAMETERS = {
    "lm_head": "lm_head",
    "model.embed_tokens": "model.embed_tokens",
    "model.norm": "model.norm",
    f"{LAYER}.self_attn.o_proj": f"{LAYER}.self_attn.o_proj",
    f"{LAYER}.mlp.down_proj": f"{LAYER}.mlp.down_proj",
    f"{LAYER}.self_attn.qkv_proj": f"{LAYER}.self_attn.(q_proj k_proj v_proj)",
    f"{LAYER}.mlp.gate_up_proj": f"{LAYER}.mlp.(gate_proj up_proj)",
}


def weight_of(hf: Oracle, paths: str) -> torch.Tensor:
    """HuggingFace's weights of the layers that vLLM has as one."""
    around, _, names = paths.partition("(")
    paths_ = [around + name for name in names.strip(")").split()] or [around]
    return torch.cat([hf.model.get_submodule(path).weight.detach() for path in paths_])
