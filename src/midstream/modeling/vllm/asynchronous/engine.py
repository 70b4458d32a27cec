"""The client of one asynchronous vLLM engine: sends requests, takes records back, on one loop."""

from __future__ import annotations

import asyncio
import gc
import itertools
import time
import weakref
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from midstream.errors import EngineDeadError, MidstreamError, UnsupportedError
from midstream.modeling.vllm import bootstrap
from midstream.modeling.vllm.asynchronous.outputs import Watched
from midstream.modeling.vllm.building import build
from midstream.modeling.vllm.ending import PATIENCE, Ending, fail_calls
from midstream.modeling.vllm.ledger import Ledger, Outcome, Submission
from midstream.modeling.vllm.payloads.segments import discard, owner_id, remaining, sweep
from midstream.modeling.vllm.results import Result, write
from midstream.modeling.vllm.stats import Stats
from midstream.modeling.vllm.wire import Payload

_TAGS = itertools.count(1 << 20)  # apart from those of engines that serve threads
_PATIENCE = 60.0  # seconds of silence after which an engine is taken not to close a request
_DEAD = (
    "The engine ended while it ran this trace. What its process printed is above; the next trace "
    "builds a new engine."
)
_NO_LOOP = (
    "An asynchronous engine is used on an event loop, and none runs here. Move the call into a "
    "coroutine (`async def main(): ...`, `asyncio.run(main())`), or build the model without "
    "mode='async'."
)
_OTHER_LOOP = (
    "This engine belongs to the event loop that used it first, and this one {state}: what it sends "
    "would be waited for in vain. Use it inside one `asyncio.run`, or one `asyncio.Runner`; for "
    "another loop close the model (`model.close()` outside of loops) and it builds a new engine."
)


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


