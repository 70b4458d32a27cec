"""Ranks with copies of one head of keys, and with adapters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.modeling.vllm import test_reads as reads
from tests.modeling.vllm.parallel.checking import (
    GREEDY,
    LAYER,
    PARAMETERS,
    check_edit,
    weight_of,
)
from tests.support.checkpoints import A, B, C
from tests.support.compare import assert_close
from tests.support.oracle import Oracle, edit_module


def test_copies_of_a_head_of_keys(one_key_head: Any, oracle: Callable[[str], Oracle]) -> None:
    """Where ranks have copies of the keys, they are there once, and a write reaches all copies."""
    hf, model = oracle("T-MQA"), one_key_head
    keys = [key for key in reads._keys(hf) if "base_layer" not in key]
    got = model.trace(C, block=reads._reading(keys), **GREEDY).saves
    right = hf.reads(C)
    for key in keys:
        reads._assert_location(got[key], right[key], key)
    assert tuple(got[f"{'model.layers.2'}.self_attn.qkv_proj.output"][0].shape) == (9, 384)

    def edited(model: Any, tracer: Any) -> None:
        model.get(LAYER).self_attn.qkv_proj.output[0][:, 256:320] *= -1.5

    change = edit_module(f"{LAYER}.self_attn.k_proj", lambda rows: rows * -1.5)
    check_edit(model, hf, edited, change, hf.run(A).logits)


def test_whole_parameters_with_copies(one_key_head: Any, oracle: Callable[[str], Oracle]) -> None:
    """A fused parameter whose keys are on both ranks has them once."""
    with one_key_head.trace(B, **GREEDY):
        weight = one_key_head.get(LAYER).self_attn.qkv_proj.param("weight").clone().save()
    paths = PARAMETERS[f"{LAYER}.self_attn.qkv_proj"]
    assert torch.equal(weight, weight_of(oracle("T-MQA"), paths))


def test_an_adapter(one_key_head: Any, adapter: Any, adapted: Oracle, oracle: Any) -> None:
    """With an adapter all is as on HuggingFace with it, and without it as without.

    They are not in one batch: vLLM's kernels for adapters on a CPU give a request that has none the
    last one there is (F16).
    """
    from vllm.lora.request import LoRARequest

    lora, plain = LoRARequest("adapter", 1, str(adapter)), oracle("T-MQA")
    with one_key_head.trace(C, lora_request=lora, **GREEDY):
        fused = one_key_head.get(LAYER).self_attn.qkv_proj.output[0].save()
        one_key_head.get(LAYER).mlp.act_fn.output[:, 100:200] = 0
        logits = one_key_head.logits.save()
    with one_key_head.trace(C, **GREEDY):
        without = one_key_head.logits.save()
    zeroed = edit_module(
        f"{LAYER}.mlp.down_proj",
        lambda rows: rows.index_fill(1, torch.arange(100, 200), 0),
        "input",
    )
    key = f"{LAYER}.self_attn.qkv_proj.output"
    assert_close(fused, adapted.reads(C, [1])[key][0], plain.reads(C, [1])[key][0])
    assert_close(logits, adapted.run(C, [zeroed]).logits, plain.run(C, [zeroed]).logits)
    assert_close(without, plain.run(C).logits, adapted.run(C).logits)
