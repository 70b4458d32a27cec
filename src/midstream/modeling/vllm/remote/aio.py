"""One midstream server on an event loop, and a trace that it runs."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

import httpx
import msgspec

from midstream.errors import ServerError, UnsupportedError
from midstream.modeling.vllm.asynchronous.backend import Backend
from midstream.modeling.vllm.data import Request
from midstream.modeling.vllm.ledger import Outcome
from midstream.modeling.vllm.remote import client, outcomes
from midstream.modeling.vllm.remote.outputs import ServedCompletion, ServedOutput
from midstream.modeling.vllm.remote.wire import (
    EDITS,
    MEDIA,
    TRACES,
    EditCall,
    EditInfo,
    Versions,
    decode,
    encode,
)


class AsyncServer:
    """A server under an address, with a key, for one event loop.

    Args:
        url: its address, such as "http://localhost:8000".
        api_key: the key, if it needs one.

    Raises:
        ValueError: the address is none.
    """

    def __init__(self, url: str, api_key: str | None = None):
        self.url = client.address(url)
        self._headers = client.headers(api_key)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._http: httpx.AsyncClient | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    def bind(self) -> httpx.AsyncClient:
        """The connections, on the event loop that runs.

        Raises:
            UnsupportedError: they are another loop's.
        """
        loop = asyncio.get_running_loop()
        if self._http is None or (self._loop is not None and self._loop.is_closed()):
            self._loop = loop
            self._http = client.asynchronous(self.url, self._headers)
        if self._loop is not loop:
            raise UnsupportedError(
                "This model has asked its server from another event loop, which still exists. Use "
                "one loop, or build another VLLM."
            )
        return self._http

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Have the loop do something, and keep it from being collected meanwhile."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def aclose(self) -> None:
        """Close its connections."""
        http, self._http = self._http, None
        if http is not None:
            await http.aclose()

    async def run(self, requests: Sequence[Request]) -> list[Outcome]:
        """Run requests together, each with its block if it has one.

        Raises:
            ServerError: the server cannot be reached, or refuses.
            DataVersionError: it has another version.
        """
        return outcomes.read(await self.ask("POST", TRACES, client.trace_body(requests)))

    async def install(self, name: str | None, block: bytes) -> int:
        """Install an edit; its number."""
        call = EditCall(versions=Versions(), block=block, name=name)
        return decode(await self.ask("POST", EDITS, encode(call)), EditInfo, "server's reply").id

    async def clear(self, edit: int) -> None:
        """Clear an edit; one that is cleared already is no error."""
        try:
            await self.ask("DELETE", f"{EDITS}/{edit}")
        except ServerError as error:
            if error.status != 404:
                raise

    async def ask(self, method: str, path: str, body: bytes | None = None) -> memoryview:
        """The body of an answer.

        Raises:
            ServerError: the server cannot be reached, or refuses.
            DataVersionError: it has another version.
        """
        said = {"Content-Type": MEDIA} if body is not None else {}
        try:
            async with self.bind().stream(method, path, content=body, headers=said) as response:
                client.check_start(response)
                found = client.Filled(self.url, response)
                async for part in response.aiter_raw():
                    found.add(part)
                client.check_answer(self.url, response, found.body)
                return found.body
        except httpx.HTTPError as error:
            raise client.unreachable(self.url, error) from error

    async def events(self, body: bytes) -> AsyncIterator[tuple[str, str]]:
        """A trace as the server tells of it: kinds of events and their data.

        Raises:
            ServerError: the server cannot be reached, or refuses.
        """
        said = {"Content-Type": MEDIA, "Accept": "text/event-stream"}
        try:
            async with self.bind().stream("POST", TRACES, content=body, headers=said) as response:
                client.check_start(response)
                if not response.is_success:
                    client.check_answer(self.url, response, await response.aread())
                kind = ""
                async for line in response.aiter_lines():
                    name, _, value = line.partition(": ")
                    if name == "event":
                        kind = value
                    elif name == "data":
                        yield kind, value
        except httpx.HTTPError as error:
            raise client.unreachable(self.url, error) from error


class RemoteFlight:
    """The requests of one trace on a server, in the form of `Flight`.

    Args:
        server: on the running event loop.
        requests: what to run.
        on_output: called with the number of a request and an output of it that is not the last.
        on_settled: called with the number of a request when all that comes of it is here.

    Attributes:
        requests: what they brought home.
        aborted: whether it was ended early.
    """

    def __init__(
        self,
        server: AsyncServer,
        requests: Sequence[Request],
        on_output: Callable[[int, Any], None],
        on_settled: Callable[[int], None],
    ):
        self._server, self._body = server, client.trace_body(requests, stream=True)
        self._on_output, self._on_settled = on_output, on_settled
        self.requests = [_under_way(request) for request in requests]
        self.aborted = self._complete = False
        self._task = server.spawn(self._run())

    async def wait(self) -> list[Outcome]:
        """Wait until all that comes of the requests is here.

        Raises:
            ServerError: the server cannot be reached, or refuses.
        """
        await asyncio.wait([self._task])
        if not self._task.cancelled():
            self._task.result()
        return self.requests

    async def abort(self) -> None:
        """End the requests early: the server ends what nobody waits for."""
        self.aborted = True
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        try:
            async for kind, data in self._server.events(self._body):
                self._take(kind, data)
        except asyncio.CancelledError:
            if not self.aborted:
                raise
            return
        if not self._complete:
            raise ServerError(f"{self._server.url} ended the stream before the trace was done.")

    def _take(self, kind: str, data: str) -> None:
        try:
            found = json.loads(data)
            if kind == "output":
                self._take_output(found)
            elif kind == "reply":
                self._take_reply(base64.b64decode(found["records"]))
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise ServerError(f"{self._server.url} sent what makes no sense: {error!r}") from error
        if kind == "error":
            client.refuse_said(self._server.url, data.encode())

    def _take_output(self, found: Any) -> None:
        index = found["request"]
        if "records" in found:
            outcomes.add_new(self.requests[index], base64.b64decode(found["records"]))
        self._on_output(index, _output(found))

    def _take_reply(self, data: bytes) -> None:
        known, self.requests = self.requests, outcomes.read(memoryview(bytearray(data)))
        self._complete = True
        for before, after in zip(known, self.requests, strict=True):
            for new, more in zip(before.new, after.new, strict=True):
                for name, items in more.items():
                    new.setdefault(name, []).extend(items)
            after.new = before.new  # what nobody has read yet, and what came last
        for index in range(len(self.requests)):
            self._on_settled(index)


def _under_way(request: Request) -> Outcome:
    sequences = request.settings.get("n", 1)
    return Outcome(new=[{} for _ in range(sequences if isinstance(sequences, int) else 1)])


def _output(found: Any) -> ServedOutput:
    """A request that goes on, as far as it is."""
    each = [msgspec.convert(one, ServedCompletion) for one in found["outputs"]]
    return ServedOutput("", None, [], outputs=each, finished=False)


class RemoteBackend(Backend):
    """A trace that a server runs, as `tracer.backend`."""

    def _sent(self, submissions: Sequence[Any]) -> Any:
        return RemoteFlight(self._engine, submissions, self._on_output, self._on_settled)
