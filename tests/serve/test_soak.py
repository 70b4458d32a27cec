"""Many clients at once, for a short while; `python -m tests.serve.soak` is the long one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import httpx

from tests.serve.conftest import ALICE, BOB, ROOT
from tests.serve.process import Server
from tests.serve.soak import Soak

Ask = Callable[..., httpx.Response]


def test_sixty_four_clients(server: Server, ask: Ask) -> None:
    """Each result is what it is alone, whatever else runs, and nothing is left (case 40)."""
    before = server.memory()
    report = asyncio.run(Soak(server.url, [ALICE, BOB, ROOT]).run(64, 20.0, hangs=1))
    assert report.wrong == []
    assert set(report.done) == {"read", "edit", "fail", "leave", "plain", "hang"}
    assert sum(report.done.values()) > 64
    deadline = time.monotonic() + 30
    while (load := ask("GET", "/midstream/state", ROOT).json()["load"])["blocks"]:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert load["requests"] == load["shared segments"] == 0
    assert server.memory() - before < 200 << 20
