"""vLLM's Transformers backend: HuggingFace's own modules inside the engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from midstream import VLLM
from tests.conftest import TINY
from tests.support.checkpoints import A, B, checkpoint
from tests.support.compare import assert_close

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 1}
LAYER = 1


@pytest.fixture(scope="module")
def right() -> dict[str, torch.Tensor]:
    """HuggingFace's answers. The backend changes the model's class for the whole process."""
    from transformers import AutoModelForCausalLM

    path = checkpoint("T-QWEN2", with_tokenizer=True)
    model = AutoModelForCausalLM.from_pretrained(
        path, attn_implementation="eager", dtype=torch.float32
    )
    with torch.no_grad():
        a, b = (model(torch.tensor([ids]), output_hidden_states=True) for ids in (A, B))
        layer = model.model.layers[LAYER]
        hook = layer.register_forward_hook(lambda module, args, output: output * 2.0)
        doubled = model(torch.tensor([B])).logits[0, -1:]
        hook.remove()
    return {
        "stream of A": a.hidden_states[LAYER + 1],
        "stream of B": b.hidden_states[LAYER + 1],
        "next of A": a.hidden_states[LAYER + 2],
        "next of B": b.hidden_states[LAYER + 2],
        "logits of A": a.logits[0, -1:],
        "logits of B": b.logits[0, -1:],
        "doubled": doubled,
    }


@pytest.fixture(scope="module")
def backend(right: dict[str, torch.Tensor]) -> Iterator[Any]:
    """An engine that runs T-QWEN2 with HuggingFace's layers."""
    path = str(checkpoint("T-QWEN2", with_tokenizer=True))
    with VLLM(path, dispatch=True, model_impl="transformers", **TINY) as model:
        yield model


def test_rows_stand_behind_an_axis_of_one(backend: Any, right: dict[str, torch.Tensor]) -> None:
    """Each request of a batch has its rows on the second axis, read and written (B10, B11)."""
    layers = backend.model.layers
    with backend.trace(**GREEDY) as tracer:
        with tracer.invoke(A):
            stream = layers[LAYER].output.save()
            logits = backend.logits.save()
        with tracer.invoke(B):
            stream = layers[LAYER].output.clone().save()
            layers[LAYER].output[:] *= 2.0
            logits = backend.logits.save()
    assert [rows.shape for rows in stream] == [(1, 5, 128), (1, 3, 128)]
    for rows, name in zip(stream, "AB", strict=True):
        assert_close(rows, right[f"stream of {name}"], right[f"next of {name}"])
    assert_close(logits[0], right["logits of A"], right["logits of B"])
    assert_close(logits[1], right["doubled"], right["logits of B"])
