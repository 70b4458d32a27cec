"""The residual stream in vLLM's fused layers, told apart from its halves."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.checkpoints import A, C
from tests.support.compare import assert_close
from tests.support.oracle import Oracle, replace_layer, zero_mlp

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 1}
ROWS = torch.randn(len(A), 128, generator=torch.Generator().manual_seed(2)) * 3


def test_zeroing_the_first_element_ablates_the_mlp_alone(llama: Any, hf: Oracle) -> None:
    """The layer's update goes, the stream before it stays (B16, B17)."""
    with llama.trace(A, **GREEDY):
        llama.model.layers[1].output[0][:] = 0
        logits = llama.logits.save()
    right = hf.run(A, [zero_mlp(1)]).logits
    assert_close(logits, right, hf.run(A, [replace_layer(1, ROWS * 0)]).logits)


def test_replacing_the_stream_takes_both_elements(llama: Any, hf: Oracle) -> None:
    """A stream written into one element alone has the rest of the old one added to it (B17)."""
    layer = llama.model.layers[1]
    with llama.trace(A, **GREEDY):
        layer.output[0][:] = ROWS
        residual = layer.output[1].save()
        half = llama.logits.save()
    with llama.trace(A, **GREEDY):
        layer.output[0][:] = ROWS
        layer.output[1][:] = 0
        both = llama.logits.save()
    right = hf.run(A, [replace_layer(1, ROWS)]).logits
    assert_close(both, right, half)
    assert_close(half, hf.run(A, [replace_layer(1, ROWS + residual)]).logits, right)


def test_parts_of_a_layer_add_up(llama: Any) -> None:
    """Stream plus attention is the stream after it, and so with the MLP (B18, B19)."""
    with llama.trace(C, **GREEDY):
        embedded = llama.model.embed_tokens.output.save()
        entering, attention, middle, mlp = [].save(), [].save(), [].save(), [].save()
        for i, layer in enumerate(llama.model.layers):
            norm = layer.input_layernorm
            entering.append(norm.output[1] if i else norm.input)
            attention.append(layer.self_attn.output)
            middle.append(layer.post_attention_layernorm.output[1])
            mlp.append(layer.mlp.output)
        last = llama.model.norm.output[1].save()
    assert torch.equal(entering[0], embedded)
    for i, after in enumerate([*entering[1:], last]):
        assert torch.equal(entering[i] + attention[i], middle[i])
        assert torch.equal(middle[i] + mlp[i], after)
        assert_close(middle[i], entering[i] + attention[i], entering[i])


def test_norm_called_on_one_tensor_gives_one(llama: Any, hf: Oracle) -> None:
    """Called on a stream alone the final norm gives the normed tensor, not a pair (B23)."""
    with llama.trace(A, **GREEDY):
        stream = sum(llama.model.layers[3].output).save()
        normed = llama.model.norm(stream).save()
    assert isinstance(normed, torch.Tensor)
    assert_close(normed, hf.reads(A)["model.norm.output"][0], stream)
