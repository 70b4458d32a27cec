"""A block may call modules on values of its own, and look at their parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from midstream.errors import InterventionError
from tests.modeling.vllm.conftest import Neighbour, plain_tokens
from tests.support.checkpoints import CHECKPOINTS, B, C
from tests.support.compare import assert_close
from tests.support.oracle import Oracle

NAMES = tuple(CHECKPOINTS)
GREEDY = {"temperature": 0.0, "max_tokens": 1}
Oracles = Callable[[str], Oracle]


@pytest.mark.parametrize("name", ["T-LLAMA", "T-QWEN3"])
def test_logit_lens(name: str, engine: Any, oracle: Oracles) -> None:
    """Norm and head, called on any layer's stream, give what HuggingFace's give (B27)."""
    model, reference = engine(name), oracle(name)
    with model.trace(C, **GREEDY):
        lens = []
        for layer in model.model.layers:
            stream = sum(layer.output)
            lens.append(model.logits_processor(model.lm_head, model.model.norm(stream)))
        lens.save()
    streams = reference.reads(C, layers=())
    for i, logits in enumerate(lens):
        stream = streams[f"residual.{i}"]
        with torch.no_grad():
            right = reference.model.lm_head(reference.model.model.norm(stream))
            without_norm = reference.model.lm_head(stream)
        assert_close(logits, right, without_norm)


def test_called_modules_are_not_traced(llama: Any, hf: Oracle) -> None:
    """A call is no visit: the locations of the called modules still give the model's own pass.

    (A48).
    """
    right = hf.reads(C)
    with llama.trace(C, **GREEDY):
        stream = sum(llama.model.layers[0].output)
        called = llama.model.norm(stream).save()
        logits_called = llama.logits_processor(llama.lm_head, called).save()
        mlp_called = llama.model.layers[3].mlp(stream).save()
        neurons = llama.model.layers[3].mlp.act_fn.output.save()
        normed = llama.model.norm.output[0].save()
        processed = llama.logits_processor.output.save()
    assert_close(normed, right["model.norm.output"][0], called)
    assert_close(processed, right["logits"], logits_called[-1:])
    assert_close(neurons, right["model.layers.3.mlp.act_fn.output"], neurons.roll(1, 0))
    assert mlp_called.shape == (len(C), 128)


def test_called_module_leaves_the_blocks_value_alone(llama: Any) -> None:
    """A kernel that works in place does not change the value it was called on."""
    with llama.trace(C, **GREEDY):
        hidden, residual = llama.model.layers[1].output
        before = (hidden.clone(), residual.clone()).save()
        llama.model.norm(hidden, residual)
        after = (hidden, residual).save()
        logits = llama.logits.save()
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[1], after[1])
    with llama.trace(C, **GREEDY):
        clean = llama.logits.save()
    assert torch.equal(logits, clean)


def test_head_cannot_be_called_by_itself(llama: Any) -> None:
    """VLLM does not run its head alone; the error says what to call instead (B27, G44)."""
    refused = pytest.raises(InterventionError, match=r"UnsupportedError: .*logits_processor\(model")
    with refused as failure, llama.trace(B, **GREEDY):
        llama.lm_head(llama.model.norm.output[0])
    assert isinstance(failure.value.__cause__, NotImplementedError)


@pytest.mark.parametrize("path", ["", "model", "model.layers.1", "model.layers.1.self_attn.attn"])
def test_attention_cannot_be_called(llama: Any, path: str) -> None:
    """What uses the cache of the whole step is refused before it runs; the batch is unharmed."""
    alone = plain_tokens(llama, B, max_tokens=6)
    other = Neighbour(llama, B, max_tokens=6)

    def block(model: Any, tracer: Any) -> None:
        rows = model.model.layers[1].output[0]
        model.get(path)(torch.arange(40), rows.repeat(8, 1), rows.repeat(8, 1))

    where = path.replace(".", r"\.") or "model"
    refused = rf"UnsupportedError: '{where}' cannot be called in a block: it contains attention"
    with pytest.raises(InterventionError, match=refused):
        llama.trace(C, block=block, **GREEDY)
    assert other.tokens() == alone


def test_parameters_can_be_read(llama: Any, hf: Oracle) -> None:
    """A module's parameters are those of the checkpoint (B35)."""
    with llama.trace(B, **GREEDY):
        head = llama.lm_head.weight.save()
        gain = llama.model.norm.weight.save()
    assert torch.equal(head, hf.model.lm_head.weight)
    assert torch.equal(gain, hf.model.model.norm.weight)


