"""The client of one asynchronous vLLM engine: sends requests, takes records back, on one loop."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any

from midstream.errors import EngineDeadError, UnsupportedError
from midstream.modeling.vllm import bootstrap
from midstream.modeling.vllm.asynchronous.outputs import Watched
from midstream.modeling.vllm.asynchronous.requests import Requests
from midstream.modeling.vllm.building import build, new_owner
from midstream.modeling.vllm.ending import PATIENCE, Ending, fail_calls
from midstream.modeling.vllm.payloads.segments import discard, remaining
from midstream.modeling.vllm.stats import Stats

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


class AsyncEngine(Requests):
    """One asynchronous vLLM engine with blocks, for one event loop.

    Args:
        repo: checkpoint folder or repository id.
        settings: vLLM's engine arguments.
        vllm: the installed vLLM.
        invariant: whether it is to use batch-invariant kernels.

    Attributes:
        llm: vLLM's `AsyncLLM`; None once it is closed.
        broken: whether it has died.
        is_over: whether it has died or is closed.
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
        super().__init__()
        self.broken = self.is_over = False
        self.on_death: Callable[[], None] = lambda: None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._dead_text = _DEAD
        self._owner = new_owner()
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
        self.check()
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

    # How it ends.

    def has_died(self, error: BaseException) -> bool:
        """Whether the engine cannot go on after an error; one that was closed has not died."""
        from vllm.v1.engine.exceptions import EngineDeadError as VLLMEngineDeadError

        if isinstance(error, VLLMEngineDeadError) or self._ending.has_begun:
            self._die(error)
        return self.broken

    def death(self, cause: BaseException) -> EngineDeadError:
        """The error for who waited for the engine, naming the blocks that ran when it died."""
        error = EngineDeadError(self._dead_text)
        error.__cause__ = cause.__cause__ if isinstance(cause, EngineDeadError) else cause
        return error

    def _die(self, cause: BaseException) -> None:
        """Take in that the engine has ended, and tell everyone."""
        if self.is_over:
            return
        self.broken = self.is_over = True
        found = dict.fromkeys(each.where for each in self._running.values() if each.where)
        if found:
            self._dead_text = f"{_DEAD} The blocks that ran: {'; '.join(found)}."
        self._fail(self.death(cause), list(self._running.values()))
        self.on_death()

    def _core_is_gone(self) -> None:
        """Wake who waits for an answer of the engine, which vLLM does not."""
        from vllm.v1.engine.exceptions import EngineDeadError as VLLMEngineDeadError

        self._die(VLLMEngineDeadError())
        fail_calls(self._core.utility_results, VLLMEngineDeadError())
        if not self._core.resources.engine_dead:  # else vLLM begins no further call
            asyncio.get_running_loop().call_later(0.05, self._core_is_gone)

    async def aclose(self) -> None:
        """End the engine's processes; requests that run fail. Twice is no error."""
        self.bind()
        if self.llm is not None and self.llm.output_handler is not None:
            self.llm.output_handler.cancel()  # else vLLM logs the end as a failure
        self.is_over = True
        closed = EngineDeadError("The model was closed while this request ran.")
        for running in list(self._running.values()):
            self._fail(closed, [running])
            if running.queue is not None:
                running.queue.put(closed)
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """End the engine's processes, on no event loop; twice is no error."""
        llm, self.llm = self.llm, None
        self.is_over = True
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
        engine.broken = engine.is_over = True
    else:
        with suppress(RuntimeError):  # the loop has ended as well
            engine._loop.call_soon_threadsafe(engine._core_is_gone)
