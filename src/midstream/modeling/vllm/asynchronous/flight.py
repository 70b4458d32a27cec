"""Requests that are sent together, until all that comes of them is home."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from typing import Any

from midstream.modeling.vllm.asynchronous.engine import AsyncEngine
from midstream.modeling.vllm.asynchronous.requests import Running
from midstream.modeling.vllm.commons import Commons
from midstream.modeling.vllm.ledger import Submission


class Flight:
    """The requests of one trace, or of one plain call, in an asynchronous engine.

    They are sent at once, in their order. What happens to them does not depend on who waits.

    Args:
        engine: on the running event loop.
        submissions: the requests.
        kind: which outputs vLLM gives, its `RequestOutputKind`.
        on_output: called with the number of a request and an output of it that is not the last.
        on_settled: called with the number of a request when all that comes of it is here.

    Attributes:
        requests: those that have been sent, in their order.
        aborted: whether it was ended early.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        submissions: Sequence[Submission],
        kind: Any,
        on_output: Callable[[int, Any], None] = lambda index, output: None,
        on_settled: Callable[[int], None] = lambda index: None,
    ):
        self._engine, self._submissions, self._kind = engine, submissions, kind
        self._on_output, self._on_settled = on_output, on_settled
        self._commons = Commons(submissions)
        self.requests: list[Running] = []
        self.aborted = False
        self._task = engine.spawn(self._run())
        engine.flights.add(self._task)
        self._task.add_done_callback(engine.flights.discard)

    async def wait(self) -> list[Running]:
        """Wait until all that comes of the requests is here.

        Raises:
            EngineDeadError: the engine has died.
            Exception: vLLM refused a request; the others have been ended.
        """
        await asyncio.shield(self._task)
        return self.requests

    async def abort(self) -> None:
        """End the requests early; `wait` tells when they have ended."""
        self.aborted = True
        await asyncio.gather(*map(self._engine.abort, self.requests))

    async def _run(self) -> None:
        pumps: list[asyncio.Task[None]] = []
        problem: BaseException | None = None
        try:
            await self._send(pumps)
        except Exception as error:  # noqa: BLE001  # raised when the others have ended
            problem = error
            await self.abort()
        found = await asyncio.gather(*pumps, return_exceptions=True)
        problem = problem or next((error for error in found if error is not None), None)
        if problem is None or not self._engine.has_died(problem):
            await self._drop()
        if problem is not None:
            raise self._engine.death(problem) if self._engine.broken else problem

    async def _send(self, pumps: list[asyncio.Task[None]]) -> None:
        if self._commons.to_bring:
            await self._engine.call("midstream_bring", self._commons.to_bring)
        salt = f"midstream-{os.urandom(8).hex()}"
        for index, submission in enumerate(self._submissions):
            if self.aborted:
                return
            self._commons.tell(submission)
            running = await self._engine.add(submission, self._kind, salt)
            self.requests.append(running)
            pumps.append(self._engine.spawn(self._pump(index, running)))
            if self.aborted:
                await self._engine.abort(running)

    async def _pump(self, index: int, running: Running) -> None:
        try:
            running.output = await self._last_output(index, running)
            await self._engine.settle(running)
        except Exception:
            await self._engine.abort(running)
            raise
        finally:
            self._engine.forget(running)
        self._on_settled(index)

    async def _last_output(self, index: int, running: Running) -> Any:
        """Take one request's outputs from vLLM until it is finished; the finished one."""
        latest: dict[int, Any] = {}
        while True:
            output = running.queue.get_nowait() or await running.queue.get()
            # of several sequences vLLM gives those that have news
            latest.update((completion.index, completion) for completion in output.outputs)
            output.outputs = [latest[i] for i in sorted(latest)]
            if output.finished:
                return output
            self._on_output(index, output)

    async def _drop(self) -> None:
        """Have the workers forget what requests that have not come had in common."""
        sent = len(self.requests) == len(self._submissions)
        complete = sent and all(running.is_complete for running in self.requests)
        if self._commons.to_bring and not complete:
            await self._engine.call("midstream_drop", self._commons.numbers)
