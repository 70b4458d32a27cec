"""Answers that may be large: sent in parts, and only as fast as their client takes them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

SECONDS = 60.0
"""How long a client may take to take in a part."""

_PART = 1 << 20  # bytes that are sent before the server looks after others


class InParts(Response):
    """An answer that is not copied together.

    Args:
        parts: its body.
        media_type: of the body.
        sent: called when all of it is on its way, or the client has not taken it.
        seconds: how long the client may take for each MiB.
    """

    def __init__(
        self,
        parts: Sequence[bytes | memoryview],
        media_type: str,
        sent: Callable[[], None],
        seconds: float = SECONDS,
    ):
        size = sum(memoryview(part).nbytes for part in parts)
        super().__init__(headers={"Content-Length": str(size)}, media_type=media_type)
        self._parts, self._sent, self._seconds = parts, sent, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        try:
            start = {"status": self.status_code, "headers": self.raw_headers}
            await send({"type": "http.response.start", **start})
            for part in self._parts:
                for at in range(0, len(part), _PART):
                    await self._send(send, part[at : at + _PART], more=True)
            await self._send(send, b"", more=False)
        except TimeoutError:
            pass  # the server closes the connection of an answer that has no end
        finally:
            self._parts = ()
            self._sent()

    async def _send(self, send: Send, body: bytes | memoryview, *, more: bool) -> None:
        async with asyncio.timeout(self._seconds):
            await send({"type": "http.response.body", "body": body, "more_body": more})
