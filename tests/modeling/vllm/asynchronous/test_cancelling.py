"""Requests that are ended early leave nothing in the engine, whoever ends them."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from midstream.errors import InterventionError
from tests.modeling.vllm.asynchronous.conftest import Run, idle
from tests.support.checkpoints import A, B
from tests.support.oracle import Oracle

ENDLESS = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 480}


def endless(model: Any, prompt: Any = A) -> Any:
    """A trace that runs for a long time, on its way."""
    with model.trace(prompt, **ENDLESS) as tracer:
        steps = [].save()
        for step in tracer.all():
            steps.append(step)
            model.logits
    return tracer


async def begun(model: Any, count: int = 1) -> None:
    """Wait until the engine holds so many blocks."""
    while (await model.astats()).live_blocks < count:
        await asyncio.sleep(0.01)


def test_aclose(model: Any, run: Run) -> None:
    """`aclose()` of the outputs ends the request; its block is gone when it returns (O18, E7)."""

    async def main() -> None:
        tracer = endless(model)
        outputs = aiter(tracer.backend)
        await anext(outputs)
        assert (await model.astats()).live_blocks == 1
        await outputs.aclose()
        assert (await model.astats()).live_blocks == 0
        assert tracer.result.outputs[0].finish_reason == "abort"
        assert 0 < len(tracer.saves["steps"]) < 480

    run(main())


def test_aclose_of_the_backend(model: Any, run: Run) -> None:
    """`tracer.backend.aclose()` ends a trace that nobody reads, once or twice (E7)."""

    async def main() -> None:
        tracer = endless(model)
        await begun(model)
        await tracer.backend.aclose()
        assert (await model.astats()).live_blocks == 0
        await tracer.backend.aclose()
        assert await tracer.backend is None

    run(main())


def test_break(model: Any, run: Run) -> None:
    """Leaving the loop ends the request and frees its block (O18, E7)."""

    async def main() -> None:
        tracer = endless(model)
        async for output in tracer.backend:
            if len(output.outputs[0].token_ids) > 2:
                break
        await idle(model)
        assert len(tracer.saves["steps"]) < 480

    run(main())


def test_an_error_in_the_loop(model: Any, run: Run) -> None:
    """An exception of the reader's own ends the request as well."""

    async def main() -> None:
        tracer = endless(model)
        with pytest.raises(LookupError):
            async for _ in tracer.backend:
                raise LookupError
        await idle(model)
        assert tracer.backend.done

    run(main())


@pytest.mark.parametrize("how", ["await", "async for", "async with"])
def test_a_cancelled_task(model: Any, run: Run, how: str) -> None:
    """Cancelling the task that waits ends the request and frees its block (O18)."""

    async def reading() -> None:
        if how == "async with":
            async with model.trace(A, **ENDLESS):
                model.logits
            return
        tracer = endless(model)
        if how == "await":
            await tracer.backend
        else:
            async for _ in tracer.backend:
                pass

    async def main() -> None:
        task = asyncio.create_task(reading())
        await begun(model) if how != "async with" else await asyncio.sleep(0.3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await idle(model)

    run(main())


def test_cancelled_before_it_was_sent(model: Any, run: Run) -> None:
    """A task that is cancelled at once leaves no request behind."""

    async def main() -> None:
        for wait in range(8):
            task = asyncio.create_task(reading())
            for _ in range(wait):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await idle(model)

    async def reading() -> None:
        await endless(model).backend

    run(main())


def test_a_time_limit(model: Any, run: Run) -> None:
    """`asyncio.timeout` ends a trace."""

    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await endless(model).backend
        await idle(model)

    run(main())


def test_only_the_cancelled_one_ends(model: Any, run: Run, hf: Oracle) -> None:
    """Cancelling one trace of several leaves the others as they would be alone (O18, E9)."""

    async def main() -> None:
        doomed = [endless(model, [7 + i, 3]) for i in range(3)]
        with model.trace(B, max_tokens=12, temperature=0.0, ignore_eos=True) as tracer:
            logits = model.logits.save()
        await begun(model, 3)
        await asyncio.gather(*(each.backend.aclose() for each in doomed))
        output = await tracer.backend
        assert output.outputs[0].token_ids == hf.generate(B, 12).tokens

    run(main())


def test_several_requests_of_a_trace(model: Any, run: Run) -> None:
    """All invokes and sequences of a trace end with it, also those that have not begun."""

    async def main() -> None:
        with model.trace(**{**ENDLESS, "temperature": 1.0}) as tracer:
            shared = [].save()
            for index in range(12):  # more than run at once
                with tracer.invoke([7 + index, 3, 4], n=1 + index % 2):
                    for step in tracer.all():
                        shared.append(step)
                        model.logits
        await begun(model, 6)
        await tracer.backend.aclose()
        assert (await model.astats()).live_blocks == 0
        live = await model.vllm_entrypoint.collective_rpc("midstream_live")
        assert live == [0]

    run(main())


def test_a_block_that_waits_for_its_result(model: Any, run: Run) -> None:
    """A block that would wait for `tracer.result` is told that there is none, and is gone."""

    async def main() -> None:
        with model.trace(A, **ENDLESS) as tracer:
            kept = model.logits.shape.save()
            text = tracer.result.text.save()
        await begun(model)
        await tracer.backend.aclose()
        assert list(tracer.saves) == ["kept"]

    run(main())


def test_ended_by_its_id(model: Any, run: Run) -> None:
    """A request that is aborted in vLLM itself ends as an output, with what was saved."""

    async def main() -> None:
        tracer = endless(model)
        with model.trace(A, **ENDLESS) as waiting:
            text = tracer.result.text.save()
        await begun(model, 2)
        names = list(model._async_engine._running)
        await model.vllm_entrypoint.abort(names)
        output = await tracer.backend
        assert output.outputs[0].finish_reason == "abort"
        assert output.saves["steps"] == list(range(len(output.saves["steps"])))
        with pytest.raises(InterventionError, match="was aborted"):
            await waiting.backend

    run(main())


def test_a_cancelled_generate(model: Any, run: Run) -> None:
    """Cancelling a plain `generate` ends its requests (C75)."""

    async def main() -> None:
        task = asyncio.create_task(model.generate([A, B], **ENDLESS))
        while not model.vllm_entrypoint.output_processor.request_states:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await idle(model)

    run(main())


def test_nobody_reads(model: Any, run: Run) -> None:
    """A trace that is thrown away runs to its end, and its values with it (C90, E11)."""

    async def main() -> None:
        before = (await model.astats()).steps
        begin(model)
        gc.collect()
        await begun(model)
        await idle(model)
        after = (await model.astats()).steps
        assert sum(after.values()) >= sum(before.values()) + 8

    def begin(model: Any) -> None:
        with model.trace(A, max_tokens=8, temperature=0.0, ignore_eos=True) as tracer:
            for _ in tracer.all():
                logits = model.logits.save()

    run(main())
