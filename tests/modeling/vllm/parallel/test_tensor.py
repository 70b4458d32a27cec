"""Two ranks, each with half of the model: blocks see and change whole tensors, in one GPU's order.

The engine's ranks are processes; the reference is HuggingFace's forward, or one rank's engine.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from midstream import VLLM
from midstream.errors import InterventionError, UnsupportedError
from tests.modeling.vllm import test_attention as attention
from tests.modeling.vllm import test_reads as reads
from tests.modeling.vllm import test_writes as writes
from tests.modeling.vllm.parallel.checking import (
    GREEDY,
    HEAD,
    LAYER,
    check_edit,
)
from tests.support.checkpoints import A, C, checkpoint
from tests.support.compare import assert_close
from tests.support.oracle import Oracle, edit_module


def interleaved(tensor: torch.Tensor, *widths: int) -> torch.Tensor:
    """A fused output as ranks have it one after the other: the known wrong order."""
    parts = tensor.split(list(widths), -1)
    return torch.cat([part.chunk(2, -1)[rank] for rank in (0, 1) for part in parts], -1)


def test_every_location_equals_huggingface(two: Any, hf: Oracle) -> None:
    """At the first, a middle and the last layer, and around them, all is whole and right.

    (F1, F2, F4).
    """
    keys = list(reads._keys(hf))
    got = two.trace(C, block=reads._reading(keys), **GREEDY).saves
    right = hf.reads(C)
    assert len(keys) > 100
    for key in keys:
        reads._assert_location(got[key], right[key], key)


def test_fused_outputs_are_in_one_gpus_order(two: Any, hf: Oracle) -> None:
    """Queries, keys and values stand one after the other, and so do gate and up (F2, F3)."""
    with two.trace(C, **GREEDY):
        fused = two.get(LAYER).self_attn.qkv_proj.output[0].save()
        both = two.get(LAYER).mlp.gate_up_proj.output[0].save()
    right = hf.reads(C, layers=[1])
    for got, key, widths in (
        (fused, "self_attn.qkv_proj", (256, 128, 128)),
        (both, "mlp.gate_up_proj", (256, 256)),
    ):
        expected = right[f"{LAYER}.{key}.output"][0]
        assert_close(got, expected, interleaved(expected, *widths))


def test_stream_at_every_layer(two: Any, hf: Oracle) -> None:
    """The stream that leaves each layer is HuggingFace's."""
    with two.trace(C, **GREEDY):
        pairs = [layer.output for layer in two.model.layers].save()
    right = hf.reads(C, layers=range(4))
    for i, (hidden, residual) in enumerate(pairs):
        assert_close(hidden + residual, right[f"residual.{i}"], hidden)


def test_pattern_from_queries_and_keys(two: Any, hf: Oracle) -> None:
    """Attention recomputed from what its module is given is HuggingFace's (case 44)."""
    with two.trace(C, **GREEDY):
        q, k, _ = two.get(LAYER).self_attn.attn.inputs[0]
        given = (q.clone(), k.clone()).save()
    right = attention.attentions(hf, C)
    assert_close(attention.pattern(*given), right, right.roll(1, 0))


def test_operations_inside_a_forward(two: Any, hf: Oracle) -> None:
    """Operations whose tensors are whole, or known pieces, are served whole."""
    with two.trace(C, **GREEDY):
        forward = two.get(LAYER).self_attn.source
        q, k, v = (part.clone() for part in forward.qkv_split_0.output)
        parts = (q, k, v).save()
        rotated = forward.self_rotary_emb_0.output.save()
        attended = forward.self_attn_0.output.save()
    right = hf.reads(C, layers=[1])
    fused = right[f"{LAYER}.self_attn.qkv_proj.output"][0].split([256, 128, 128], -1)
    for got, expected in zip(parts, fused, strict=True):
        assert_close(got, expected, expected.roll(HEAD, -1))
    keys = right[f"{LAYER}.self_attn.attn.inputs"][0][1]
    assert_close(rotated[1], keys, keys.roll(HEAD, -1))
    z = right[f"{LAYER}.self_attn.attn.output"]
    assert_close(attended, z, z.roll(HEAD, -1))


def test_unknown_pieces_are_refused(two: Any) -> None:
    """What differs between the ranks in no known way is refused by name, not shown wrongly."""

    def block(model: Any, tracer: Any) -> None:
        model.get(LAYER).self_attn.o_proj.source.self_quant_method_apply_0.output

    with pytest.raises(InterventionError, match="differs between the ranks") as raised:
        two.trace(C, block=block, **GREEDY)
    assert isinstance(raised.value.__cause__, UnsupportedError)


def test_a_cache_of_all_modules(two: Any, hf: Oracle) -> None:
    """What `tracer.cache()` records is whole too."""
    with two.trace(C, **GREEDY) as tracer:
        cache = tracer.cache(include_inputs=True)
    right = hf.reads(C, layers=[1])
    for key in ("self_attn.qkv_proj", "mlp.act_fn", "mlp.down_proj", "self_attn.attn", "mlp"):
        recorded, path = cache[f"{LAYER}.{key}"], f"{LAYER}.{key}"
        reads._assert_location(recorded.output, right[f"{path}.output"], path)
        reads._assert_location(recorded.inputs, right[f"{path}.inputs"], path)


