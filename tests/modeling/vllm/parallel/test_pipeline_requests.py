"""Requests on a pipeline of two stages, beside each other: their ends, errors and stops."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from midstream.errors import InterventionError
from tests.modeling.vllm.conftest import plain_tokens
from tests.modeling.vllm.parallel.blocks import carrying
from tests.support.checkpoints import A, B
from tests.support.compare import GUARD, relative_error
from tests.support.device import TOLERANCE

pytest_plugins = ["tests.modeling.vllm.parallel.pipelines"]
pytestmark = pytest.mark.usefixtures("pipe_as_before")

ONE = {"temperature": 0.0, "max_tokens": 1}
MANY = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True}


def messages(pipe: Any) -> list[int]:
    """How many messages each stage has sent for blocks."""
    return list(pipe.vllm_entrypoint.collective_rpc("midstream_messages"))


def test_twenty_repeats_are_identical(pipe: Any) -> None:
    """The same trace gives the same bits each time."""
    first = None
    for _ in range(20):
        trace = pipe.trace(A, block=carrying(3.0), temperature=0.0, max_tokens=3, ignore_eos=True)
        values = trace.saves["logits"]
        first = first or values
        assert all(map(torch.equal, values, first))


def test_concurrent_requests_equal_their_solo_runs(pipe: Any) -> None:
    """24 requests of different lengths, which end out of order, are each as alone."""
    prompts = [[(7 * i + 3 * j) % 90 + 5 for j in range(3 + i % 7)] for i in range(24)]
    lengths = [1 + (5 * i) % 9 for i in range(24)]
    with pipe.trace(temperature=0.0, ignore_eos=True) as tracer:
        for i in range(24):
            with tracer.invoke(prompts[i], max_tokens=lengths[i]):
                carried, logits = None, [].save()
                for _ in tracer.iter[:]:
                    if carried is not None:
                        pipe.model.layers[0].output[0][:] += (i % 4) * carried
                    carried = pipe.model.layers[3].mlp.output[-1:].clone()
                    logits.append(pipe.logits)
    together = [list(out.outputs[0].token_ids) for out in tracer.result]
    effects = 0
    for i in range(24):
        settings = {"temperature": 0.0, "ignore_eos": True, "max_tokens": lengths[i]}
        alone = pipe.trace(prompts[i], block=carrying(float(i % 4)), **settings)
        assert together[i] == list(alone.result.outputs[0].token_ids)
        assert len(logits[i]) == lengths[i]
        for got, right in zip(logits[i], alone.saves["logits"], strict=True):
            assert relative_error(got, right) < TOLERANCE
        if i % 4 and lengths[i] > 1:
            clean = pipe.trace(prompts[i], block=carrying(0.0), **settings).saves["logits"]
            effects += relative_error(clean[1], alone.saves["logits"][1]) > GUARD * TOLERANCE
    assert effects > 10


def raises_early(model: Any, tracer: Any) -> None:
    model.model.layers[0].output
    raise KeyError("early")


def raises_late(model: Any, tracer: Any) -> None:
    model.model.layers[3].output
    raise KeyError("late")


def misfits_early(model: Any, tracer: Any) -> None:
    model.model.layers[1].mlp.output = torch.zeros(3, 128)


def misfits_late(model: Any, tracer: Any) -> None:
    model.model.layers[2].mlp.output = torch.zeros(3, 128)


def raises_in_a_later_step(model: Any, tracer: Any) -> None:
    for step in tracer.iter[:]:
        model.model.layers[0].output
        if step == 2:
            raise KeyError("third")


def token_outside(model: Any, tracer: Any) -> None:
    model.model.layers[0].output
    model.samples[:] = 4711


def index_outside(model: Any, tracer: Any) -> None:
    model.model.embed_tokens.input[:] = 4711


def endless_before(model: Any, tracer: Any) -> None:
    while True:
        pass


def endless_early(model: Any, tracer: Any) -> None:
    model.model.layers[0].output
    while True:
        pass


def endless_late(model: Any, tracer: Any) -> None:
    model.model.layers[3].output
    while True:
        pass


FAILING = {
    raises_early: "KeyError: 'early'",
    raises_late: "KeyError: 'late'",
    misfits_early: r"model\.layers\.1\.mlp\.output.*was assigned \[3, 128\]",
    misfits_late: r"model\.layers\.2\.mlp\.output.*was assigned \[3, 128\]",
    raises_in_a_later_step: "KeyError: 'third'",
    token_outside: "4711",
    index_outside: "4711",
    endless_before: "block_timeout",
    endless_early: "block_timeout",
    endless_late: "block_timeout",
}


@pytest.mark.parametrize("block", FAILING)
def test_a_failing_block_fails_alone(block: Any, pipe: Any) -> None:
    """Its request ends with its error, soon, and the others get what they get alone."""
    alone = plain_tokens(pipe, B, max_tokens=8, ignore_eos=True)
    began = time.monotonic()
    with pytest.raises(InterventionError, match=FAILING[block]):
        with pipe.trace(temperature=0.0, ignore_eos=True) as tracer:
            with tracer.invoke(A, max_tokens=8):
                block(pipe, tracer)
            with tracer.invoke(B, max_tokens=8):
                early, late = [].save(), [].save()
                for _ in tracer.iter[:]:
                    early.append(pipe.model.layers[0].mlp.output)
                    late.append(pipe.model.layers[3].mlp.output)
    assert time.monotonic() - began < 20.0
    assert list(tracer.result[1].outputs[0].token_ids) == alone
    assert len(early) == len(late) == 8


def test_stops_beside_others(pipe: Any) -> None:
    """A block stops its request on either stage while others go on."""
    alone = plain_tokens(pipe, B, max_tokens=8, ignore_eos=True)
    with pipe.trace(temperature=0.0, ignore_eos=True) as tracer:
        for late in (False, True):
            with tracer.invoke(A, max_tokens=8):
                seen = [].save()
                for step in tracer.iter[:]:
                    seen.append(pipe.model.layers[0].mlp.output[-1])
                    if late:
                        seen.append(pipe.model.layers[3].mlp.output[-1])
                    if step == 2:
                        tracer.stop()
        with tracer.invoke(B, max_tokens=8):
            pass
    ends = [out.outputs[0].stop_reason for out in tracer.result]
    assert ends == ["tracer.stop", "tracer.stop", None]
    assert [len(each) for each in seen] == [3, 6]
    assert list(tracer.result[2].outputs[0].token_ids) == alone


def test_a_caught_refusal(pipe: Any) -> None:
    """A block may catch what one stage raises, and goes on alike on both."""
    with pipe.trace(A, **ONE):
        told = [].save()
        try:
            pipe.model.layers[0].mlp.output = torch.zeros(3)
        except ValueError as error:
            told.append(type(error).__name__)
        pipe.model.layers[3].mlp.output
        try:
            pipe.model.layers[1].mlp.output
        except RuntimeError as error:
            told.append(type(error).__name__)
        logits = pipe.logits.save()
    assert told == ["ValueError", "OutOfOrderError"]
    assert logits.shape == (1, 128)


def test_abort_beside_another(pipe: Any) -> None:
    """A request that its client ends early leaves nothing behind, and another goes on."""
    alone = plain_tokens(pipe, B, max_tokens=30, ignore_eos=True)
    engine = pipe.vllm_entrypoint.llm_engine
    step, seen = engine.step, list[Any]()

    def aborting() -> Any:
        seen.append(None)
        if len(seen) == 12:
            engine.abort_request([sorted(engine.output_processor.request_states)[0]], internal=True)
        return step()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "step", aborting)
        with pipe.trace(temperature=0.0, ignore_eos=True) as tracer:
            with tracer.invoke(A, max_tokens=400):
                for _ in tracer.iter[:]:
                    pipe.model.layers[0].mlp.output
                    late = pipe.model.layers[3].mlp.output.save()
            with tracer.invoke(B, max_tokens=30):
                pass
    assert len(late) == 1
    assert list(tracer.result[-1].outputs[0].token_ids) == alone


def test_blocks_that_differ_by_stage(pipe: Any) -> None:
    """A block that does not do the same on both stages fails, soon, and says so."""
    for stage in (0, 1):
        with pytest.raises(InterventionError, match="did not do the same"):
            with pipe.trace(A, **MANY) as tracer:
                here = torch.distributed.get_rank() == stage
                for step in tracer.iter[:]:
                    layer = pipe.model.layers[int(here and step == 2)]
                    layer.mlp.output
                    pipe.model.layers[2].mlp.output


def test_no_message_where_no_block_waits(pipe: Any) -> None:
    """Stages speak to each other in the steps in which a block has something to do, only then."""
    before = messages(pipe)
    plain_tokens(pipe, A, max_tokens=8, ignore_eos=True)
    assert messages(pipe) == before
    with pipe.trace(A, temperature=0.0, max_tokens=8, ignore_eos=True):
        read = pipe.model.layers[0].mlp.output.save()
    assert read.shape == (5, 128)
    assert messages(pipe) == [count + 1 for count in before]
