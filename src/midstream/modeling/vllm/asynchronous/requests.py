"""The requests of an asynchronous engine, from when they are sent until all of them is here."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from midstream.errors import EngineDeadError, MidstreamError
from midstream.modeling.vllm.ledger import Ledger, Outcome, Submission
from midstream.modeling.vllm.results import Result, write
from midstream.modeling.vllm.wire import Payload

_PATIENCE = 60.0  # seconds of silence after which an engine is taken not to close a request


@dataclass(eq=False)
class Running(Outcome):
    """A request from when it is sent until all that comes of it is here.

    Attributes:
        name: what vLLM calls it, without the characters that it adds.
        where: its block's file and line.
        queue: where vLLM puts its outputs.
        sequences: vLLM's ids of its sequences.
        changed: set when there is news of it.
        ended: set when nothing more is asked of it.
        problem: what keeps the rest of it from coming.
    """

    name: str = ""
    where: str = ""
    queue: Any = None
    sequences: list[str] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    problem: Exception | None = None


class Requests:
    """What an asynchronous engine does with requests; on its event loop.

    Attributes:
        flights: the tasks that send requests and see them through.
    """

    llm: Any
    is_over: bool
    spawn: Callable[..., asyncio.Task[Any]]
    call: Callable[..., Awaitable[list[Any]]]

    def __init__(self) -> None:
        self.flights: set[asyncio.Task[Any]] = set()
        self._names = itertools.count()
        self._running: dict[str, Running] = {}
        self._ledger = Ledger(self._has_news)
        self._heard = time.monotonic()

    def check(self) -> None:
        """Refuse to begin anything in an engine that is no more.

        Raises:
            EngineDeadError: it has died or is closed.
        """
        if self.is_over:
            raise EngineDeadError("The engine has ended; the next trace builds a new one.")

    async def add(self, submission: Submission, kind: Any, salt: str) -> Running:
        """Send a request. It is on its way, and known here, when this returns.

        Must not be cancelled: it would not be known then whether the engine has the request.

        Args:
            kind: which outputs vLLM gives, its `RequestOutputKind`.
            salt: keeps the KV cache of a request with blocks to itself.
        """
        self.check()
        name = f"trace-{next(self._names)}"
        prompt, params = submission.loaded(kind, f"{salt}-{name}")
        running = self.expect(name, submission.payload, params.n, submission.where)
        try:
            running.queue = await self.llm.add_request(
                name, prompt, params, lora_request=submission.lora
            )
        except BaseException:
            self.forget(running)
            raise
        return running

    def expect(self, name: str, payload: Payload | None, n: int = 1, where: str = "") -> Running:
        """Know of a request before vLLM is given it, so that what comes of it is kept.

        Args:
            name: the id that vLLM is given; nothing else that runs has it.
            payload: what it brings to the engine.
            n: how many sequences it has.
            where: its block's file and line.
        """
        running = Running.of(payload, n)
        running.name, running.where = name, where
        self._running[name] = running
        return running

    async def abort(self, running: Running) -> None:
        """End a request early. Its blocks close, and what they have saved comes home."""
        if running.ended.is_set() or self.is_over:
            return
        running.aborted = True
        await self.llm.abort(running.queue.request_id, internal=True)
        # vLLM's output side may have finished it already, and then tells the engine nothing
        await self.llm.engine_core.abort_requests_async(running.sequences)
        if not running.expected:  # of requests without a block no word comes
            self._ledger.close(running.sequences)
        self._give_results()

    async def settle(self, running: Running) -> None:
        """Wait until all that comes of a request, whose output is in, is here.

        Raises:
            EngineDeadError: the engine has ended.
            MidstreamError: the engine does not close it.
        """
        self._give_results()
        while not all(map(self._ledger.is_closed, running.sequences)):
            if running.problem is not None:
                raise running.problem
            running.changed.clear()
            try:
                await asyncio.wait_for(running.changed.wait(), _PATIENCE)
            except TimeoutError:
                if time.monotonic() - self._heard > _PATIENCE:
                    text = f"The engine did not close the requests {running.sequences}."
                    raise MidstreamError(text) from None

    def forget(self, running: Running) -> None:
        """Forget a request of which nothing more is asked."""
        self._running.pop(running.name, None)
        self._ledger.forget(running.sequences)
        running.ended.set()

    @property
    def is_idle(self) -> bool:
        """Whether it runs no request of ours, and none is about to be sent."""
        return not self._running and not self.flights

    async def drained(self) -> None:
        """Wait until what runs now, or is about to be sent, has ended."""
        for running in list(self._running.values()):
            await running.ended.wait()
        if self.flights:
            await asyncio.wait(set(self.flights))

    def _begins(self, name: str, sequence: str, index: int) -> None:
        """Take in vLLM's id of a sequence, before the engine has it."""
        running = self._running.get(name)
        if running is not None:
            running.sequences.append(sequence)
            self._ledger.sequences[sequence] = (running, index)

    def _take(self, outputs: list[Any]) -> list[Any]:
        """Take our messages out of vLLM's outputs; the others."""
        self._heard = time.monotonic()
        try:
            return self._ledger.without_messages(outputs)
        except Exception as error:  # noqa: BLE001  # raised here, it would end vLLM's own task
            self._fail(error, list(self._running.values()))
            return []

    def _has_news(self, running: Running) -> None:
        running.changed.set()
        self._give_results()

    def _give_results(self) -> None:
        """Send the blocks that wait for it what their requests ended with."""
        if self._ledger.waiting:
            found = self._ledger.results()
            if found:
                self._ledger.waiting.difference_update(found)  # each is sent once
                self.spawn(self._send_results(found))

    async def _send_results(self, found: Mapping[str, Result | None]) -> None:
        requests = [self._ledger.sequences[i][0] for i in found]
        try:
            for records in await self.call("midstream_finish", write(found)):
                self._ledger.take_records(records)
        except Exception as error:  # noqa: BLE001  # who waits for these requests raises it
            self._fail(error, requests)
        self._ledger.close(found)

    def _fail(self, error: Exception, requests: Iterable[Any]) -> None:
        """Tell who waits for requests that the rest of them does not come."""
        for running in requests:
            running.problem = running.problem or error
            running.changed.set()
