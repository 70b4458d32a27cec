"""What an engine captured goes on on HuggingFace, with gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.checkpoints import A, B
from tests.support.compare import GUARD

LAYER, TOKEN = 2, 7
TOLERANCE = 1e-4


def gradient_by_hand(model: Any, ids: list[int]) -> torch.Tensor:
    """The gradient of a logit with respect to a layer's stream, by hooks, ``[tokens, width]``."""
    hf = AutoModelForCausalLM.from_pretrained(model.repo, dtype=torch.float32).eval()
    kept = []
    hook = hf.model.layers[LAYER].register_forward_hook(lambda *call: kept.append(call[2]))
    logits = hf(torch.tensor([ids])).logits
    hook.remove()
    (gradient,) = torch.autograd.grad(logits[0, -1, TOKEN], kept[0])
    return gradient[0]


def captured(model: Any, ids: list[int]) -> torch.Tensor:
    """A layer's stream on the engine, ``[tokens, width]``."""
    with model.trace(ids, temperature=0.0, max_tokens=1):
        stream = sum(model.model.layers[LAYER].output).save()
    return stream


def gradient_at(local: Any, stream: torch.Tensor, ids: list[int]) -> torch.Tensor:
    """The gradient at a stream that is put into a local model's forward."""
    with local.trace(ids):
        value = stream[None].requires_grad_()
        local.model.layers[LAYER].output = value
        loss = local.logits[0, TOKEN]
        with loss.backward():
            gradient = value.grad.save()
    return gradient[0]


def test_gradients_at_captured_values_are_huggingfaces(llama: Any) -> None:
    """A stream captured on vLLM gives the gradient of a plain HuggingFace run (case 60)."""
    local = llama.transformers()
    right = gradient_by_hand(llama, A)
    scale = right.abs().max()
    got = gradient_at(local, captured(llama, A), A)
    assert (got - right).abs().max() < TOLERANCE * scale
    elsewhere = gradient_at(local, torch.zeros_like(captured(llama, A)) + 0.5, A)
    assert (elsewhere - right).abs().max() > GUARD * TOLERANCE * scale


def test_the_local_model_is_the_same_checkpoint(llama: Any) -> None:
    """`transformers()` has the engine's checkpoint, dtype and tokenizer, or another dtype."""
    local = llama.transformers()
    assert (local.repo_id, local.dispatched) == (llama.repo, False)
    assert local.tokenizer is llama.tokenizer
    with local.trace(B):
        logits = local.logits.save()
    with llama.trace(B, temperature=0.0, max_tokens=1):
        served = llama.logits.save()
    assert logits.dtype == torch.float32
    assert torch.allclose(logits, served, atol=1e-3, rtol=1e-3)
    halved = llama.transformers(dtype=torch.bfloat16)
    halved.dispatch()
    assert halved.module.dtype == torch.bfloat16


def test_gradients_on_an_engine_name_the_way(llama: Any) -> None:
    """A gradient on vLLM is refused, and the error says where there are some."""
    with pytest.raises(RuntimeError, match="TransformersModel"):
        with llama.trace(A, temperature=0.0, max_tokens=1):
            loss = llama.logits[0, TOKEN]
            with loss.backward():
                gradient = loss.grad.save()
