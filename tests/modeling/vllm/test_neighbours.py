"""A block reads and writes its own request's rows, and leaves no trace in the cache of others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from midstream.errors import InterventionError
from tests.modeling.vllm.conftest import Neighbour, plain_tokens
from tests.support.checkpoints import LONG, A, B
from tests.support.compare import assert_close
from tests.support.device import DEVICE
from tests.support.oracle import (
    Oracle,
    add_vector,
)

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 4}
VECTOR = torch.randn(128, generator=torch.Generator().manual_seed(1)) * 3
ROWS = torch.randn(len(A), 128, generator=torch.Generator().manual_seed(2)) * 3
Block = Callable[[Any, Any], Any]


def misfit(model: Any, tracer: Any) -> None:
    model.model.layers[1].mlp.output = torch.zeros(3, 128)


def out_of_vocabulary(model: Any, tracer: Any) -> None:
    model.samples[:] = 4711


def everything(model: Any, tracer: Any) -> None:
    model.model.embed_tokens.output[:] = 1.0
    model.model.layers[0].mlp.input = ROWS
    for part in model.model.layers[1].output:
        part[:] = 9.0
    model.model.layers[2].output = (ROWS, ROWS)
    model.logits[:] = float("nan")
    model.logits = torch.zeros(1, 128)
    model.samples[:] = 3


@pytest.mark.parametrize("block", [misfit, out_of_vocabulary, everything])
def test_neighbour_keeps_its_tokens(block: Block, llama: Any) -> None:
    """A request in the same batch gets exactly the tokens it gets alone (C49)."""
    alone = plain_tokens(llama, B, max_tokens=8)
    other = Neighbour(llama, B, max_tokens=8)
    try:
        llama.trace(A, block=block, **GREEDY)
        failed = False
    except InterventionError:
        failed = True
    assert other.tokens() == alone
    assert len(A) + len(B) in other.widths  # both prompts were in one step
    assert failed == (block is not everything)


def test_traced_request_is_alone_in_its_rows(llama: Any, hf: Oracle) -> None:
    """Beside another request a block reads and edits its own rows, with the effect it has alone.

    (B9, C49).
    """
    other = Neighbour(llama, B, max_tokens=8)
    with llama.trace(A, **GREEDY) as tracer:
        given = llama.model.embed_tokens.input.save()
        llama.model.layers[1].output[0][[1, 3]] += VECTOR.to(DEVICE)
        logits = llama.logits.save()
    other.tokens()
    right = hf.generate(A, 4, changes=[add_vector(1, VECTOR, [1, 3])], when="prefill")
    assert len(A) + len(B) in other.widths
    assert given.tolist() == A
    assert_close(logits, right.logits[:1], hf.run(B).logits)
    assert list(tracer.result.outputs[0].token_ids) == right.tokens


def _cached(model: Any, ids: list[int]) -> tuple[list[int], int]:
    """Tokens of a plain request, and how many of its prompt's tokens came from the cache."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=4)
    prompt = {"prompt_token_ids": ids}
    (output,) = model.vllm_entrypoint.generate([prompt], params, use_tqdm=False)
    return list(output.outputs[0].token_ids), output.num_cached_tokens


def _steer(model: Any, ids: list[int]) -> Any:
    with model.trace(ids, temperature=0.0, max_tokens=4) as tracer:
        model.model.layers[0].output[0][:] += 10 * VECTOR.to(DEVICE)
        rows = len(model.model.layers[1].output[0]).save()
    return list(tracer.result.outputs[0].token_ids), tracer.result.num_cached_tokens, rows


def test_steered_prompt_stays_out_of_the_prefix_cache(llama: Any, hf: Oracle) -> None:
    """Before and after a steered run, plain requests with its prompt get what they always do.

    (O4, A26, case 16).
    """
    shared = [(3 * i) % 100 + 10 for i in range(64)]
    first, other = [*shared, 3], [*shared, 4, 5]
    steered_first, _, _ = _steer(llama, first)
    change = add_vector(0, 10 * VECTOR)
    for ids in (first, other):  # what reading the steered prompt's cache would give
        poisoned = add_vector(0, 10 * VECTOR, range(64))
        wrong = hf.generate(ids, 4, changes=[poisoned], when="prefill").tokens
        assert wrong != hf.generate(ids, 4).tokens
    clean, cached = _cached(llama, first)
    assert cached == 0
    assert clean == hf.generate(first, 4).tokens != steered_first
    steered, cached, rows = _steer(llama, first)
    assert (steered, cached, rows) == (steered_first, 0, 65)
    assert steered == hf.generate(first, 4, changes=[change], when="prefill").tokens
    assert _cached(llama, first) == (clean, 64)  # the plain run's own blocks, from before
    assert _cached(llama, other) == (hf.generate(other, 4).tokens, 64)


def test_prompt_in_the_cache_is_traced_whole(llama: Any, hf: Oracle) -> None:
    """A block sees every row of a prompt that plain requests have left in the prefix cache.

    (O4, A26, case 15).
    """
    ids = LONG[:64]
    plain_tokens(llama, ids)
    assert _cached(llama, ids)[1] > 0
    with llama.trace(ids, temperature=0.0, max_tokens=1):
        first = sum(llama.model.layers[2].output).save()
    with llama.trace(ids, temperature=0.0, max_tokens=1):
        second = sum(llama.model.layers[2].output).save()
    right = hf.reads(ids)
    assert first.shape == (64, 128)
    assert torch.equal(first, second)
    assert_close(first, right["residual.2"], right["residual.1"])
