"""One midstream server, as a client uses it. Nothing here needs vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, TypeVar

import httpx
import msgspec
import numpy as np

from midstream.errors import DataVersionError, ServerError
from midstream.modeling.vllm.data import Request, write
from midstream.modeling.vllm.ledger import Outcome
from midstream.modeling.vllm.remote import outcomes
from midstream.modeling.vllm.remote.tree import Branch
from midstream.modeling.vllm.remote.wire import (
    EDITS,
    FRAMES,
    MEDIA,
    MODEL,
    TRACES,
    EditCall,
    EditInfo,
    Failed,
    Started,
    TraceCall,
    Versions,
    decode,
    encode,
)

_CONNECT, _ANSWER = 10.0, 600.0  # seconds
_RETRIES = 2  # of a connection that fails; nothing has been asked yet then
_T = TypeVar("_T")
MOST_BYTES = 4 << 30
"""Bytes of an answer; msgpack holds no more."""


class About(msgspec.Struct):
    """What a server says of its model.

    Attributes:
        model: checkpoint folder or repository id, as the server was given it.
        versions: the server's, with vLLM's.
        tree: the module tree.
        taps: declared taps.
        code: whether it runs clients' blocks.
        limits: by name.
    """

    model: str
    versions: dict[str, str]
    tree: Branch
    taps: list[str] = []
    code: bool = True
    limits: dict[str, Any] = {}


class _Said(msgspec.Struct):
    versions: Versions


def address(url: Any) -> str:
    """A server's address, checked.

    Raises:
        TypeError: it is no text.
        ValueError: it is no `http://` or `https://` address.
    """
    if not isinstance(url, str):
        raise TypeError(f"serve={url!r}: expected a server's address, such as 'http://host:8000'.")
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"serve={url!r}: expected an address with http:// or https:// in front.")
    return url.rstrip("/")


def headers(api_key: str | None) -> dict[str, str]:
    """What every request says. Compressed answers are not asked for: they could be of any size."""
    said = {"Accept": f"{FRAMES}, {MEDIA}", "Accept-Encoding": "identity"}
    return {**said, "Authorization": f"Bearer {api_key}"} if api_key else said


def timeouts() -> httpx.Timeout:
    """How long to wait for a connection, and for an answer."""
    return httpx.Timeout(_ANSWER, connect=_CONNECT)


def asynchronous(url: str, said: dict[str, str]) -> httpx.AsyncClient:
    """Connections for an event loop."""
    return httpx.AsyncClient(
        base_url=url,
        headers=said,
        timeout=timeouts(),
        transport=httpx.AsyncHTTPTransport(retries=_RETRIES),
    )


def trace_body(requests: Sequence[Request], **how: bool) -> bytes:
    """A trace as the server takes it.

    Raises:
        TransportError: a setting or part of a prompt is no plain data.
    """
    sent = [msgspec.structs.replace(each, settings=_named(each.settings)) for each in requests]
    return encode(TraceCall(versions=Versions(), trace=write(sent), **how))


def _named(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings with an adapter's name in its place: the server has adapters of its own."""
    adapter = settings.get("lora_request")
    name = getattr(adapter, "lora_name", adapter)
    return settings if adapter is None else {**settings, "lora_request": name}