def test_methods_of_a_module_are_not_traced(llama: Any, hf: Oracle) -> None:
    """`forward`, or a method that calls modules, hands nothing over to blocks that wait there."""
    right = hf.reads(B, layers=[2])["model.layers.2.mlp.output"]
    with llama.trace(**GREEDY) as tracer:
        with tracer.invoke(B):
            mlp = llama.model.layers[2].mlp.output.save()
        with tracer.invoke(C):
            rows = llama.model.layers[0].mlp.output
            called = llama.model.layers[2].mlp.forward(rows).save()
            logits = llama.compute_logits(rows).save()
            embedded = llama.model.embed_input_ids(torch.tensor([3, 4])).save()
            same = llama.model.layers[2].mlp(rows).save()
    assert_close(mlp, right, called[: len(B)])
    assert torch.equal(called, same)
    assert logits.shape == (len(C), 128)
    assert torch.equal(embedded, hf.model.model.embed_tokens.weight[[3, 4]])


def test_forward_of_attention_cannot_be_called(llama: Any) -> None:
    """It is a call of the module by another name."""
    with pytest.raises(InterventionError, match=r"self_attn' cannot be called in a block"):
        with llama.trace(B, **GREEDY):
            llama.model.layers[0].self_attn.forward(None, None)


WEIGHT_WRITES: dict[str, Callable[[Any], Any]] = {
    "in place": lambda norm: norm.weight.zero_(),
    "item": lambda norm: norm.weight.__setitem__(0, 0),
    "view": lambda norm: norm.weight.detach().view(2, -1)[1].mul_(2),
    "data": lambda norm: norm.weight.data.fill_(2),
    "numpy": lambda norm: norm.weight.numpy().__setitem__(0, 0),
    "parameters": lambda norm: [weight.zero_() for weight in norm.parameters()],
    "named": lambda norm: dict(norm.named_parameters())["weight"].zero_(),
    "state": lambda norm: norm.state_dict()["weight"].zero_(),
    "dtype": lambda norm: norm.half(),
    "hook": lambda norm: norm.register_forward_hook(lambda *_: None),
}


@pytest.mark.parametrize("how", WEIGHT_WRITES)
def test_no_block_changes_the_model(llama: Any, how: str) -> None:
    """Whatever way a write into a weight takes, it is the block's error, and nothing has changed.

    All requests share the weights.
    """
    before, write = plain_tokens(llama), WEIGHT_WRITES[how]

    def block(model: Any, tracer: Any) -> None:
        write(model.model.norm)

    with pytest.raises(InterventionError, match="all requests|read-only"):
        llama.trace(B, block=block, **GREEDY)
    assert plain_tokens(llama) == before


def test_weights_compute_like_others(llama: Any, hf: Oracle) -> None:
    """What a block computes from weights, and a copy of one, is its own."""
    with llama.trace(B, **GREEDY):
        norm = llama.model.norm
        copy = norm.weight.clone()
        copy *= 2
        scaled = llama.model.layers[0].mlp.output * norm.weight
        scaled += 1
        many = sum(weight.numel() for weight in norm.parameters())
        found = [copy, scaled, many].save()
    gain = hf.model.model.norm.weight
    assert torch.equal(found[0], gain * 2)
    assert found[1].shape == (len(B), 128)
    assert found[2] == gain.numel()


@pytest.mark.parametrize("rows", [torch.zeros(3, 256), torch.zeros(3, 128).half()])
def test_a_linear_layer_refuses_rows_it_cannot_take(llama: Any, rows: torch.Tensor) -> None:
    """A module called on rows of another width or dtype is the block's error, not the engine's."""

    def block(model: Any, tracer: Any) -> Any:
        return model.model.layers[1].mlp(rows)

    with pytest.raises(InterventionError, match="takes rows of 128 of torch.float32"):
        llama.trace(B, block=block, **GREEDY)
    assert len(plain_tokens(llama)) == 3
