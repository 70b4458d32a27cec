"""What a `VLLM(..., mode="async")` does on its event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from midstream.errors import TransportError
from midstream.modeling.vllm import bootstrap
from midstream.modeling.vllm.asynchronous.backend import Backend
from midstream.modeling.vllm.asynchronous.engine import AsyncEngine
from midstream.modeling.vllm.asynchronous.flight import Flight
from midstream.modeling.vllm.data import Request
from midstream.modeling.vllm.ledger import Outcome, Submission
from midstream.modeling.vllm.modes import async_only
from midstream.modeling.vllm.remote.aio import AsyncServer, RemoteBackend
from midstream.modeling.vllm.sending import Sending
from midstream.modeling.vllm.stats import Stats

if TYPE_CHECKING:
    from midstream.modeling.vllm.client import Engine
    from midstream.modeling.vllm.tracer import Tracer

T = TypeVar("T")


class Asynchronous(Sending):
    """The awaitable forms of what waits for the engine."""

    repo: str
    _settings: dict[str, Any]
    _vllm: bootstrap.Installed
    _invariant: bool
    _let_go: Callable[[], list[Engine | AsyncEngine]]
    _let_go_of_servers: Callable[[], list[Any]]

    async def astats(self) -> Stats:
        """As ``stats`` of a model that is not asynchronous; running traces go on meanwhile.

        Raises:
            UnsupportedError: the model is not asynchronous, or this is not its event loop.
        """
        async_only(self.mode, "await model.astats()", "model.stats()")
        engine = self._async_engine
        return await engine.stats() if engine is not None else Stats()

    async def aclose(self) -> None:
        """End the engine's processes and free its memory. The next trace builds a new engine.

        Requests that run fail with an `EngineDeadError`. Twice is no error.

        Raises:
            UnsupportedError: the model is not asynchronous, or this is not its event loop.
        """
        async_only(self.mode, "await model.aclose()", "model.close()")
        engine = self._async_engine
        if engine is not None:
            engine.bind()
            self._let_go()
            await engine.aclose()
        for server in self._let_go_of_servers():
            await server.aclose()

    async def __aenter__(self) -> Self:
        async_only(self.mode, "async with VLLM(...)", "with VLLM(...)")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    def _dispatch_async(self) -> None:
        """Build the engine, if it is not up, or has died before anything ran in it."""
        engine = self._async_engine
        if engine is not None and engine.broken:
            self._lose(engine)
        if self._async_engine is None:
            engine = AsyncEngine(self.repo, self._settings, self._vllm, invariant=self._invariant)
            engine.on_death = lambda: self._lose(engine)
            self._async_engine = engine

    def _lose(self, engine: AsyncEngine) -> None:
        """Let go of an engine that has died, and have what is left of it removed."""
        if self._async_engine is engine:
            self._let_go()
        engine.spawn(asyncio.to_thread(engine.close))

    def _on_loop(self) -> AsyncEngine:
        """The engine, on its event loop.

        Raises:
            UnsupportedError: this is not its loop.
        """
        if self._async_engine is not None:
            self._async_engine.bind()
        self.dispatch()
        assert self._async_engine is not None
        self._async_engine.bind()
        return self._async_engine

    # What runs in it.

    def _prepared(self, requests: Sequence[Request]) -> tuple[AsyncEngine, list[Submission]]:
        """The engine, and what to submit for requests."""
        submissions = self._submissions(requests)
        engine = self._on_loop()
        self._check_lengths(submissions, engine)
        return engine, submissions

    def _launch(
        self, tracer: Tracer, requests: Sequence[Request], shared: Mapping[str, Any]
    ) -> Backend:
        """Send the requests of a trace."""
        if isinstance(tracer._server, AsyncServer):
            return RemoteBackend(tracer._server, tracer, requests, shared)
        engine, submissions = self._prepared(requests)
        return Backend(engine, tracer, submissions, shared)

    async def _run_plain(self, requests: Sequence[Request]) -> Sequence[Outcome]:
        """Run requests without a block of their own; cancelled, they are ended."""
        from vllm.sampling_params import RequestOutputKind

        engine, submissions = self._prepared(requests)
        flight = Flight(engine, submissions, RequestOutputKind.FINAL_ONLY)
        try:
            return await flight.wait()
        except asyncio.CancelledError:
            engine.spawn(flight.abort())
            raise

    async def _ainstall(self, method: str, *arguments: Any) -> None:
        """Install something in every worker.

        Raises:
            TransportError: a worker could not take it in.
            EngineDeadError: the engine has ended meanwhile.
        """
        engine = self._on_loop()
        for problem in await engine.call(method, *arguments):
            if problem:
                raise TransportError(problem)
        engine.check()

    async def _uncut(
        self, work: Coroutine[Any, Any, T], undo: Callable[[], Awaitable[None]] | None = None
    ) -> T:
        """Wait for what must not be left halfway: cancelled, it is done and undone."""
        task = asyncio.get_running_loop().create_task(work)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if self._async_engine is not None:
                self._async_engine.spawn(_done(task, undo))
            raise

    async def _after_running(self, act: Callable[[AsyncEngine], Awaitable[Any]]) -> None:
        """Do something with the engine when the requests of now have ended.

        Waits for it only if there are none.
        """
        engine = self._async_engine
        if engine is None:
            return
        engine.bind()
        if engine.is_idle:
            await act(engine)
        else:
            engine.spawn(_later(engine, act))


async def _later(engine: AsyncEngine, act: Callable[[AsyncEngine], Awaitable[Any]]) -> None:
    await engine.drained()
    if not engine.is_over:
        await act(engine)


async def _done(task: asyncio.Task[Any], undo: Callable[[], Awaitable[None]] | None) -> None:
    await asyncio.wait([task])
    if undo is not None and not task.cancelled() and task.exception() is None:
        await undo()
