"""Answers in parts, which wait for their client."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from midstream.serve.replies import InParts

Message = dict[str, Any]


async def ignored() -> Message:
    """A connection that says nothing."""
    await asyncio.sleep(60)
    return {}


def sent(parts: Sequence[bytes | memoryview], *, takes: int = 1000) -> tuple[list[Message], int]:
    """What an answer sends to a client that takes so many messages; how often it is over."""
    messages: list[Message] = []
    over: list[int] = []

    async def send(message: Message) -> None:
        if len(messages) == takes:
            await asyncio.sleep(60)
        assert not over
        messages.append(message)

    answer = InParts(parts, "text/plain", lambda: over.append(1), seconds=0.05)
    asyncio.run(answer({"type": "http"}, ignored, send))
    return messages, len(over)


def test_a_whole_answer() -> None:
    """Its length is announced, it comes in order, and it is over when all of it is sent."""
    parts = [b"ab", memoryview(bytes(range(256)) * 10_000), b""]
    (start, *bodies), over = sent(parts)
    whole = b"".join(parts)
    assert dict(start["headers"])[b"content-length"] == str(len(whole)).encode()
    assert b"".join(message["body"] for message in bodies) == whole
    assert max(len(message["body"]) for message in bodies) == 1 << 20
    assert [message["more_body"] for message in bodies][-2:] == [True, False]
    assert over == 1


def test_a_client_that_does_not_take_it() -> None:
    """It is over after a while: nothing is kept for who does not read."""
    messages, over = sent([b"x" * (3 << 20)], takes=2)
    assert [message.get("more_body") for message in messages] == [None, True]
    assert over == 1
