"""What a server costs: traces and large saves over HTTP beside the same in process.

    python benchmarks/serve.py [--repeats N] [--megabytes N] [--out FILE]

A server and an engine of this process, both on a tiny random Llama, are measured in turns over
loopback. The raw download is of the same size, by httpx from a bare server; the save's time is that
of the whole trace.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import httpx

from benchmarks.table import interleaved_us, markdown, write
from midstream import VLLM
from tests.serve.process import Server, free_port
from tests.support.checkpoints import checkpoint

IDS = [11, 12, 13, 14, 15]
_RAW = """
import sys, uvicorn
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

data = bytes(int(sys.argv[2]))

async def get(request):
    return Response(data)

app = Starlette(routes=[Route("/", get)])
uvicorn.run(app, port=int(sys.argv[1]), log_level="error", loop="uvloop")
"""


@contextmanager
def raw(size: int) -> Iterator[str]:
    """Address of a bare server that gives so many bytes."""
    port = free_port()
    process = subprocess.Popen([sys.executable, "-c", _RAW, str(port), str(size)])
    address = f"http://127.0.0.1:{port}/"
    try:
        for _ in range(200):
            try:
                httpx.get(address)
                break
            except httpx.HTTPError:
                time.sleep(0.1)
        yield address
    finally:
        process.terminate()
        process.wait(30)


def one_token(model: Any) -> Callable[[], None]:
    """A trace of one token that reads a layer."""

    def work() -> None:
        with model.trace(IDS, max_tokens=1, temperature=0.0):
            stream = model.model.layers[1].output[0].save()

    return work


def many_tokens(model: Any) -> Callable[[], None]:
    """A trace of 16 tokens that reads a layer at each."""

    def work() -> None:
        with model.trace(IDS, max_tokens=16, temperature=0.0, ignore_eos=True) as tracer:
            seen = [].save()
            for _ in tracer.all():
                seen.append(model.model.layers[1].output[0])

    return work


def large(model: Any, size: int) -> Callable[[], None]:
    """A trace that saves so many bytes, which the engine has ready."""

    def work() -> None:
        with model.trace(IDS, max_tokens=1, temperature=0.0):
            import torch

            kept = torch.__dict__.setdefault(
                "midstream_benchmark", torch.ones(size, dtype=torch.uint8)
            )
            data = kept.view(-1).save()

    return work


def rows(local: Any, served: Any, given: argparse.Namespace) -> list[list[str]]:
    """The table's lines."""
    size = given.megabytes << 20
    found = []
    for name, make in (("1 token", one_token), ("16 tokens", many_tokens)):
        here, there = interleaved_us([make(local), make(served)], repeats=given.repeats)
        found.append([f"a trace of {name}, ms", *_line(here / 1e3, there / 1e3)])
    with raw(size) as address, httpx.Client() as http:
        here, there, plain = interleaved_us(
            [large(local, size), large(served, size), lambda: http.get(address).content],
            repeats=given.repeats,
        )
    speeds = [size / 1e6 / (each / 1e6) for each in (here, there, plain)]
    name = f"a save of {given.megabytes} MiB, MB/s"
    share = [f"{speeds[2]:.0f}", f"{speeds[1] / speeds[2]:.2f}"]
    found.append([name, *_line(speeds[0], speeds[1], *share)])
    return found


def _line(here: float, there: float, plain: str = "", share: str = "") -> list[str]:
    return [f"{here:.1f}", f"{there:.1f}", f"{there / here:.2f}", plain, share]


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/serve.md"))
    given = parser.parse_args()
    path = str(checkpoint("T-LLAMA", with_tokenizer=True))
    load = f"{os.getloadavg()[0]:.1f}"
    server = Server()
    try:
        served = VLLM("tiny", serve=server.wait().url)
        settings = {"dtype": "float32", "max_model_len": 512, "kv_cache_memory_bytes": 1 << 28}
        with VLLM(path, dispatch=True, block_size=32, **settings) as local:
            lines = rows(local, served, given)
        served.close()
    finally:
        server.end()
    header = ["", "in process", "over HTTP", "ratio", "raw download", "HTTP of raw"]
    asked = f"{given.repeats} rounds in turns; load of the machine before and after: {load}"
    asked += f" and {os.getloadavg()[0]:.1f}.\n"
    write(given.out, "A server on loopback", [asked, markdown("The same traces", header, lines)])


if __name__ == "__main__":
    main()