def test_repeats_are_identical(two: Any) -> None:
    """Twenty traces of one prompt give the same bits."""

    def block(model: Any, tracer: Any) -> Any:
        layer = model.get(LAYER)
        fused = layer.self_attn.qkv_proj.output[0]
        layer.mlp.act_fn.output[:, 7] *= 2
        return {"values": [fused, layer.output[0], model.logits]}

    first, *others = [two.trace(C, block=block, **GREEDY).saves["values"] for _ in range(20)]
    for other in others:
        assert all(map(torch.equal, first, other))


def test_every_edit_equals_huggingface(two: Any, hf: Oracle) -> None:
    """Each edit of whole tensors, in place or by assignment, has HuggingFace's effect."""
    clean = hf.run(A).logits
    for block, change in writes.EDITS.values():
        check_edit(two, hf, block, change, clean)


@pytest.mark.parametrize("head", range(4))
def test_one_heads_output_is_its_own(two: Any, hf: Oracle, head: int) -> None:
    """A head's columns are the same on two ranks as on one, wherever they are changed."""
    columns = slice(head * HEAD, (head + 1) * HEAD)

    def zeroed(rows: torch.Tensor) -> torch.Tensor:
        return rows.index_fill(1, torch.arange(256)[columns], 0.0)

    def where_it_enters(model: Any, tracer: Any) -> None:
        model.get(LAYER).self_attn.o_proj.input[:, columns] = 0

    def where_it_leaves(model: Any, tracer: Any) -> None:
        attn = model.get(LAYER).self_attn.attn
        attn.output = zeroed(attn.output)

    change = edit_module(f"{LAYER}.self_attn.o_proj", zeroed, "input")
    for block in (where_it_enters, where_it_leaves):
        check_edit(two, hf, block, change, hf.run(A).logits)


@pytest.mark.parametrize("part", ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"])
def test_columns_of_fused_outputs(two: Any, hf: Oracle, part: str) -> None:
    """Every second column of one part of a fused output, changed, changes that part's alone."""
    owner, fused = (
        ("mlp", "gate_up_proj")
        if "proj" in part[-4:] and part[0] in "gu"
        else (
            "self_attn",
            "qkv_proj",
        )
    )
    start, width = {
        "q_proj": (0, 256),
        "k_proj": (256, 128),
        "v_proj": (384, 128),
        "gate_proj": (0, 256),
        "up_proj": (256, 256),
    }[part]
    chosen = torch.arange(0, width, 2)

    def in_place(model: Any, tracer: Any) -> None:
        model.get(f"{LAYER}.{owner}.{fused}").output[0][:, start + chosen] *= -1.5

    def assigned(model: Any, tracer: Any) -> None:
        module = model.get(f"{LAYER}.{owner}.{fused}")
        rows, bias = module.output
        new = rows.clone()
        new[:, start + chosen] *= -1.5
        module.output = (new, bias)

    def changed(rows: torch.Tensor) -> torch.Tensor:
        rows[:, chosen] *= -1.5
        return rows

    change = edit_module(f"{LAYER}.{owner}.{part}", changed)
    for block in (in_place, assigned):
        check_edit(two, hf, block, change, hf.run(A).logits)


def test_neurons_and_their_inputs(two: Any, hf: Oracle) -> None:
    """Neurons of both ranks are cut where they are computed and where they are used."""
    neurons = torch.tensor([3, 127, 128, 250])

    def computed(model: Any, tracer: Any) -> None:
        model.get(LAYER).mlp.act_fn.output[:, neurons] = 0

    def used(model: Any, tracer: Any) -> None:
        down = model.get(LAYER).mlp.down_proj
        down.input = down.input.index_fill(1, neurons, 0.0)

    def inside(model: Any, tracer: Any) -> None:
        model.get(LAYER).mlp.source.maybe_fused_act_quant_0.output[:, neurons] = 0

    change = edit_module(
        f"{LAYER}.mlp.down_proj", lambda rows: rows.index_fill(1, neurons, 0.0), "input"
    )
    for block in (computed, used, inside):
        check_edit(two, hf, block, change, hf.run(A).logits)


def test_a_skipped_piece(two: Any, hf: Oracle) -> None:
    """What stands for a module's output is cut, and is what the block then reads."""
    value = torch.randn(len(A), 256, generator=torch.Generator().manual_seed(5))

    def block(model: Any, tracer: Any) -> None:
        act_fn = model.get(LAYER).mlp.act_fn
        act_fn.skip(value)
        assert torch.equal(act_fn.output, value)

    change = edit_module(f"{LAYER}.mlp.down_proj", lambda rows: value[: len(rows)], "input")

    def edited(model: Any, tracer: Any) -> dict[str, Any]:
        block(model, tracer)
        return {"logits": model.logits}

    trace = two.trace(A, block=edited, **GREEDY)
    assert_close(trace.saves["logits"], hf.run(A, [change]).logits, hf.run(A).logits)


def test_a_wrong_shape_is_refused(two: Any) -> None:
    """A replacement as large as one rank's piece is refused with both shapes (O6)."""
    with pytest.raises(InterventionError, match=r"was assigned \[5, 128\], but .* is \[5, 256\]"):
        with two.trace(A, **GREEDY):
            two.get(LAYER).self_attn.o_proj.input = torch.zeros(5, 128)


@pytest.mark.parametrize("argument", ["data_parallel_size", "decode_context_parallel_size"])
def test_other_kinds_of_parallelism_are_refused(argument: str) -> None:
    """They are refused where the model is made, with the reason and what to do (O21, F14)."""
    with pytest.raises(UnsupportedError, match=f"{argument}=2 is not supported"):
        VLLM(str(checkpoint("T-LLAMA")), tensor_parallel_size=2, **{argument: 2})
