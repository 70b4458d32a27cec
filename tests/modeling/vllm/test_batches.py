"""Many requests of one trace: each gets its own rows, whoever runs beside it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from midstream.errors import InterventionError
from tests.modeling.vllm.conftest import plain_tokens
from tests.support.checkpoints import LONG, A, B, C
from tests.support.compare import assert_close
from tests.support.oracle import Oracle

GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}

pytestmark = pytest.mark.usefixtures("nothing_left")


def test_requests_that_finish_out_of_order_keep_their_rows(llama: Any, hf: Oracle) -> None:
    """Two dozen requests, three times what fits a batch, have a row for each of their own tokens.

    (B10, C41, C48, case 13).
    """
    prompts = [LONG[i * 5 :][: 3 + (i * 11) % 28] for i in range(24)]
    lengths = [1 + (i * 7) % 12 for i in range(24)]
    with llama.trace(**GREEDY) as tracer:
        for prompt, length in zip(prompts, lengths, strict=True):
            with tracer.invoke(prompt, max_tokens=length):
                rows = torch.cat([sum(llama.model.layers[2].output) for _ in tracer.all()]).save()
    tokens = [output.outputs[0].token_ids for output in tracer.result]
    assert [len(ids) for ids in tokens] == lengths
    passes = [[*p, *ids[:-1]] for p, ids in zip(prompts, tokens, strict=True)]
    right = [hf.reads(ids, layers=())["residual.2"] for ids in passes]
    for got, own, other in zip(rows, right, [*right[1:], right[0]], strict=True):
        assert_close(got, own, other[torch.arange(len(own)) % len(other)])
    for index in (3, 16):  # and so do the tokens themselves
        assert tokens[index] == plain_tokens(llama, prompts[index], max_tokens=lengths[index])


def test_an_error_of_one_request_is_its_own(llama: Any, hf: Oracle) -> None:
    """Of two requests in one batch the second raises; the first keeps its rows (C93, case 2)."""
    with llama.trace(max_tokens=1, **GREEDY) as tracer:
        for prompt in (A, B):
            with tracer.invoke(prompt):
                stream = sum(llama.model.layers[2].output).save()
    assert [len(rows) for rows in stream] == [5, 3]
    with pytest.raises(InterventionError, match="ValueError: x") as failure:
        with llama.trace(max_tokens=1, **GREEDY) as tracer:
            with tracer.invoke(A):
                unharmed = sum(llama.model.layers[2].output).save()
            with tracer.invoke(B):
                llama.model.layers[2].output
                raise ValueError("x")
    assert failure.value.__cause__.args == ("x",)
    for rows in (stream[0], unharmed):
        assert_close(rows, hf.reads(A)["residual.2"], hf.reads(A)["residual.1"])


def test_last_row_is_each_prompts_last_token(llama: Any, hf: Oracle) -> None:
    """Prompts of a batch are not padded: row -1 leads to each one's logits (B10, case 56)."""
    with llama.trace(max_tokens=1, **GREEDY) as tracer:
        for prompt in (A, B, C):
            with tracer.invoke(prompt):
                last = sum(llama.model.layers[3].output)[-1:]
                lens = llama.logits_processor(llama.lm_head, llama.model.norm(last)).save()
                logits = llama.logits.save()
    for prompt, by_row, own in zip((A, B, C), lens, logits, strict=True):
        right, wrong = hf.run(prompt).logits, hf.run(prompt[:-1]).logits
        assert_close(by_row, right, wrong)
        assert_close(own, right, wrong)


def test_prompt_that_extends_a_traced_one_is_whole(llama: Any, hf: Oracle) -> None:
    """After a trace of 64 tokens one of 65 has 65 rows, none of them left out (A26, case 24)."""
    shared = [(5 * i) % 90 + 20 for i in range(64)]
    found = [
        llama.trace(
            ids, block=lambda m, t: sum(m.model.layers[2].output), max_tokens=1, **GREEDY
        ).saves["return"]
        for ids in (shared, [*shared, 9])
    ]
    assert [len(rows) for rows in found] == [64, 65]
    right = hf.reads([*shared, 9])
    assert_close(found[1], right["residual.2"], right["residual.1"])


def test_prompts_in_one_step_do_not_mix(llama: Any) -> None:
    """Rows of requests that share a step differ, and an edit of one stays in its own (C49)."""
    alone = [plain_tokens(llama, ids, max_tokens=4) for ids in (A, B, C)]
    with llama.trace(max_tokens=4, **GREEDY) as tracer:
        for index, ids in enumerate((A, B, C)):
            with tracer.invoke(ids):
                if index == 1:
                    llama.model.layers[0].output[0][:] = 7.0
                last = sum(llama.model.layers[2].output)[-1].save()
    tokens = [output.outputs[0].token_ids for output in tracer.result]
    assert (tokens[0], tokens[2]) == (alone[0], alone[2])
    assert tokens[1] != alone[1]
    assert all(not torch.allclose(one, other) for one, other in pairwise(last))