class AsyncEngine:
    """One asynchronous vLLM engine with blocks, for one event loop.

    Args:
        repo: checkpoint folder or repository id.
        settings: vLLM's engine arguments.
        vllm: the installed vLLM.
        invariant: whether it is to use batch-invariant kernels.

    Attributes:
        llm: vLLM's `AsyncLLM`; None once it is closed.
        broken: whether it has died.
        flights: the tasks that send requests and see them through.
        on_death: called, on the loop, when it has died.

    Raises:
        EngineBuildError: the engine did not come up; the text holds the root cause.
    """

    def __init__(
        self,
        repo: str,
        settings: Mapping[str, Any],
        vllm: bootstrap.Installed,
        *,
        invariant: bool = False,
    ):
        self.broken = False
        self.on_death: Callable[[], None] = lambda: None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._names = itertools.count()
        self._running: dict[str, Running] = {}
        self._ledger = Ledger(self._has_news)
        self.flights: set[asyncio.Task[Any]] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._heard = time.monotonic()
        self._dead_text = _DEAD
        self._owner = owner_id(tag=next(_TAGS))
        sweep()  # of clients that were killed
        with suppress(RuntimeError):  # built before there is a loop
            self._loop = asyncio.get_running_loop()
        self.llm = build(
            repo, dict(settings), vllm, self._owner, invariant=invariant, asynchronous=True
        )
        itself = weakref.ref(self)
        self._core = self.llm.engine_core
        self._ending = Ending(self._core, on_death=lambda: _tell(itself()))
        Watched(self.llm.output_processor, self._begins, self._take, self._die)

    def bind(self) -> None:
        """Check that this is the engine's event loop; the first one that uses it is.

        Raises:
            UnsupportedError: it is another, or none runs.
        """
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise UnsupportedError(_NO_LOOP) from None
        if self._loop is None:
            self._loop = loop
        elif self._loop is not loop:
            state = "comes after it" if self._loop.is_closed() else "is another"
            raise UnsupportedError(_OTHER_LOOP.format(state=state))

    @property
    def budget(self) -> int:
        """Most tokens the engine runs in one step."""
        return int(getattr(self.llm.vllm_config.scheduler_config, self.budget_name))

    @property
    def budget_name(self) -> str:
        """The engine argument that sets it."""
        less = self.llm.vllm_config.scheduler_config.max_num_scheduled_tokens
        return "max_num_batched_tokens" if less is None else "max_num_scheduled_tokens"

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Have the loop do something, and keep it from being collected meanwhile."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of every worker, between two steps.

        Raises:
            EngineDeadError: the engine has ended.
            UnsupportedError: this is not the engine's event loop.
        """
        self.bind()
        try:
            found: list[Any] = await self.llm.collective_rpc(method, args=arguments)
        except Exception as error:
            if self.has_died(error):
                raise self.death(error) from error
            raise
        return found

    async def stats(self) -> Stats:
        """What the engine has done and what it holds.

        Raises:
            EngineDeadError: the engine's process has ended.
        """
        return Stats.of(await self.call("midstream_stats"), len(remaining(self._owner)))

    # Requests.

    async def add(self, submission: Submission, kind: Any, salt: str) -> Running:
        """Send a request. It is on its way, and known here, when this returns.

        Must not be cancelled: it would not be known then whether the engine has the request.

        Args:
            kind: which outputs vLLM gives, its `RequestOutputKind`.
            salt: keeps the KV cache of a request with blocks to itself.
        """
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
        if running.ended.is_set() or self.broken:
            return
        running.aborted = True
        await self.llm.abort(running.queue.request_id, internal=True)
        # vLLM's output side may have finished it already, and then tells the engine nothing
        await self._core.abort_requests_async(running.sequences)
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

    # How it ends.

    def has_died(self, error: BaseException) -> bool:
        """Whether the engine cannot go on after an error."""
        from vllm.v1.engine.exceptions import EngineDeadError as VLLMEngineDeadError

        if isinstance(error, VLLMEngineDeadError) or self._ending.has_begun:
            self._die(error)
        return self.broken

    def death(self, cause: BaseException) -> EngineDeadError:
        """The error for who waited for the engine, naming the blocks that ran when it died."""
        error = EngineDeadError(self._dead_text)
        error.__cause__ = cause.__cause__ if isinstance(cause, EngineDeadError) else cause
        return error

    def _fail(self, error: Exception, requests: Iterable[Any]) -> None:
        """Tell who waits for requests that the rest of them does not come."""
        for running in requests:
            running.problem = running.problem or error
            running.changed.set()

    def _die(self, cause: BaseException) -> None:
        """Take in that the engine has ended, and tell everyone."""
        if self.broken:
            return
        self.broken = True
        found = dict.fromkeys(each.where for each in self._running.values() if each.where)
        if found:
            self._dead_text = f"{_DEAD} The blocks that ran: {'; '.join(found)}."
        self._fail(self.death(cause), list(self._running.values()))
        self.on_death()

    def _core_is_gone(self) -> None:
        """Wake who waits for an answer of the engine, which vLLM does not."""
        from vllm.v1.engine.exceptions import EngineDeadError as VLLMEngineDeadError

        if self.llm is not None:
            self._die(VLLMEngineDeadError())
        fail_calls(self._core.utility_results, VLLMEngineDeadError())
        if not self._core.resources.engine_dead:  # else vLLM begins no further call
            asyncio.get_running_loop().call_later(0.05, self._core_is_gone)

    async def aclose(self) -> None:
        """End the engine's processes; requests that run fail. Twice is no error."""
        self.bind()
        if self.llm is not None and self.llm.output_handler is not None:
            self.llm.output_handler.cancel()  # else vLLM logs the end as a failure
        closed = EngineDeadError("The model was closed while this request ran.")
        for running in list(self._running.values()):
            self._fail(closed, [running])
            if running.queue is not None:
                running.queue.put(closed)
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """End the engine's processes, on no event loop; twice is no error."""
        llm, self.llm = self.llm, None
        if llm is None:
            return
        self._ending(self._core, 1.0 if self.broken else PATIENCE)
        llm.shutdown()
        del llm
        gc.collect()
        discard(self._owner)


def _tell(engine: AsyncEngine | None) -> None:
    """Tell an engine that its process has ended; called in a thread of its own."""
    if engine is None or engine.llm is None:
        return
    if engine._loop is None:
        engine.broken = True
    else:
        with suppress(RuntimeError):  # the loop has ended as well
            engine._loop.call_soon_threadsafe(engine._core_is_gone)
