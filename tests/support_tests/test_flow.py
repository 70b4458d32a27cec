"""In the oracle's reads each module receives the very values that the modules before it gave."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.checkpoints import CHECKPOINTS, A, checkpoint
from tests.support.oracle import Oracle
from tests.support_tests.by_hand import HEAD_DIM, heads

# Received <- given. A location is followed by the elements taken from it.
ROTARY_FLOW = """
    self_attn.inputs 1 hidden_states <- input_layernorm.output 0
    self_attn.qkv_proj.input <- input_layernorm.output 0
    self_attn.o_proj.input <- self_attn.attn.output
    self_attn.attn.inputs 0 0 <- self_attn.rotary_emb.output 0
    self_attn.attn.inputs 0 1 <- self_attn.rotary_emb.output 1
    self_attn.output <- self_attn.o_proj.output 0
    post_attention_layernorm.inputs 0 0 <- self_attn.output
    post_attention_layernorm.inputs 0 1 <- input_layernorm.output 1
    mlp.input <- post_attention_layernorm.output 0
    mlp.gate_up_proj.input <- post_attention_layernorm.output 0
    mlp.act_fn.input <- mlp.gate_up_proj.output 0
    mlp.down_proj.input <- mlp.act_fn.output
    mlp.output <- mlp.down_proj.output 0
    output 0 <- mlp.output
    output 1 <- post_attention_layernorm.output 1
    input_layernorm.inputs 0 0 <- inputs 0 1
    input_layernorm.inputs 0 1 <- inputs 0 2
    self_attn.inputs 1 positions <- inputs 0 0
    self_attn.rotary_emb.inputs 0 0 <- inputs 0 0
"""
GPT2_FLOW = """
    ln_1.input <- input
    attn.inputs 1 hidden_states <- ln_1.output
    attn.c_attn.input <- ln_1.output
    attn.c_proj.input <- attn.attn.output
    attn.output <- attn.c_proj.output 0
    mlp.input <- ln_2.output
    mlp.c_fc.input <- ln_2.output
    mlp.act.input <- mlp.c_fc.output 0
    mlp.c_proj.input <- mlp.act.output
    mlp.output <- mlp.c_proj.output 0
"""
FLOWS = {"T-LLAMA": ROTARY_FLOW, "T-QWEN3": ROTARY_FLOW, "T-GPT2": GPT2_FLOW}


@pytest.fixture(scope="module")
def oracles() -> dict[str, Oracle]:
    return {name: Oracle(checkpoint(name)) for name in CHECKPOINTS}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_values_flow_inside_a_layer(oracles: dict[str, Oracle], name: str) -> None:
    """Inside a layer, what a module receives is what the module before it returned."""
    oracle = oracles[name]
    reads = oracle.reads(A)
    for layer in (2, 3):
        for line in FLOWS[name].strip().splitlines():
            received, given = (
                _take(reads, oracle.architecture.layer_path(layer, end.strip()))
                for end in line.split("<-")
            )
            assert torch.equal(received, given), line


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_values_flow_between_layers(oracles: dict[str, Oracle], name: str) -> None:
    """A layer receives what the one before it returned, and so does the final norm."""
    oracle = oracles[name]
    reads = oracle.reads(A, layers=range(4))
    gpt2 = name == "T-GPT2"
    paths = [oracle.architecture.layer_path(i, "") for i in range(4)]
    paths.append(oracle.architecture.roles["norm"])
    for path, following in pairwise(paths):
        args, kwargs = reads[f"{following}.inputs"]
        given = reads[f"{path}.output"]
        given = (given,) if gpt2 else given
        received = args if len(args) == len(given) else args[1:]  # layers get positions first
        assert kwargs == {}
        assert len(received) == len(given)
        assert all(map(torch.equal, received, given)), following


def test_query_and_key_norms_see_the_fused_projection_by_head(oracles: dict[str, Oracle]) -> None:
    """Each of the norms gets its part of q|k|v cut into heads, and the rotation gets the result."""
    reads = oracles["T-QWEN3"].reads(A)
    at = "model.layers.2.self_attn."
    fused: Tensor = reads[at + "qkv_proj.output"][0]
    q, k = fused[:, : 4 * HEAD_DIM], fused[:, 4 * HEAD_DIM : 6 * HEAD_DIM]
    assert torch.equal(reads[at + "q_norm.input"], heads(q))
    assert torch.equal(reads[at + "k_norm.input"], heads(k))
    rotated = reads[at + "rotary_emb.inputs"][0]
    assert torch.equal(heads(rotated[1]), reads[at + "q_norm.output"])
    assert torch.equal(heads(rotated[2]), reads[at + "k_norm.output"])


def _take(reads: dict[str, Any], location: str) -> Tensor:
    key, *elements = location.split()
    value = reads[key]
    for element in elements:
        value = value[int(element) if element.isdigit() else element]
    assert isinstance(value, Tensor)
    return value