class Server:
    """A server under an address, with a key.

    Args:
        url: its address, such as "http://localhost:8000".
        api_key: the key, if it needs one.

    Raises:
        ValueError: the address is none.
    """

    def __init__(self, url: str, api_key: str | None = None):
        self.url = address(url)
        self._http = httpx.Client(
            base_url=self.url,
            headers=headers(api_key),
            timeout=timeouts(),
            transport=httpx.HTTPTransport(retries=_RETRIES),
        )

    def close(self) -> None:
        """Close its connections."""
        self._http.close()

    def run(self, requests: Sequence[Request]) -> list[Outcome]:
        """Run requests together, each with its block if it has one.

        Raises:
            ServerError: the server cannot be reached, or refuses.
            DataVersionError: it has another version.
        """
        return outcomes.read(self._answer("POST", TRACES, trace_body(requests))[1])

    def start(self, requests: Sequence[Request]) -> str:
        """Begin to run requests; the trace's id, see ``fetch``."""
        return self._ask("POST", TRACES, Started, trace_body(requests, background=True)).id

    def fetch(self, trace: str, wait: float = 30.0) -> list[Outcome] | None:
        """What a trace brought home; None while it runs.

        Args:
            trace: its id.
            wait: seconds to wait for it, at most 60.
        """
        path = f"{TRACES}/{trace}?wait={wait:g}"
        status, body = self._answer("GET", path)
        if status == 202:
            return None
        return outcomes.read(body)

    def cancel(self, trace: str) -> None:
        """Cancel a trace, or let go of what it brought home."""
        self._answer("DELETE", f"{TRACES}/{trace}")

    def install(self, name: str | None, block: bytes) -> int:
        """Install an edit; its number."""
        body = encode(EditCall(versions=Versions(), block=block, name=name))
        return self._ask("POST", EDITS, EditInfo, body).id

    def clear(self, edit: int) -> None:
        """Clear an edit; one that is cleared already is no error."""
        try:
            self._answer("DELETE", f"{EDITS}/{edit}")
        except ServerError as error:
            if error.status != 404:
                raise

    def about(self) -> About:
        """What the server says of its model.

        Raises:
            DataVersionError: it has another version, and the rest may look otherwise.
        """
        body = self._answer("GET", MODEL)[1]
        Versions().check(self._decoded(body, _Said).versions, f"server {self.url}")
        return self._decoded(body, About)

    def _ask(self, method: str, path: str, kind: type[_T], body: bytes | None = None) -> _T:
        return self._decoded(self._answer(method, path, body)[1], kind)

    def _decoded(self, body: memoryview, kind: type[_T]) -> _T:
        try:
            return decode(body, kind, "server's reply")
        except ValueError as error:
            if isinstance(error, DataVersionError):
                raise
            raise ServerError(f"{self.url} is no midstream server: {error}") from error

    def _answer(self, method: str, path: str, body: bytes | None = None) -> tuple[int, memoryview]:
        said = {"Content-Type": MEDIA} if body is not None else {}
        try:
            with self._http.stream(method, path, content=body, headers=said) as response:
                check_start(response)
                found = Filled(self.url, response)
                for part in response.iter_raw():
                    found.add(part)
                check_answer(self.url, response, found.body)
                return response.status_code, found.body
        except httpx.HTTPError as error:
            raise unreachable(self.url, error) from error


class Filled:
    """The body of an answer, as it comes.

    Args:
        url: the server's.
        response: the answer; it may say how long it is going to be.

    Raises:
        ServerError: it is too long.
    """

    def __init__(self, url: str, response: httpx.Response):
        self._url, self._at = url, 0
        announced = response.headers.get("content-length", "")
        size = int(announced) if announced.isdigit() else 0
        self._check(size)
        self._memory = _memory(size)

    @property
    def body(self) -> memoryview:
        """What has come, writable."""
        return self._memory[: self._at]

    def add(self, part: bytes) -> None:
        """Take in a part."""
        end = self._at + len(part)
        self._check(end)
        if end > len(self._memory):  # its length was not announced
            known, self._memory = self.body, _memory(max(end, 2 * len(self._memory)))
            self._memory[: self._at] = known
        self._memory[self._at : end] = part
        self._at = end

    def _check(self, size: int) -> None:
        if size > MOST_BYTES:
            raise ServerError(f"{self._url} sent more than {MOST_BYTES} bytes.")


def _memory(size: int) -> memoryview:
    """So many bytes that nothing has been written to: a bytearray costs as much as a download."""
    return np.empty(size, np.uint8).data


def check_start(response: httpx.Response) -> None:
    """Refuse an answer that is compressed.

    Raises:
        ServerError: it is.
    """
    if response.headers.get("content-encoding", "identity") != "identity":
        raise ServerError("The server compressed its answer, which was not asked for.")


def check_answer(url: str, response: httpx.Response, body: bytes | memoryview) -> None:
    """Raise for an answer that is an error.

    Raises:
        DataVersionError: the server has another version.
        ServerError: any other; the text is the server's.
    """
    if response.is_success:
        return
    refuse_said(url, body, response.status_code)


def refuse_said(url: str, body: bytes | memoryview, status: int = 0) -> NoReturn:
    """Raise for the body of an answer that is an error.

    Raises:
        DataVersionError: the server has another version.
        ServerError: any other.
    """
    try:
        failure = msgspec.json.decode(body, type=Failed).error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        refuse(url, status, "", bytes(body[:2000]).decode("utf-8", "replace"))
    refuse(url, status or failure.code, failure.type, failure.message)


def refuse(url: str, status: int, kind: str, text: str) -> NoReturn:
    """Raise what a server said went wrong.

    Raises:
        DataVersionError: the server has another version.
        ServerError: any other.
    """
    if kind == DataVersionError.__name__:
        raise DataVersionError(f"{url}: {text}")
    raise ServerError(f"{url} answered {status} {kind}: {text}", status=status, kind=kind)


def unreachable(url: str, error: httpx.HTTPError) -> ServerError:
    """The error for a connection that failed."""
    what = "did not answer in time" if isinstance(error, httpx.TimeoutException) else "failed"
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        what = "cannot be reached"
    hint = ""
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        hint = (
            ". If its certificate is your own, name the file in SSL_CERT_FILE in the environment."
        )
    return ServerError(f"{url} {what}: {type(error).__name__}: {error}{hint}")
