"""Many clients at once on one server: blocks that read, edit, fail, hang and leave; plain chat.

    python -m tests.serve.soak [--seconds 120] [--clients 64]

Every result is compared with what the same request gave alone. By hand it starts a server of its
own and prints what was asked, the median latency of plain chat with and without the others, and
what server and engine hold before and after.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import random
import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil

from tests.serve.process import TEMPLATE, Server

TRACES = "/v1/midstream/traces"
READ = """
rows = [].save()
for step in tracer.all():
    rows.append(float(model.model.layers[2].output[0].norm()))
    logits = model.logits.save()
"""
EDIT = """
for step in tracer.iter[:]:
    for part in model.model.layers[1].output:
        part[:] = part * 0.5
    logits = model.logits.save()
"""
FAIL = "x = model.model.layers[1].output[0]\nkept = [7].save()\nx[:, 4096]\n"
HANG = "model.model.layers[0].output\nwhile True:\n    pass\n"
LONG = "for step in tracer.all():\n    model.model.layers[1].output[0]\n"
PROMPTS = [[3, 4, 5], [21, 22], [11, 12, 13, 14, 15], [9], [(7 * i) % 90 + 5 for i in range(40)]]


@dataclass
class Report:
    """What was asked, and what came of it.

    Attributes:
        done: how many requests of each kind came out right.
        wrong: what did not.
        plain: seconds that plain requests took.
    """

    done: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)


class Soak:
    """Clients of one server.

    Args:
        url: its address.
        keys: API keys, one client after the other.
        seed: of what the clients ask for.
    """

    def __init__(self, url: str, keys: Sequence[str], seed: int = 1):
        self._url, self._keys, self._seed = url, keys, seed
        self._alone: dict[tuple[str, int], Any] = {}
        self.report = Report()
        self._kinds: dict[str, Callable[..., Awaitable[Any]]] = {
            "read": self._read,
            "edit": self._edit,
            "fail": self._fail,
            "leave": self._leave,
            "plain": self._plain,
        }

    async def run(
        self, clients: int, seconds: float, *, hangs: int = 0, kinds: Sequence[str] = ()
    ) -> Report:
        """Have so many clients ask for so long; each kind has been asked for alone before.

        Args:
            clients: how many.
            seconds: for how long.
            hangs: how many more send blocks that never end.
            kinds: what they ask for; of all kinds, and twice as much plain chat, by default.
        """
        kinds = kinds or (*self._kinds, "plain")
        async with self._client(0) as http:
            for kind in {"read", "edit", "plain"}.intersection(kinds):
                for prompt in range(len(PROMPTS)):
                    self._alone[kind, prompt] = await self._kinds[kind](http, prompt)
        self.report = Report()
        end = time.monotonic() + seconds
        tasks = [self._asking(number, end, kinds) for number in range(clients)]
        await asyncio.gather(*tasks, *(self._hanging(end) for _ in range(hangs)))
        return self.report

    def _client(self, number: int) -> httpx.AsyncClient:
        key = self._keys[number % len(self._keys)] if self._keys else ""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return httpx.AsyncClient(base_url=self._url, headers=headers, timeout=120)

    async def _asking(self, number: int, end: float, kinds: Sequence[str]) -> None:
        chance = random.Random(self._seed * 1000 + number)
        async with self._client(number) as http:
            while time.monotonic() < end:
                kind = chance.choice(kinds)
                prompt = chance.randrange(len(PROMPTS))
                try:
                    found = await self._kinds[kind](http, prompt)
                    self._compare(kind, prompt, found)
                except (httpx.HTTPError, KeyError, AssertionError) as error:
                    self.report.wrong.append(f"{kind} {prompt}: {error!r}")

    def _compare(self, kind: str, prompt: int, found: Any) -> None:
        alone = self._alone.get((kind, prompt), found)
        if same(alone, found):
            self.report.done[kind] += 1
        else:
            self.report.wrong.append(f"{kind} {prompt}: {found!r:.200} is not {alone!r:.200}")

    async def _trace(self, http: httpx.AsyncClient, prompt: int, code: str, **more: Any) -> Any:
        settings = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True, **more}
        body = {"prompt": PROMPTS[prompt], "settings": settings, "code": code}
        reply = await http.post(TRACES, json=body)
        assert reply.status_code == 200, reply.text
        return reply.json()["results"][0]["outputs"][0]

    async def _read(self, http: httpx.AsyncClient, prompt: int) -> Any:
        found = await self._trace(http, prompt, READ)
        return found["token_ids"], found["saves"]["rows"], array(found["saves"]["logits"])

    async def _edit(self, http: httpx.AsyncClient, prompt: int) -> Any:
        found = await self._trace(http, prompt, EDIT)
        return found["token_ids"], [], array(found["saves"]["logits"])

    async def _fail(self, http: httpx.AsyncClient, prompt: int) -> Any:
        found = await self._trace(http, prompt, FAIL)
        assert found["errors"][0]["type"] == "IndexError"
        assert found["saves"] == {"kept": [7]}

    async def _leave(self, http: httpx.AsyncClient, prompt: int) -> Any:
        asked = asyncio.ensure_future(self._trace(http, prompt, LONG, max_tokens=400))
        await asyncio.sleep(0.3)
        asked.cancel()
        await asyncio.wait([asked])

    async def _plain(self, http: httpx.AsyncClient, prompt: int) -> Any:
        start = time.perf_counter()
        text = " ".join(f"t{token}" for token in PROMPTS[prompt])
        chat = {"model": "tiny", "messages": [{"role": "user", "content": text}]}
        body = {**chat, "max_tokens": 6, "temperature": 0.0, "ignore_eos": True}
        reply = await http.post("/v1/chat/completions", json=body)
        assert reply.status_code == 200, reply.text
        self.report.plain.append(time.perf_counter() - start)
        return reply.json()["choices"][0]["message"]["content"]

    async def _hanging(self, end: float) -> None:
        """A block that never ends, now and then: each costs everyone `--block-timeout`."""
        async with self._client(0) as http:
            while time.monotonic() + 5 < end:
                await asyncio.sleep(4)
                found = await self._trace(http, 0, HANG)
                assert "block_timeout" in found["errors"][0]["message"]
                self.report.done["hang"] += 1


def array(value: dict[str, Any]) -> np.ndarray[Any, Any]:
    """A tensor of a JSON reply."""
    data = np.frombuffer(base64.b64decode(value["data"]), value["dtype"])
    return data.reshape(value["shape"])


def same(one: Any, other: Any) -> bool:
    """Whether two results are the same but for last digits, which the batch may change."""
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, np.ndarray | float):
        return bool(np.allclose(one, other, atol=1e-3, rtol=1e-3))
    return bool(one == other)


def held(server: Server) -> dict[str, Any]:
    """What a server and its engine hold: what they run, files in shared memory, bytes."""
    load = httpx.get(f"{server.url}/midstream/state", timeout=60).json()["load"]
    sizes = [psutil.Process(pid).memory_info().rss >> 20 for pid in server.below()]
    return {
        **{name: load[name] for name in ("requests", "blocks", "shared segments")},
        "files": len(list(Path("/dev/shm").glob("midstream-*"))),
        "server, MiB": server.memory() >> 20,
        "engine, MiB": sum(sizes),
    }


def settled(server: Server) -> dict[str, Any]:
    """The same, once what clients have left has ended."""
    for _ in range(100):
        found = held(server)
        if not (found["requests"] or found["blocks"]):
            break
        time.sleep(0.2)
    return found


def tell(name: str, report: Report) -> None:
    """Print what came of a part of it."""
    milliseconds = statistics.median(report.plain) * 1e3
    print(f"{name}: right {dict(report.done)}, wrong {len(report.wrong)}", *report.wrong[:5])
    print(f"{name}: plain chat took {milliseconds:.0f} ms (median of {len(report.plain)})")


def main() -> None:
    """Start a server, and be its clients."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--clients", type=int, default=64)
    given = parser.parse_args()
    flags = ("--block-timeout", "1", "--max-traces-per-key", "100", "--chat-template", TEMPLATE)
    server = Server(*flags)
    plain = max(1, given.clients // 3)  # about as many as ask for plain chat among all
    try:
        server.wait()
        asyncio.run(Soak(server.url, []).run(given.clients, 10.0))  # what is allocated once
        before = settled(server)
        quiet = asyncio.run(Soak(server.url, []).run(plain, 20.0, kinds=["plain"]))
        tell(f"{plain} clients without traces", quiet)
        calm = asyncio.run(Soak(server.url, []).run(given.clients, given.seconds))
        tell(f"{given.clients} clients", calm)
        rough = asyncio.run(Soak(server.url, []).run(given.clients, 30.0, hangs=1))
        tell(f"{given.clients} clients and one whose blocks hang", rough)
        print(f"held before: {before}", f"held after: {settled(server)}", sep="\n")
    finally:
        server.end()


if __name__ == "__main__":
    main()
