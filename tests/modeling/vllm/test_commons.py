"""What the invokes of a trace share travels once, and none of it is left."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

from midstream.errors import InterventionError, MidstreamError
from midstream.modeling.vllm.engine.commons import Commons
from midstream.modeling.vllm.wire import KEY, Payload
from tests.modeling.vllm.conftest import live
from tests.support.checkpoints import A, B, C

GREEDY = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 1}
PROMPTS = [A, B, C, A]

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture
def traffic(llama: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[list[bytes], list[Payload]]:
    """The common parts and the payloads that go to the engine from here on."""
    llm, brought, carried = llama.vllm_entrypoint, [], []
    call, add = llm.collective_rpc, llm.llm_engine.add_request

    def calling(method: str, *more: Any, **keywords: Any) -> Any:
        if method == "midstream_bring":
            brought.extend(data for _, data, _ in keywords["args"][0])
        return call(method, *more, **keywords)

    def adding(name: str, prompt: Any, params: Any, **keywords: Any) -> Any:
        carried.append(msgspec.msgpack.decode(params.extra_args[KEY], type=Payload))
        return add(name, prompt, params, **keywords)

    monkeypatch.setattr(llm, "collective_rpc", calling)
    monkeypatch.setattr(llm.llm_engine, "add_request", adding)
    return brought, carried


def test_code_and_common_values_travel_once(llama: Any, traffic: Any) -> None:
    """The source, functions by value and tensors of outside go to the workers in one message."""
    vector = torch.full((4096,), 3.0)

    def twice(x: Any) -> Any:
        return x * 2

    with llama.trace(**GREEDY) as tracer:
        for index, prompt in enumerate(PROMPTS):
            with tracer.invoke(prompt):
                first = llama.model.layers[1].output[0]
                found = (index, len(first), float(twice(vector[0]))).save()
    brought, carried = traffic
    assert found == [(index, len(prompt), 6.0) for index, prompt in enumerate(PROMPTS)]
    (common,) = brought
    assert b"first = llama.model" in common
    assert len(common) > 4 * len(vector)
    assert len(carried) == len(PROMPTS)
    assert all(payload.common and len(payload.block) < 60 for payload in carried)


def test_a_trace_with_one_request_makes_no_call(llama: Any, traffic: Any) -> None:
    """A block that shares nothing is in its request."""
    with llama.trace(A, **GREEDY):
        logits = llama.logits.save()
    with llama.trace(**GREEDY) as tracer:
        with tracer.invoke(A):
            first = llama.logits.save()
        with tracer.invoke(A):
            second = llama.logits.save()
    brought, carried = traffic
    assert not brought
    assert [payload.common for payload in carried] == [0, 0, 0]
    assert torch.equal(first, logits)
    assert torch.equal(second, logits)


def test_each_block_may_change_what_it_was_given(llama: Any) -> None:
    """A value that several invokes take from outside is a copy in each of them."""
    rows, vector = [], torch.zeros(2)
    with llama.trace(**GREEDY) as tracer:
        for prompt in PROMPTS:
            with tracer.invoke(prompt):
                rows.append(1)
                vector += 1
                found = (len(rows), vector.tolist()).save()
    assert found == [(1, [1.0, 1.0])] * len(PROMPTS)
    assert not rows
    assert vector.tolist() == [0.0, 0.0]


def test_a_value_is_what_it_was_when_the_invoke_was_opened(llama: Any) -> None:
    """A container that the trace's body changes between invokes is not taken for the same."""
    with llama.trace(**GREEDY) as tracer:
        seen: list[int] = []
        for index, prompt in enumerate(PROMPTS):
            seen.append(index)
            with tracer.invoke(prompt):
                found = list(seen).save()
    assert found == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]


def test_blocks_alike_draw_alike(llama: Any) -> None:
    """Random numbers of a block depend on what it is, not on which trace of the client it is in."""

    def drawn() -> Any:
        with llama.trace(**GREEDY) as tracer:
            for prompt in PROMPTS[:2]:
                with tracer.invoke(prompt):
                    values = torch.rand(3).save()
        return values

    first, second = drawn(), drawn()
    assert all(map(torch.equal, first, second))


def test_every_sequence_of_an_invoke_counts(llama: Any) -> None:
    """With n=2 each sequence takes the common part once."""
    with llama.trace(**{**GREEDY, "temperature": 1.0}, n=2) as tracer:
        for prompt in PROMPTS:
            with tracer.invoke(prompt):
                length = len(llama.model.layers[0].output[0]).save()
    assert length == [len(prompt) for prompt in PROMPTS for _ in range(2)]


def test_nothing_is_left_when_vllm_refuses_an_invoke(llama: Any) -> None:
    """A request that is refused after others were submitted takes the common part with it."""
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError, match="logprobs"), llama.trace(**GREEDY) as tracer:
        for index, prompt in enumerate(PROMPTS):
            with tracer.invoke(prompt, logprobs=100_000 if index == 2 else 1):
                logits = llama.logits.save()
    assert live(llama) == [0]
    assert not llama.vllm_entrypoint.llm_engine.has_unfinished_requests()


def test_nothing_is_left_when_requests_are_aborted(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that end before their block began take the common part with them."""
    core = llama.vllm_entrypoint.llm_engine

    def stepping() -> Any:
        monkeypatch.undo()
        core.abort_request(list(core.output_processor.external_req_ids))
        return []

    monkeypatch.setattr(core, "step", stepping)
    with llama.trace(**GREEDY) as tracer:
        for prompt in PROMPTS:
            with tracer.invoke(prompt):
                logits = llama.logits.save()
    assert tracer.result == [None] * len(PROMPTS)
    assert live(llama) == [0]


def test_nothing_is_left_when_blocks_fail(llama: Any) -> None:
    """Blocks that fail have taken their part all the same."""
    with pytest.raises(InterventionError, match="4 blocks"), llama.trace(**GREEDY) as tracer:
        for prompt in PROMPTS:
            with tracer.invoke(prompt):
                1 / 0
    assert live(llama) == [0]


def test_a_trace_as_bytes_holds_its_code_once(llama: Any) -> None:
    """`to_bytes` writes what the invokes share once, and `run` brings it once."""
    with llama.trace(run=False, **GREEDY) as tracer:
        for index, prompt in enumerate(PROMPTS):
            with tracer.invoke(prompt):
                marked = ("a text of the block", index, len(llama.logits)).save()
    data = tracer.to_bytes()
    assert data.count(b"a text of the block") == 1
    expected = [("a text of the block", index, 1) for index in range(len(PROMPTS))]
    assert llama.run(data).saves["marked"] == expected
    assert llama.run(data).saves["marked"] == expected


def test_a_part_is_held_until_all_have_come() -> None:
    """The last block that asks for a part takes it; what is dropped is gone for those to come."""
    commons = Commons()
    commons.bring([(1, b"one", 2), (2, b"two", 3)])
    first = commons.take(1)
    assert len(commons) == 2
    assert commons.take(1) is first
    assert len(commons) == 1
    commons.take(2)
    commons.drop([1, 2])
    assert len(commons) == 0
    with pytest.raises(MidstreamError, match="not in this worker"):
        commons.take(2).opened
