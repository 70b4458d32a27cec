"""An asynchronous engine that is closed while a trace runs, and the next one, which dies."""

from __future__ import annotations

import asyncio
from typing import Any

from midstream import VLLM
from midstream.errors import EngineDeadError, UnsupportedError
from tests.modeling.vllm.scripts.reporting import TINY, engine_processes, reported
from tests.support.checkpoints import A, B, checkpoint

ENDLESS = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 480}


def main(model: Any) -> None:
    model.dispatch()  # before there is a loop
    with asyncio.Runner() as runner:
        runner.run(first_tokens(model))
        another_loop(model)
        runner.run(closed(model))
        runner.run(built_again(model))
        runner.run(core_killed(model))
    model.close()


async def first_tokens(model: Any) -> list[int]:
    """Tokens of a trace."""
    async with model.trace(A, max_tokens=3, temperature=0.0, ignore_eos=True) as tracer:
        logits = model.logits.save()
    tokens: list[int] = tracer.result.outputs[0].token_ids
    return tokens


def another_loop(model: Any) -> None:
    """Use the engine on a loop that is not the one that used it first."""
    with reported("another_loop") as facts:
        try:
            asyncio.run(first_tokens(model))
        except UnsupportedError as error:
            facts["text"] = str(error)


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


async def built_again(model: Any) -> None:
    """The next trace builds the next engine."""
    with reported("built_again") as facts:
        facts["tokens"] = await first_tokens(model)


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


async def reading(tracer: Any) -> Any:
    return await tracer.backend


if __name__ == "__main__":
    main(VLLM(str(checkpoint("T-LLAMA", with_tokenizer=True)), mode="async", **TINY))
