"""Sampling settings have vLLM's meaning, with a block beside the request and without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from tests.modeling.vllm.conftest import Neighbour, plain_tokens
from tests.support.checkpoints import A, B
from tests.support.compare import assert_close
from tests.support.oracle import Oracle


def traced_tokens(model: Any, ids: list[int] = A, **settings: Any) -> list[int]:
    """Tokens of a request whose block reads its logits."""
    tracer = model.trace(ids, block=lambda model, tracer: model.logits, **settings)
    return list(tracer.result.outputs[0].token_ids)


@pytest.mark.parametrize(
    "settings",
    [
        {"top_k": 1},
        {"top_p": 1e-6},
        {"top_k": 5, "top_p": 1e-6},
        {"min_p": 1.0},
        {"temperature": 1e-4},
    ],
    ids=str,
)
def test_settings_that_leave_one_token_are_greedy(llama: Any, settings: dict[str, Any]) -> None:
    """Cut down to the likeliest token, sampling takes it, traced or not (C31, C38)."""
    settings = {"temperature": 1.0, "max_tokens": 3, **settings}
    greedy = plain_tokens(llama, A, max_tokens=3)
    assert plain_tokens(llama, A, **settings) == greedy
    assert traced_tokens(llama, **settings) == greedy


def level(model: Any, tracer: Any) -> None:
    """Make four tokens about as likely as each other, and all others impossible."""
    model.logits[:] = -1000.0
    model.logits[:, [20, 21, 22, 23]] = torch.tensor([0.0, 0.0, 0.0, -0.5])


@pytest.mark.parametrize(("top_k", "drawn"), [(3, {20, 21, 22}), (0, {20, 21, 22, 23})])
def test_top_k_draws_from_the_k_likeliest(llama: Any, top_k: int, drawn: set[int]) -> None:
    """Many draws are of all of the k likeliest tokens, as a block left them, and no other."""
    settings = {"temperature": 1.0, "max_tokens": 1, "top_k": top_k}
    results = [llama.trace(B, block=level, seed=seed, **settings).result for seed in range(12)]
    assert {result.outputs[0].token_ids[0] for result in results} == drawn


def test_top_k_beside_a_request_without_one(llama: Any) -> None:
    """In one batch each request has its own settings."""
    other = Neighbour(llama, B, max_tokens=6, temperature=1.0, top_k=1)
    tokens = traced_tokens(llama, temperature=1.0, max_tokens=3, seed=5)
    assert other.tokens() == plain_tokens(llama, B, max_tokens=6)
    assert tokens == traced_tokens(llama, temperature=1.0, max_tokens=3, seed=5)
    assert tokens != plain_tokens(llama, A, max_tokens=3)


def test_logits_are_those_before_the_settings(llama: Any, hf: Oracle) -> None:
    """Temperature, penalties, cuts and biases are not in `model.logits` (B8)."""
    settings = {"temperature": 0.5, "repetition_penalty": 1.5, "top_k": 2, "logit_bias": {7: 99.0}}
    with llama.trace(A, max_tokens=1, **settings) as tracer:
        logits = llama.logits.save()
    right = hf.run(A).logits
    assert_close(logits, right, right / 0.5)
    assert tracer.result.outputs[0].token_ids == [7]


def test_seed_repeats(llama: Any) -> None:
    """A seeded request draws the same tokens traced and not, and others with another seed (C38)."""
    settings = {"temperature": 1.0, "max_tokens": 4}
    tokens = plain_tokens(llama, A, seed=3, **settings)
    assert traced_tokens(llama, seed=3, **settings) == tokens
    assert traced_tokens(llama, seed=4, **settings) != tokens


def test_grammar_holds(llama: Any) -> None:
    """A request that may only choose among words does, with and without a block (O4)."""
    choice = StructuredOutputsParams(choice=["t5", "t6"])
    settings = {"temperature": 0.0, "max_tokens": 3, "structured_outputs": choice}
    free = plain_tokens(llama, A)
    assert free[0] not in (5, 6)
    tokens = plain_tokens(llama, A, **settings)
    assert tokens[0] in (5, 6)
    assert traced_tokens(llama, **settings) == tokens
    other = Neighbour(llama, B, max_tokens=6)
    assert traced_tokens(llama, **settings) == tokens
    assert other.tokens() == plain_tokens(llama, B, max_tokens=6)


def test_grammar_is_not_in_the_logits(llama: Any, hf: Oracle) -> None:
    """A block sees the logits before the grammar's mask, and edits what the mask is laid on."""
    choice = StructuredOutputsParams(choice=["t5", "t6"])
    settings = {"temperature": 0.0, "max_tokens": 1, "structured_outputs": choice}
    forced = []
    for token in (5, 6):
        with llama.trace(A, **settings) as tracer:
            logits = llama.logits.clone().save()
            llama.logits[:, token] += 500.0
            llama.logits[:, 9] += 1000.0
        forced.append(tracer.result.outputs[0].token_ids[0])
    right = hf.run(A).logits
    assert_close(logits, right, right.roll(1, -1))
    assert forced == [5, 6]


def test_prompt_log_probabilities_are_no_visit(llama: Any, hf: Oracle) -> None:
    """The logits that vLLM computes for the prompt's tokens are not served as the request's."""
    with llama.trace(A, temperature=0.0, max_tokens=1, prompt_logprobs=1) as tracer:
        processed = llama.logits_processor.output.save()
        logits = llama.logits.save()
    right = hf.run(A).logits
    assert_close(logits, right, hf.run(A[:-1]).logits)
    assert torch.equal(processed, logits)
    of_prompt = tracer.result.prompt_logprobs
    assert [next(iter(entry)) for entry in of_prompt[1:]] == A[1:]


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_result_is_whole(llama: Any, kind: RequestOutputKind) -> None:
    """Whatever kind of output is asked for, the tracer's result has all tokens."""
    settings = {"temperature": 0.0, "max_tokens": 4, "output_kind": kind}
    assert traced_tokens(llama, **settings) == plain_tokens(llama, A, max_tokens=4)
