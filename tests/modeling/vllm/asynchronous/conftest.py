"""One asynchronous engine for all tests of this folder, and the event loop that it serves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from tests.conftest import TINY
from tests.support.checkpoints import checkpoint

Run = Callable[[Coroutine[Any, Any, Any]], Any]
"""Runs a coroutine on the engine's loop."""


@pytest.fixture(scope="session")
def runner() -> Iterator[asyncio.Runner]:
    """The event loop, which lasts as long as its engine."""
    with asyncio.Runner() as found:
        yield found


@pytest.fixture(scope="session")
def engine_on_loop(runner: asyncio.Runner) -> Iterator[Any]:
    """The asynchronous engine on T-LLAMA."""
    from midstream import VLLM

    path = checkpoint("T-LLAMA", with_tokenizer=True)
    model = VLLM(str(path), mode="async", max_save_bytes=1 << 20, **TINY)
    yield model
    runner.run(model.aclose())


@pytest.fixture
def run(runner: asyncio.Runner) -> Run:
    """Run a coroutine on the engine's loop, in bounded time."""

    async def bounded(work: Coroutine[Any, Any, Any]) -> Any:
        return await asyncio.wait_for(work, 60)

    return lambda work: runner.run(bounded(work))


@pytest.fixture
def model(engine_on_loop: Any, run: Run) -> Iterator[Any]:
    """The engine; afterwards it must hold no block, run nothing and have nothing installed."""
    yield engine_on_loop
    run(idle(engine_on_loop))
    assert engine_on_loop.edits == ()


async def idle(model: Any, patience: float = 5.0) -> None:
    """Wait until the engine holds no block, shared memory or request; fail if it keeps one."""
    for _ in range(int(patience / 0.02)):
        stats = await model.astats()
        held = stats.live_blocks, stats.live_caches, stats.shared_segments
        if not any(held) and not requests_in(model):
            live = await model.vllm_entrypoint.collective_rpc("midstream_live")
            assert live == [0]
            return
        await asyncio.sleep(0.02)
    pytest.fail(f"The engine still holds {stats} and runs {requests_in(model)}.")


def requests_in(model: Any) -> list[str]:
    """VLLM's requests, and ours."""
    processor = model.vllm_entrypoint.output_processor
    return [*processor.request_states, *model._async_engine._running]
