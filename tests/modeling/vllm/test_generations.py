"""Rows, windows and lengths of a generation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.checkpoints import EOS, A, B
from tests.support.compare import assert_close
from tests.support.device import DEVICE
from tests.support.oracle import Oracle, add_vector

GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
VECTOR = torch.randn(128, generator=torch.Generator().manual_seed(1)) * 3

pytestmark = pytest.mark.usefixtures("nothing_left")


def test_rows_of_a_generation_are_one_pass_over_it(llama: Any, hf: Oracle) -> None:
    """Prompt and generated tokens, without the last, have a row each, as in one pass over them.

    (B9, B25, case 68).
    """
    with llama.trace(A, max_tokens=4, **GREEDY) as tracer:
        rows = torch.cat([sum(llama.model.layers[2].output) for _ in tracer.all()]).save()
    assert len(rows) == len(A) + 3
    ids = [*A, *tracer.result.outputs[0].token_ids[:-1]]
    right = hf.reads(ids)
    assert_close(rows, right["residual.2"], right["residual.1"])


def test_a_mask_counts_in_every_step(llama: Any, hf: Oracle) -> None:
    """A prompt padded on the left under its mask goes on as the prompt alone, step by step.

    (C27, case 29, case 63).
    """
    padded = {"input_ids": [[40, 41, *B]], "attention_mask": [[0, 0, 1, 1, 1]]}
    with llama.trace(padded, max_tokens=6, **GREEDY) as tracer:
        logits = torch.cat([llama.logits for _ in tracer.all()]).save()
    right, unmasked = hf.generate(B, 6), hf.generate([40, 41, *B], 6)
    assert tracer.result.outputs[0].token_ids == right.tokens
    assert_close(logits, right.logits, unmasked.logits)


def test_chosen_positions_are_those_of_the_prompt(llama: Any, hf: Oracle) -> None:
    """An edit of rows 1 of one prompt, 0 and 2 of another touches three rows and no later step.

    (C52, case 66).
    """
    with llama.trace(max_tokens=4, **GREEDY) as tracer:
        for ids, positions in ((A, [1]), (B, [0, 2])):
            with tracer.invoke(ids):
                hidden = llama.model.layers[1].output[0]
                before = hidden.clone()
                hidden[positions] += VECTOR.to(DEVICE)
                changed = (before != hidden).any(1).nonzero().flatten().tolist().save()
    assert changed == [[1], [0, 2]]
    for ids, positions, result in zip((A, B), ([1], [0, 2]), tracer.result, strict=True):
        right = hf.generate(ids, 4, changes=[add_vector(1, VECTOR, positions)], when="prefill")
        everywhere = hf.generate(ids, 4, changes=[add_vector(1, VECTOR)])
        assert right.tokens not in (everywhere.tokens, hf.generate(ids, 4).tokens)
        assert result.outputs[0].token_ids == right.tokens


def test_last_prompt_token_alone_is_steered(llama: Any, hf: Oracle) -> None:
    """Only row -1 of the prompt changes, and the logits are HuggingFace's (C62, case 67)."""
    with llama.trace(A, max_tokens=1, **GREEDY):
        hidden, residual = llama.model.layers[1].output
        before = (hidden + residual).save()
        hidden[-1] += VECTOR.to(DEVICE)
        after = llama.model.layers[2].input_layernorm.output[1].save()
        logits = llama.logits.save()
    assert torch.equal(before[:-1], after[:-1])
    right = hf.run(A, [add_vector(1, VECTOR, [4])]).logits
    assert_close(logits, right, hf.run(A, [add_vector(1, VECTOR)]).logits)


def test_a_window_of_steps_is_kept(llama: Any, hf: Oracle) -> None:
    """Steps 3 to 5 of 10 give three rows, those of the tokens before them (C53, case 70)."""
    with llama.trace(A, max_tokens=10, **GREEDY) as tracer:
        rows = [sum(llama.model.layers[1].output) for _ in tracer.iter[3:6]].save()
    ids = [*A, *tracer.result.outputs[0].token_ids]
    assert len(ids) == len(A) + 10
    right = hf.reads(ids)["residual.1"]
    assert_close(torch.cat(rows), right[len(A) + 2 : len(A) + 5], right[len(A) + 3 : len(A) + 6])


def test_a_probe_ends_the_request(llama: Any) -> None:
    """Where a probe says so the request stops, with its tokens so far and a reason.

    (O9, C68, case 70).
    """
    with llama.trace(A, max_tokens=10, **GREEDY) as whole:
        rows = [llama.model.layers[1].output[0][-1] for _ in whole.all()].save()
    scores = torch.cosine_similarity(torch.stack(rows), rows[4], dim=-1)
    assert (scores > 0.99).nonzero().flatten().tolist() == [4]
    direction = rows[4]
    with llama.trace(A, max_tokens=10, **GREEDY) as tracer:
        for step in tracer.iter[:10]:
            row = llama.model.layers[1].output[0][-1]
            if torch.cosine_similarity(row, direction, dim=-1) > 0.99:
                tracer.stop()
            ran = step.save()
    completion = tracer.result.outputs[0]
    assert completion.token_ids == whole.result.outputs[0].token_ids[:4]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "tracer.stop")
    assert ran == 3
    scheduler = llama.vllm_entrypoint.llm_engine.engine_core.engine_core.scheduler
    assert not scheduler.has_unfinished_requests()
    assert scheduler.kv_cache_manager.usage == 0.0


@pytest.mark.parametrize(
    ("settings", "steps"), [({"ignore_eos": True}, 6), ({"min_tokens": 6}, 6), ({}, 2)]
)
def test_what_holds_a_request_to_its_steps(
    llama: Any, settings: dict[str, Any], steps: int
) -> None:
    """A likely end of the text ends the request, unless a setting says otherwise (C57)."""
    with llama.trace(A, temperature=0.0, max_tokens=6, **settings) as tracer:
        seen = []
        for step in tracer.all():
            if step == 1:
                llama.logits[:, EOS] = 1e4
            llama.samples
            seen.append(step)
        seen.save()
    assert len(seen) == steps == len(tracer.result.outputs[0].token_ids)
