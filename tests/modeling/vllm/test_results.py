"""`tracer.result` inside a block: what the request ended with, while the block still runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from midstream.errors import InterventionError, UnsupportedError
from midstream.modeling.vllm.results import Completion, Result, read, write
from tests.modeling.vllm.conftest import Neighbour, place, plain_tokens
from tests.support.checkpoints import EOS, A, B, C
from tests.support.oracle import Oracle

pytestmark = pytest.mark.usefixtures("serving")

GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


def test_a_finished_request(llama: Any, hf: Oracle) -> None:
    """Text, ids and reason are vLLM's, statements after it run, and saves come home (B6, C59)."""
    right = hf.generate(A, 4)
    with llama.trace(A, max_tokens=4, **GREEDY) as tracer:
        hidden = llama.model.layers[1].output[0].save()
        result = tracer.result.save()
        after = [result.text, len(result.token_ids)].save()
    completion = tracer.result.outputs[0]
    assert isinstance(result, Result)
    assert result.token_ids == list(completion.token_ids) == right.tokens
    assert result.outputs[0].text == completion.text
    assert result.text.strip() == llama.tokenizer.decode(right.tokens)
    assert (result.finish_reason, result.stop_reason, result.finished) == ("length", None, True)
    assert result.prompt_token_ids == A
    assert after == [completion.text, 4]
    assert hidden.shape == (len(A), 128)


def test_it_may_come_first_and_after_a_loop(llama: Any) -> None:
    """A block that asks for nothing else gets it, and so does one that has looped to the end.

    (C59).
    """
    with llama.trace(A, max_tokens=3, **GREEDY) as first:
        ids = first.result.token_ids.save()
    with llama.trace(A, max_tokens=3, **GREEDY) as looped:
        seen = []
        for _ in looped.all():
            seen.append(int(llama.samples))
        same = (seen == looped.result.token_ids).save()
        again = (looped.result is looped.result).save()
    assert ids == list(first.result.outputs[0].token_ids)
    assert len(ids) == 3
    assert same
    assert again


def test_log_probabilities(llama: Any) -> None:
    """Those of the prompt and of the generated ids are vLLM's, with ranks and decoded text."""
    with llama.trace(A, max_tokens=2, logprobs=2, prompt_logprobs=1, **GREEDY) as tracer:
        result = tracer.result.save()
    completion = tracer.result.outputs[0]
    assert result.logprobs == completion.logprobs
    assert len(result.logprobs) == 2
    assert result.outputs[0].cumulative_logprob == completion.cumulative_logprob
    assert result.prompt_logprobs == tracer.result.prompt_logprobs
    assert len(result.prompt_logprobs) == len(A)


@pytest.mark.parametrize("how", ["eos", "stop"])
def test_ends_by_a_token_and_by_a_text(llama: Any, how: str) -> None:
    """The reason is the request's, also where the client finds the stop string."""
    token = EOS if how == "eos" else 77
    with llama.trace(A, max_tokens=20, temperature=0.0, stop=["t77"]) as tracer:
        llama.logits[:] = -float("inf")
        llama.logits[0, token] = 0
        result = tracer.result.save()
    assert (result.finish_reason, result.stop_reason) == ("stop", None if how == "eos" else "t77")
    assert result.outputs[0].text == tracer.result.outputs[0].text


def test_several_sequences(llama: Any) -> None:
    """With n above 1 each sequence's block has its own, and all of them in `outputs`."""
    with llama.trace(A, max_tokens=4, temperature=1.0, seed=3, n=3, ignore_eos=True) as tracer:
        drawn = []
        for _ in tracer.all():
            drawn.append(int(llama.samples))
        drawn.save()
        result = tracer.result.save()
    right = [list(completion.token_ids) for completion in tracer.result.outputs]
    assert len({*map(tuple, right)}) > 1
    assert [each.token_ids for each in result] == right == drawn
    assert [each.sequence for each in result] == [0, 1, 2]
    assert all([list(c.token_ids) for c in each.outputs] == right for each in result)


def test_several_requests(llama: Any) -> None:
    """Requests of different lengths each get theirs, beside one that does not ask for it."""
    alone = plain_tokens(llama, B, max_tokens=9)
    other = Neighbour(llama, B, max_tokens=9)
    with llama.trace(**GREEDY) as tracer:
        for prompt, steps in ((A, 2), (B, 6), (C, 4)):
            with tracer.invoke(prompt, max_tokens=steps):
                ids = tracer.result.token_ids.save()
        with tracer.invoke(A, max_tokens=7):
            logits = llama.logits.save()
    assert ids == [list(each.outputs[0].token_ids) for each in tracer.result[:3]]
    assert [len(each) for each in ids] == [2, 6, 4]
    assert logits.shape == (1, 128)
    assert other.tokens() == alone


