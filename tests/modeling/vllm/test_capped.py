"""Gemma 2 caps its logits: once, and before a block sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.checkpoints import A, checkpoint
from tests.support.compare import assert_close

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 1}
CAP = 3.0


@pytest.fixture(scope="module")
def right() -> torch.Tensor:
    """HuggingFace's logits of the last token, [1, vocab]."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        checkpoint("T-GEMMA2", with_tokenizer=True),
        attn_implementation="eager",
        dtype=torch.float32,
    )
    with torch.no_grad():
        return model(torch.tensor([A])).logits[0, -1:]


def test_a_cap_on_the_logits_is_applied_once(
    engine: Callable[..., Any], right: torch.Tensor
) -> None:
    """Logits are HuggingFace's, and so is what a called logits processor gives (B27, case 11)."""
    model = engine("T-GEMMA2")
    with model.trace(A, **GREEDY):
        hidden, residual = model.model.layers[3].output
        called = model.logits_processor(
            model.model.embed_tokens, model.model.norm(hidden[-1:] + residual[-1:])
        ).save()
        logits = model.logits.save()
    assert right.abs().max() < CAP
    uncapped, twice = CAP * torch.atanh(right / CAP), CAP * torch.tanh(right / CAP)
    assert uncapped.abs().max() > CAP
    assert_close(logits, right, uncapped)
    assert_close(logits, right, twice)
    assert_close(called, right, twice)
