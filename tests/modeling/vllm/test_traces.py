"""A trace in its two forms, and the request it runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import midstream
from midstream.interleaving.run import running
from midstream.tracing import Block
from tests.modeling.vllm.conftest import plain_tokens
from tests.support.checkpoints import A, B, C
from tests.support.compare import assert_close
from tests.support.oracle import Oracle

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 1}


def stream_of(model: Any, ids: list[int], layer: int) -> torch.Tensor:
    """A trace in a function, whose local variable it binds."""
    with model.trace(ids, **GREEDY):
        stream = sum(model.model.layers[layer].output).save()
    return stream


class Reader:
    """A trace in a method."""

    def __init__(self, model: Any):
        self.model = model

    def read(self, ids: list[int]) -> torch.Tensor:
        layer = 2
        with self.model.trace(ids, **GREEDY):
            stream = sum(self.model.model.layers[layer].output).save()
        return stream


def test_trace_in_a_function_and_in_a_method(llama: Any, hf: Oracle) -> None:
    """Local variables, arguments and `self` are there, and results are bound where it stands."""
    right = hf.reads(C)
    for got in (stream_of(llama, C, 2), Reader(llama).read(C)):
        assert_close(got, right["residual.2"], right["residual.1"])


def test_trace_in_a_loop(llama: Any, hf: Oracle) -> None:
    """Each pass takes that pass's values along and binds its own result."""
    got = []
    for layer, ids in ((0, A), (3, B), (1, C)):
        with llama.trace(ids, **GREEDY):
            stream = sum(llama.model.layers[layer].output).save()
        got.append((layer, ids, stream))
    for layer, ids, stream in got:
        right = hf.reads(ids)
        assert_close(stream, right[f"residual.{layer}"], right[f"residual.{(layer + 1) % 4}"])


def test_trace_in_a_closure(llama: Any) -> None:
    """A variable of the function around it is bound for both (C24)."""
    rows = None

    def run(scale: float) -> None:
        nonlocal rows
        with llama.trace(B, **GREEDY):
            rows = (llama.model.layers[0].output[0] * scale).save()

    run(1.0)
    first = rows
    run(2.0)
    assert torch.equal(rows, 2 * first)


MODULE_LEVEL = None


def test_trace_binds_a_global(llama: Any) -> None:
    """A name declared global is bound there (C24)."""
    global MODULE_LEVEL
    with llama.trace(B, **GREEDY):
        MODULE_LEVEL = llama.logits.save()
    assert globals()["MODULE_LEVEL"].shape == (1, 128)


def test_function_form_returns_saves_on_the_tracer(llama: Any) -> None:
    """Variables that were saved and a returned dict are the tracer's saves; no scope is touched."""

    def block(model: Any, tracer: Any) -> dict[str, Any]:
        rows = midstream.save(model.model.layers[1].output[0])
        unsaved = rows * 2
        return {"logits": model.logits, "count": len(rows)}

    tracer = llama.trace(A, block=block, **GREEDY)
    assert tracer.saves.keys() == {"rows", "logits", "count"}
    assert tracer.saves["rows"].shape == (5, 128)
    assert tracer.saves["count"] == 5
    assert tracer.result.outputs[0].token_ids == [int(tracer.saves["logits"].argmax())]


def test_function_form_of_one_value(llama: Any) -> None:
    """What a block returns that is no dict comes back as `return`."""
    tracer = llama.trace(A, block=lambda model, tracer: model.logits, **GREEDY)
    assert tracer.saves["return"].shape == (1, 128)


def test_both_forms_agree(llama: Any) -> None:
    """The same reads give the same bits in either form."""
    with llama.trace(A, **GREEDY):
        stream = sum(llama.model.layers[1].output).save()
    other = llama.trace(A, block=lambda m, t: sum(m.model.layers[1].output), **GREEDY)
    assert torch.equal(stream, other.saves["return"])


def test_empty_block_runs_the_request(llama: Any) -> None:
    """A body of `pass` reads nothing, and the request runs all the same (C5)."""
    with llama.trace(B, temperature=0.0, max_tokens=5) as tracer:
        pass
    assert tracer.saves == {}
    assert list(tracer.result.outputs[0].token_ids) == plain_tokens(llama, B, max_tokens=5)


def test_result_is_vllms_own(llama: Any) -> None:
    """The finished request has its text, its ids, its reason, and log probabilities if asked.

    (B6, C38).
    """
    with llama.trace(B, temperature=0.0, max_tokens=3, logprobs=2) as tracer:
        logits = llama.logits.save()
    output = tracer.result
    (completion,) = output.outputs
    assert output.finished
    assert output.prompt_token_ids == B
    assert completion.finish_reason == "length"
    assert completion.text.strip() == llama.tokenizer.decode(completion.token_ids)
    best, right = completion.token_ids[0], logits.log_softmax(-1)[0]
    assert completion.logprobs[0][best].logprob == pytest.approx(float(right[best]), abs=1e-4)
    assert float(right.topk(2).values.diff().abs()) > 1e-3


def test_tokenizer_in_a_block(llama: Any) -> None:
    """A block may use the model's tokenizer, by the model and by a variable."""
    tokenizer = llama.tokenizer
    with llama.trace(B, **GREEDY):
        token = llama.samples.item().save()
        texts = [llama.tokenizer.decode([token]), tokenizer.decode([token])].save()
        padding = llama.tokenizer.pad_token_id.save()
    assert texts == [f"t{token}"] * 2
    assert padding == llama.tokenizer.pad_token_id


def test_no_progress_bar(llama: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """Traces and plain calls write nothing of vLLM's progress to the terminal (C39)."""
    prompts = [{"prompt_token_ids": B}]
    llama.vllm_entrypoint.generate(prompts)
    assert "Processed prompts" in capfd.readouterr().err  # which vLLM's own call does
    llama.trace(B, block=lambda model, tracer: model.logits, **GREEDY)
    llama.generate([A, B], **GREEDY)
    assert "prompts" not in capfd.readouterr().err


def test_a_block_is_known_by_its_code(llama: Any) -> None:
    """Requests of the same text have the same digest, a function that of its source, or none."""

    def known(model: Any, tracer: Any) -> Any:
        return running().code

    found = []
    for ids in (A, B):
        with llama.trace(ids, **GREEDY):
            code = running().code
            code.save()
        found.append(code)
    with llama.trace(A, **GREEDY):
        other = running().code
        other.save()
    listed = llama.trace(A, block=known, **GREEDY).saves["return"]
    unlisted: dict[str, Any] = {}
    exec("from midstream.interleaving.run import running\n" + UNLISTED, unlisted)
    assert found[0] == found[1]
    assert len({found[0], other, listed}) == 3
    assert {len(code) for code in (found[0], other, listed)} == {32}
    assert listed == Block(function=known).listing.digest
    assert llama.trace(A, block=unlisted["known"], **GREEDY).saves["return"] == "None"


UNLISTED = "def known(model, tracer):\n    return str(running().code)\n"
