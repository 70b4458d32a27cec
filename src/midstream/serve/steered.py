"""What edits left, put into the replies of OpenAI's routes for those who asked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.types import Message, Scope, Send

from midstream.serve.access import Caller
from midstream.serve.problems import Problem
from midstream.serve.values import plain, text

_STREAMS = ("/v1/chat/completions", "/v1/completions")
_END = b"data: [DONE]"


class Steered:
    """One reply on its way to a client.

    Args:
        send: passes it on.
        caller: who asked, and what edits left.
        scope: the request.
        streams: whether it asked for a stream.

    Raises:
        Problem: it asked for edits' values in a stream that has no place for them.
    """

    def __init__(self, send: Send, caller: Caller, scope: Scope, streams: bool):
        self._send, self._caller = send, caller
        self._start: Message | None = None
        self._body: list[bytes] = []
        self._last: Mapping[str, Any] = {}
        if caller.asked and streams and not str(scope["path"]).endswith(_STREAMS):
            raise Problem(
                400,
                "midstream: a stream of this route has no place for what edits leave. Leave "
                "`stream` out, or use /v1/chat/completions.",
                param="midstream",
            )

    def sender(self) -> Send:
        """What to send through."""
        return self if self._caller.asked else self._send

    async def __call__(self, message: Message) -> None:
        """Pass a message of the reply on."""
        if message["type"] == "http.response.start":
            self._start = message
            if message["status"] != 200 or not self._is("application/json"):
                await self._send(message)
            return
        if self._start is None or self._start["status"] != 200:
            await self._send(message)
        elif self._is("text/event-stream"):
            await self._send({**message, "body": self._in_stream(message.get("body", b""))})
        elif self._is("application/json"):
            await self._in_json(message)
        else:
            await self._send(message)

    def _is(self, kind: str) -> bool:
        assert self._start is not None
        headers = dict(self._start.get("headers", ()))
        return bool(headers.get(b"content-type", b"").startswith(kind.encode()))

    async def _in_json(self, message: Message) -> None:
        self._body.append(message.get("body", b""))
        if message.get("more_body"):
            return
        body = b"".join(self._body)
        reply = msgspec.json.decode(body)
        if isinstance(reply, dict):
            body = msgspec.json.encode({**reply, "midstream": self._left()})
        assert self._start is not None
        headers = [pair for pair in self._start["headers"] if pair[0] != b"content-length"]
        headers.append((b"content-length", str(len(body)).encode()))
        await self._send({**self._start, "headers": headers})
        await self._send({**message, "body": body})

    def _in_stream(self, body: bytes) -> bytes:
        """One event more, before the last."""
        before, end, after = body.partition(_END)
        for line in before.splitlines():
            if line.startswith(b"data: {"):
                self._last = msgspec.json.decode(line.removeprefix(b"data: "))
        if not end:
            return body
        event = {**self._last, "choices": [], "usage": None, "midstream": self._left()}
        return before + b"data: " + msgspec.json.encode(event) + b"\n\n" + end + after

    def _left(self) -> dict[str, Any]:
        """What edits left; of several prompts each value is a list, in their order."""
        lists: dict[str, list[Any]] = {}
        errors: list[str] = []
        for found, error in filter(None, self._caller.found):
            for name, value in found.items():
                lists.setdefault(name, []).append(plain(value))
            if error is not None:
                errors.append(text(str(error)))
        several = len(self._caller.found) > 1
        saves = {name: values if several else values[0] for name, values in lists.items()}
        return {"edits": self._caller.edits or [], "saves": saves, "errors": errors}
