"""An asynchronous engine that dies while traces run, is built again, and is closed amid one."""

from __future__ import annotations

import asyncio
from typing import Any

from midstream import VLLM
from midstream.errors import EngineDeadError, UnsupportedError
from tests.modeling.vllm.scripts.reporting import TINY, engine_processes, reported
from tests.support.checkpoints import A, B, checkpoint

ENDLESS = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 480}


async def main(model: Any) -> None:
    await core_killed(model)
    await built_again(model)
    await closed(model)


def endless(model: Any) -> Any:
    """A trace that runs for a long time, on its way."""
    with model.trace(A, **ENDLESS) as tracer:
        for _ in tracer.all():
            logits = model.logits.save()
    return tracer


async def begun(model: Any) -> None:
    """Wait until the engine holds a block."""
    while (await model.astats()).live_blocks < 1:
        await asyncio.sleep(0.01)


async def core_killed(model: Any) -> None:
    """Kill the engine while it runs traces, plain requests and a call of its workers."""
    first, second = endless(model), endless(model)
    plain = asyncio.create_task(model.generate(B, **ENDLESS))
    edit = await model.edit(block=lambda model, tracer: None)
    await begun(model)
    with reported("core_killed") as facts:
        call = asyncio.create_task(model.astats())
        model.vllm_entrypoint.engine_core.resources.engine_manager.processes[0].kill()
        waiting = [reading(first), reading(second), plain]
        errors = await asyncio.gather(*waiting, return_exceptions=True)
        await asyncio.gather(call, return_exceptions=True)
        facts["types"] = [type(error).__name__ for error in errors]
        facts["texts"] = [str(error) for error in errors]
        cause = type(errors[0].__cause__)
        facts["cause"] = f"{cause.__module__}.{cause.__name__}"
        facts["dispatched"], facts["cleared"] = model.dispatched, edit.cleared
        while engine_processes():
            await asyncio.sleep(0.05)


async def reading(tracer: Any) -> Any:
    return await tracer.backend


async def built_again(model: Any) -> None:
    """The next trace builds the next engine."""
    with reported("built_again") as facts:
        async with model.trace(A, max_tokens=3, temperature=0.0, ignore_eos=True) as tracer:
            shape = list(model.logits.shape).save()
        facts["shape"], facts["tokens"] = shape, tracer.result.outputs[0].token_ids


async def closed(model: Any) -> None:
    """Close it while a trace runs."""
    tracer = endless(model)
    await begun(model)
    with reported("closed") as facts:
        await model.aclose()
        try:
            await tracer.backend
        except EngineDeadError as error:
            facts["text"] = str(error)
        await model.aclose()
        facts["left"] = [str(process) for process in engine_processes()]
        facts["dispatched"] = model.dispatched


async def another_loop(model: Any) -> None:
    """Build on one loop, for the next to be refused."""
    async with model.trace(A, max_tokens=1):
        logits = model.logits.save()


def loops(model: Any) -> None:
    """Use an engine that was built before there was a loop on two loops, and close it on none."""
    model.dispatch()
    with reported("loops") as facts:
        asyncio.run(another_loop(model))
        try:
            asyncio.run(another_loop(model))
        except UnsupportedError as error:
            facts["text"] = str(error)
        model.close()
        facts["left"] = [str(process) for process in engine_processes()]


if __name__ == "__main__":
    path = checkpoint("T-LLAMA", with_tokenizer=True)
    asyncio.run(main(VLLM(str(path), mode="async", **TINY)))
    loops(VLLM(str(path), mode="async", **TINY))
