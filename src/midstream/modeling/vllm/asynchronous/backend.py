"""`tracer.backend`: an asynchronous trace as its outputs come, and as a whole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Generator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from midstream.modeling.vllm.asynchronous.flight import Flight
from midstream.modeling.vllm.failures import report
from midstream.modeling.vllm.outputs import attach_new_saves, attach_saves

if TYPE_CHECKING:
    from midstream.modeling.vllm.tracer import Tracer


class Backend:
    """What the engine makes of an asynchronous trace; its requests are on their way already.

    ``async for output in tracer.backend`` gives vLLM's `RequestOutput`s with the text so far;
    ``await tracer.backend`` gives the finished one, or a list of them in the order of the invokes
    if there are several. Each output has ``saves``: empty until it is finished, then the values of
    its request by name, edits' and the block's own. With ``stream_saves=True`` each has, in
    ``new_saves``, the items that the block has appended to the lists it saves since the output
    before, by the list's name; it is empty otherwise. A slow reader gets the latest output of each
    request, not every one, with all that is new.

    It is read once: a second reader gets nothing, and None from ``await``. Leaving the loop early,
    ``aclose()`` and cancelling the task that reads end the requests and free their blocks.

    A failed block raises its `InterventionError` when all requests are done, in place of its own
    finished output.
    """

    def __init__(
        self,
        engine: Any,
        tracer: Tracer,
        submissions: Sequence[Any],
        shared: Mapping[str, Any],
    ):
        self._engine, self._tracer, self._shared = engine, tracer, shared
        self._pending: dict[int, Any] = {}
        self._news = asyncio.Event()
        self._taken = False
        self._left = len(submissions)
        self._last = 0
        self._flight = self._sent(submissions)
        self._task: asyncio.Task[None] = engine.spawn(self._run())

    def _sent(self, submissions: Sequence[Any]) -> Any:
        """The requests, on their way."""
        from vllm.sampling_params import RequestOutputKind

        kind = RequestOutputKind.CUMULATIVE
        return Flight(self._engine, submissions, kind, self._on_output, self._on_settled)

    def __await__(self) -> Generator[Any, None, Any]:
        return self._drain().__await__()

    async def _drain(self) -> Any:
        if not self._take():
            return None
        try:
            await asyncio.shield(self._task)
        except asyncio.CancelledError:
            self._abandon()
            raise
        return self._tracer.result

    def __aiter__(self) -> AsyncIterator[Any]:
        return self._outputs()

    async def _outputs(self) -> AsyncIterator[Any]:
        if not self._take():
            return
        try:
            while self._pending or not self._task.done():
                if not self._pending:
                    self._news.clear()
                    await self._news.wait()
                while self._pending:
                    yield self._next()
            await self._task
        except GeneratorExit:
            await self.aclose()
            raise
        except BaseException:
            self._abandon()
            raise

    def _next(self) -> Any:
        """The output that has waited longest."""
        index = next(iter(self._pending))
        output = self._pending.pop(index)
        attach_new_saves(self._flight.requests[index], output)
        return output

    @property
    def done(self) -> bool:
        """Whether nothing more comes: values are in ``tracer.saves``, or there is an error."""
        return self._task.done()

    async def aclose(self) -> None:
        """End the requests, if they run; their blocks are gone when this returns."""
        self._take()
        if not self._task.done():
            await self._flight.abort()
        with suppress(Exception):  # nobody reads it any more
            await asyncio.shield(self._task)

    def _take(self) -> bool:
        """Take the right to read; whether it was there."""
        self._engine.bind()
        taken, self._taken = self._taken, True
        return not taken

    def _abandon(self) -> None:
        """End the requests without waiting for it."""
        if not self._task.done():
            self._engine.spawn(self.aclose())

    async def _run(self) -> None:
        """Bring everything home; the exceptions of this task are those of the trace."""
        try:
            outcomes = await self._flight.wait()
            records = self._tracer._take_home(outcomes, self._shared)
            self._give_last()
            if not self._flight.aborted:
                report(records)
        finally:
            self._news.set()

    def _on_output(self, index: int, output: Any) -> None:
        output.saves = {}
        self._pending[index] = output
        self._news.set()

    def _on_settled(self, index: int) -> None:
        attach_saves(self._flight.requests[index])
        self._left -= 1
        if self._left:
            self._give_finished(index)
        else:
            self._last = index  # it waits for what all of them have filled

    def _give_last(self) -> None:
        if self._flight.requests and not self._left:
            saves = self._flight.requests[self._last].output.saves
            saves.update((name, self._tracer.saves[name]) for name in self._shared)
            self._give_finished(self._last)

    def _give_finished(self, index: int) -> None:
        outcome = self._flight.requests[index]
        self._pending.pop(index, None)
        if not outcome.has_failed:
            self._pending[index] = outcome.output
        self._news.set()
