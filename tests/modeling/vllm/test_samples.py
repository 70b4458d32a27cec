"""A block may force the token that its request goes on with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from vllm.sampling_params import StructuredOutputsParams

from midstream.errors import InterventionError
from tests.modeling.vllm.conftest import Neighbour, place, plain_tokens
from tests.support.checkpoints import EOS, A, B
from tests.support.oracle import (
    Oracle,
)

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 4}
VECTOR = torch.randn(128, generator=torch.Generator().manual_seed(1)) * 3
ROWS = torch.randn(len(A), 128, generator=torch.Generator().manual_seed(2)) * 3
Block = Callable[[Any, Any], Any]


def force_in_place(model: Any, tracer: Any) -> None:
    model.samples[:] = 99


def force_by_assignment(model: Any, tracer: Any) -> None:
    model.samples = torch.tensor([[99]])


def force_in_another_dtype(model: Any, tracer: Any) -> None:
    model.samples = torch.tensor([[99]], dtype=torch.int32)


@pytest.mark.parametrize("force", [force_in_place, force_by_assignment, force_in_another_dtype])
def test_forced_token(force: Block, llama: Any, hf: Oracle) -> None:
    """The request goes on from the forced token as HuggingFace does (C65)."""
    result = llama.trace(A, block=force, **GREEDY).result
    right, clean = hf.generate(A, 4, force={0: 99}), hf.generate(A, 4)
    assert list(result.outputs[0].token_ids) == right.tokens
    assert right.tokens[1:] != clean.tokens[1:]


def test_forced_end_ends_the_request(llama: Any) -> None:
    """The end-of-sequence token, forced, ends the request as a drawn one does."""
    with llama.trace(A, **GREEDY) as tracer:
        llama.samples[:] = EOS
    completion = tracer.result.outputs[0]
    assert completion.finish_reason == "stop"
    assert len(completion.token_ids) == 1


def test_forced_token_outside_the_vocabulary(serving: Any) -> None:
    """It is this request's ValueError, naming the id and the limits (O6)."""
    text = r"ValueError: model\.samples was given token id {}; the model's ids run from 0 to 127"
    for token in (128, -1):
        refused = pytest.raises(InterventionError, match=text.format(token))
        with refused as failure, serving.trace(A, **GREEDY):
            serving.samples = torch.tensor([[token]])
        assert type(failure.value.__cause__) is ValueError
        assert f"{__file__}" in str(failure.value)
        with refused as failure, serving.trace(A, **GREEDY):
            serving.samples[:] = token  # in place
        assert place(__file__, "in place") in str(failure.value)


def test_forced_token_that_the_grammar_refuses(serving: Any) -> None:
    """It is this request's ValueError, at its line; one that the grammar takes is taken (O6)."""
    choice = StructuredOutputsParams(choice=["t5", "t6"])
    settings = {"temperature": 0.0, "max_tokens": 1, "structured_outputs": choice}
    other = Neighbour(serving, B, max_tokens=6)
    refused = r"ValueError: model\.samples was given token id 9, which the request's grammar"
    with pytest.raises(InterventionError, match=refused) as failure:
        with serving.trace(A, **settings):
            serving.samples = torch.tensor([[9]])  # refused
    assert place(__file__, "refused") in str(failure.value)
    assert other.tokens() == plain_tokens(serving, B, max_tokens=6)
    for token in (5, 6):
        with serving.trace(A, **settings) as tracer:
            serving.samples[:] = token
        assert list(tracer.result.outputs[0].token_ids) == [token]
