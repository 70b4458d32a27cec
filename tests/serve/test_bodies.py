"""Bodies of requests, within bounds."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from midstream.serve.bodies import Counted, Gone, Replayed, check_headers, read
from midstream.serve.problems import Problem

Receive = Callable[[], Awaitable[dict[str, Any]]]


def connection(*parts: bytes | None, ends: bool = True) -> Receive:
    """A connection that says these parts; None closes it, and without an end it stays silent."""
    said = list(parts)

    async def receive() -> dict[str, Any]:
        if not said:
            await asyncio.sleep(60)
        part = said.pop(0)
        if part is None:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": part, "more_body": bool(said) or not ends}

    return receive


def test_a_body_in_parts() -> None:
    """They are put together, and can be read again by whoever comes next."""

    async def both() -> None:
        body = await read(connection(b"ab", b"", b"c"), 3)
        assert body == b"abc"
        again = Replayed(body, connection(None))
        assert (await again())["body"] == b"abc"
        assert (await again())["type"] == "http.disconnect"

    asyncio.run(both())


def test_bounds() -> None:
    """Too long is 413, too slow 408, and one who goes away is answered with nothing."""
    with pytest.raises(Problem) as refused:
        asyncio.run(read(connection(b"ab", b"cd"), 3))
    assert refused.value.status == 413
    with pytest.raises(Problem) as refused:
        asyncio.run(read(connection(b"ab", ends=False), 3, seconds=0.05))
    assert refused.value.status == 408
    with pytest.raises(Gone):
        asyncio.run(read(connection(b"ab", None), 3))


def test_what_headers_announce() -> None:
    """A length above the bound, or a compressed body, is refused before it is read."""
    check_headers({"content-length": "3", "content-encoding": "identity"}, 3)
    for headers, status in (
        ({"content-length": "4"}, 413),
        ({"content-encoding": "gzip"}, 415),
        ({"content-encoding": "zstd, identity"}, 415),
    ):
        with pytest.raises(Problem) as refused:
            check_headers(headers, 3)
        assert refused.value.status == status


def test_a_body_that_is_passed_on() -> None:
    """Beyond the bound the connection counts as closed."""

    async def both() -> None:
        counted = Counted(connection(b"ab", b"cd"), 3)
        assert (await counted())["body"] == b"ab"
        assert (await counted())["type"] == "http.disconnect"

    asyncio.run(both())


def test_a_body_that_is_passed_on_slowly() -> None:
    """It has a time to arrive in; the connection itself may stay for longer."""

    async def both() -> None:
        counted = Counted(connection(b"ab", ends=False), 3, seconds=0.05)
        assert (await counted())["body"] == b"ab"
        assert (await counted())["type"] == "http.disconnect"
        whole = Counted(connection(b"ab"), 3, seconds=0.05)
        assert not (await whole())["more_body"]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(whole(), 0.2)

    asyncio.run(both())
