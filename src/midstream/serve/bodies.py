"""Bodies of HTTP requests, read within bounds of size and time."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from starlette.types import Message, Receive

from midstream.serve.problems import Problem

SECONDS = 60.0
"""How long a client may take to send a body."""


def check_headers(headers: Mapping[str, str], limit: int) -> None:
    """Refuse a body before it is read.

    Raises:
        Problem: it is too long, or compressed.
    """
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise Problem(415, "Compressed bodies are not taken: leave Content-Encoding out.")
    length = headers.get("content-length", "0")
    if length.isdigit() and int(length) > limit:
        raise _too_long(limit)


async def read(receive: Receive, limit: int, seconds: float = SECONDS) -> bytes:
    """The whole body.

    Raises:
        Problem: it is longer than ``limit`` bytes, or does not come in time.
        Gone: the client has gone.
    """
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(seconds):
            while True:
                message = await receive()
                if message["type"] != "http.request":
                    raise Gone
                part = message.get("body", b"")
                size += len(part)
                if size > limit:
                    raise _too_long(limit)
                parts.append(part)
                if not message.get("more_body"):
                    return b"".join(parts)
    except TimeoutError:
        raise Problem(408, f"The body did not come within {seconds:g} s.") from None


class Gone(Exception):  # noqa: N818 - control flow: there is nobody to answer
    """The client has closed the connection."""


class Replayed:
    """A body that was read, for whoever reads it next; then what the connection says."""

    def __init__(self, body: bytes, receive: Receive):
        self._body, self._receive = [body], receive

    async def __call__(self) -> Message:
        """The next message of the connection."""
        if self._body:
            return {"type": "http.request", "body": self._body.pop(), "more_body": False}
        return await self._receive()


class Counted:
    """A body that is passed on as it comes, up to a size and a time.

    Beyond either the connection counts as closed.
    """

    def __init__(self, receive: Receive, limit: int, seconds: float = SECONDS):
        self._receive, self._left = receive, limit
        self._end: float | None = asyncio.get_running_loop().time() + seconds

    async def __call__(self) -> Message:
        """The next message of the connection."""
        try:
            async with asyncio.timeout_at(self._end):
                message = await self._receive()
        except TimeoutError:
            return {"type": "http.disconnect"}
        self._left -= len(message.get("body", b""))
        if not message.get("more_body"):
            self._end = None  # from here on it is waited for whether the client leaves
        return {"type": "http.disconnect"} if self._left < 0 else message


def _too_long(limit: int) -> Problem:
    return Problem(413, f"The body is longer than {limit} bytes (--max-body-bytes).")


def headers_of(scope: Mapping[str, Any]) -> dict[str, str]:
    """The request's headers, names in lower case; of several of one the first, as in routes."""
    return {
        name.decode("latin-1").lower(): value.decode("latin-1")
        for name, value in reversed(list(scope["headers"]))
    }