def test_nothing_can_be_read_after_it(llama: Any) -> None:
    """The forward passes are over: a location is refused at its line, naming it (C59, G36)."""
    with pytest.raises(InterventionError, match=r"^OutOfOrderError: 'model\.logits\.i\d'") as error:
        with llama.trace(A, max_tokens=2, **GREEDY) as tracer:
            ids = tracer.result.token_ids.save()
            llama.logits  # too late
    assert place(__file__, "too late") in str(error.value)
    assert len(ids) == 2


def test_a_block_that_fails_after_it(llama: Any) -> None:
    """Its error comes home with its saves, though its request had ended well."""
    with pytest.raises(InterventionError, match=r"^ZeroDivisionError"):
        with llama.trace(A, max_tokens=2, **GREEDY) as tracer:
            reason = tracer.result.finish_reason.save()
            1 / 0
    assert reason == "length"
    assert tracer.result.outputs[0].finish_reason == "length"


def test_an_aborted_request_has_none(llama: Any) -> None:
    """The block is told so at its line; what it saved comes back."""
    core = llama.vllm_entrypoint.llm_engine
    step, left = core.step, iter(range(3))

    def stepping() -> Any:
        if next(left, None) is not None:
            return step()
        del core.step
        core.abort_request(list(core.output_processor.external_req_ids))
        return []

    core.step = stepping
    with pytest.raises(InterventionError, match=r"^MidstreamError: The request was aborted"):
        with llama.trace(A, max_tokens=500, **GREEDY) as tracer:
            hidden = llama.model.layers[1].output[0].save()
            result = tracer.result.save()
    assert hidden.shape == (len(A), 128)
    assert tracer.result is None


def test_a_stopped_request_does_not_wait(llama: Any) -> None:
    """A block that ends its request does not come to its result."""
    with llama.trace(A, max_tokens=9, **GREEDY) as tracer:
        seen = [].save()
        for step in tracer.all():
            seen.append(int(llama.samples))
            if step == 1:
                tracer.stop()
        seen.append(tracer.result)
    assert seen == list(tracer.result.outputs[0].token_ids)
    assert len(seen) == 2


@pytest.mark.parametrize("form", ["result", "sequence"])
def test_values_of_edits_are_in_it(llama: Any, form: str) -> None:
    """A block is given what edits saved: of one name the later one's, as its own values (C59)."""
    with llama.edit() as (tracer, first):
        shared = "first"
        rows = [].save()
        shared.save()
        for _ in tracer.iter[:]:
            rows.append(sum(llama.model.layers[1].output))
    with llama.edit() as (_, second):
        shared = "second"
        shared.save()
    try:
        with llama.trace(A, max_tokens=2, **GREEDY) as tracer:
            result = tracer.result
            found = (result if form == "result" else result.outputs[0]).saves
            again = (result if form == "result" else result.outputs[0]).saves is found
            names, lengths = sorted(found), [len(each) for each in found["rows"]]
            copied = found["rows"][0].clone()
            found["rows"][0][:] = 0
            which = found["shared"]
            several = [names, lengths, copied, which, again].save()
        outer = tracer.result.saves
    finally:
        first.clear()
        second.clear()
    names, lengths, copied, which, again = several
    assert (names, lengths, which, again) == (["rows", "shared"], [len(A), 1], "second", True)
    assert torch.equal(outer["rows"][0], copied)
    assert copied.abs().max() > 0
    assert outer["shared"] == "second"


@pytest.mark.parametrize("form", ["result", "sequence"])
def test_without_edits_there_are_no_values_in_it(llama: Any, form: str) -> None:
    """What the block itself saves is bound to its names later, which the error says."""
    with pytest.raises(InterventionError, match=r"no edit ran beside") as caught:
        with llama.trace(A, max_tokens=1, **GREEDY) as tracer:
            result = tracer.result
            found = (result if form == "result" else result.outputs[0]).saves
    assert isinstance(caught.value.__cause__, UnsupportedError)
    assert not hasattr(tracer.result, "saves")


def test_saves_of_the_tracer_in_a_block(llama: Any) -> None:
    """There are none before the `with` ends, which the error says."""
    with pytest.raises(InterventionError, match=r"^AttributeError: `tracer\.saves` .* when the"):
        with llama.trace(A, max_tokens=1, **GREEDY) as tracer:
            tracer.saves


def test_results_travel_as_data() -> None:
    """What goes to the engine is what the client wrote, and None stays None."""
    result = Result(
        "r", "text", [1, 2], None, [Completion(0, "a", [3]), Completion(1, "b", [4])], 1
    )
    found = read(write({"r": result, "gone": None}))
    assert found == {"r": result, "gone": None}
    assert (found["r"].text, found["r"].token_ids) == ("b", [4])


def test_a_cache_and_a_result(llama: Any) -> None:
    """A cache records to the end of the request, and is read beside its result."""
    with llama.trace(A, max_tokens=3, **GREEDY) as tracer:
        cache = tracer.cache("model.layers.1.mlp")
        steps = (len(tracer.result.token_ids), len(cache["model.layers.1.mlp"].output)).save()
    assert steps == (3, 3)
    assert torch.cat(cache["model.layers.1.mlp"].output).shape == (len(A) + 2, 128)
