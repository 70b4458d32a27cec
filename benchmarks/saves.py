"""How fast what blocks save goes home: from tensors in the engine to tensors in the client.

    python benchmarks/saves.py [--device cuda] [--requests N] [--steps N] [--layers N]
        [--hidden N] [--repeats N] [--out FILE]

One process plays both parts, without a model: records are measured as they close (`check_saves`),
packed, and read back. Rows are views of a step's batched copy, as the engine gives them to blocks.
Where copies are sent home while the steps run, what that takes of the engine's own thread is a
column; threads write them in a pause as long as a step, of which as much as they need counts.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.table import markdown, write
from midstream.interleaving.batches import Call, Form
from midstream.interleaving.caches import Cache
from midstream.interleaving.copies import Rows
from midstream.interleaving.locations import Location
from midstream.interleaving.shares import Share, Sheet, Unseen
from midstream.interleaving.snapshots import Snapshots
from midstream.modeling.vllm.engine.mirroring import Mirroring
from midstream.modeling.vllm.limits import check_saves, size_of
from midstream.modeling.vllm.payloads import Mirrors, Record, pack, segments, unpack

HEADER = [
    *("saves", "tensors", "MB", "in the steps, µs a tensor", "written", "measured", "packed"),
    *("read", "GB/s in all"),
]
STEP = 7e-3  # seconds of a step in which threads may write; the model's own time, on an H200
Saves = list[dict[str, Any]]


def batches(given: argparse.Namespace) -> list[torch.Tensor]:
    """The step copies that the rows are views of: [requests, hidden] for each step and layer."""
    shape = (given.requests, given.hidden)
    count = given.steps * given.layers
    return [torch.zeros(shape, dtype=torch.bfloat16, device=given.device) for _ in range(count)]


def rows(given: argparse.Namespace, form: Callable[[list[torch.Tensor]], Any]) -> Saves:
    """Each request's rows, one tensor [1, hidden] for each step and layer, in some form."""
    copies = batches(given)
    return [{"x": form([copy[i : i + 1] for copy in copies])} for i in range(given.requests)]


def cases(given: argparse.Namespace) -> dict[str, Callable[[], Saves]]:
    """What is saved, by its row's name."""
    layers, hidden, device = given.layers, given.hidden, given.device

    def nested(found: list[torch.Tensor]) -> Any:
        return [found[i : i + layers] for i in range(0, len(found), layers)]

    def prompt(tokens: int) -> Saves:
        shape = (tokens, hidden)
        found = [torch.zeros(shape, dtype=torch.bfloat16, device=device) for _ in range(layers)]
        return [{"x": found}]

    whole = torch.zeros(100 << 20, dtype=torch.bfloat16, device=device)
    return {
        "a list of rows": lambda: rows(given, list),
        "a list of rows for each step": lambda: rows(given, nested),
        "a dictionary of rows": lambda: rows(given, lambda found: dict(enumerate(found))),
        "one token of each request": lambda: [
            {"x": torch.zeros(4, hidden, device=device)} for _ in range(8 * given.requests)
        ],
        "all layers of a prompt of 1,024 tokens": lambda: prompt(1024),
        "one tensor": lambda: [{"x": whole}],
    }


class Steps:
    """Copies of steps, sent home as they are made, and who may refer to them."""

    def __init__(self, given: argparse.Namespace):
        self.given = given
        self.mirrors = Mirrors(segments.owner_id())
        self.senders = frozenset(range(given.requests))
        self.spent = 0.0
        self.written = 0.0
        for sender in self.senders:
            self.mirrors.trust(sender)

    def rows(self) -> Saves:
        """As ``rows``, a list for each request."""
        given = self.given
        found: list[list[torch.Tensor]] = [[] for _ in self.senders]
        for _ in range(given.steps):
            copies = [_copy(given) for _ in range(given.layers)]
            start = time.perf_counter()
            for copy in copies:
                self.mirrors.add(copy, self.senders)
            self._end_step(start)
            for copy in copies:
                for mine, row in zip(found, copy.split(1), strict=True):
                    mine.append(row)
        self._wait()
        return [{"x": each} for each in found]

    def caches(self) -> Saves:
        """A cache for each request, of two tensors for each step and layer."""
        given, mirroring = self.given, Mirroring(list, self.mirrors)
        spans = [Rows(i, i + 1) for i in range(given.requests)]
        unseen = [Unseen(Snapshots()) for _ in spans]
        for _ in range(given.steps):
            values = [(_copy(given), _copy(given)) for _ in range(given.layers)]
            start = time.perf_counter()
            sheet = Sheet(spans, Form(torch.device("cpu"), stays=True))
            for i, each in enumerate(unseen):
                each.shares.append(Share(sheet, i, 1))
            for layer, value in enumerate(values):
                call = Call.of(value, (given.requests,))
                kept = sheet.add(Location(f"layers.{layer}", "output"), layer, call)
                kept.send(mirroring, self.senders)
            sheet.ended = True
            for each in unseen:
                each.shares[-1].count(Snapshots())
            self._end_step(start)
        start = time.perf_counter()
        self.mirrors.flush()
        self._wait()
        found = [Cache({}) for _ in unseen]
        for cache, each in zip(found, unseen, strict=True):
            cache._follow(each)
        return [{"x": cache} for cache in found]

    def _end_step(self, start: float) -> None:
        self.mirrors.end_step()
        self.spent += time.perf_counter() - start
        start = time.perf_counter()
        self.mirrors.wait()
        self.written += max(0, time.perf_counter() - start - STEP)

    def _wait(self) -> None:
        start = time.perf_counter()
        self.mirrors.wait()
        self.written += time.perf_counter() - start


def _copy(given: argparse.Namespace) -> torch.Tensor:
    shape = (given.requests, given.hidden)
    return torch.zeros(shape, dtype=torch.bfloat16, device=given.device)


def measured(saves: Saves, mirrors: Mirrors | None = None) -> tuple[float, float, float]:
    """Seconds to measure the records of some requests, to pack them and to read them."""
    start = time.perf_counter()
    for each in saves:
        check_saves(each, 1 << 40)
    checked = time.perf_counter()
    records = [Record(str(i), each, sender=i) for i, each in enumerate(saves)]
    message = pack(records, owner=segments.owner_id(), mirrors=mirrors)
    packed = time.perf_counter()
    found = unpack(message)
    read = time.perf_counter()
    assert all(record.error is None for record in found)
    return checked - start, packed - checked, read - packed


def row(name: str, make: Callable[[], Saves], repeats: int) -> list[str]:
    """One line of the table; the first run, which allocates, does not count."""
    saves = make()
    times = [(0.0, 0.0, *measured(saves)) for _ in range(repeats + 1)][1:]
    return line(name, sum(map(count, saves)), sum(map(size_of, saves)), times)


def mirrored(
    name: str,
    given: argparse.Namespace,
    make: Callable[[Steps], Saves],
    tensors: int,
) -> list[str]:
    """One line, of saves that are sent while they are made."""
    times = []
    for _ in range(given.repeats + 1):
        steps = Steps(given)
        saves = make(steps)
        size = sum(map(size_of, saves))
        times.append((steps.spent, steps.written, *measured(saves, steps.mirrors)))
        steps.mirrors.close()
    return line(name, tensors, size, times[1:])


def line(name: str, tensors: int, size: int, times: list[tuple[float, ...]]) -> list[str]:
    """The medians of some runs."""
    parts = [statistics.median(series) for series in zip(*times, strict=True)]
    whole = statistics.median(map(sum, times))
    per_tensor = [f"{part / tensors * 1e6:.2f}" for part in parts]
    return [name, f"{tensors:,}", f"{size / 1e6:.0f}", *per_tensor, f"{size / whole / 1e9:.2f}"]


def count(value: Any) -> int:
    """How many tensors there are in nested lists and dictionaries."""
    if isinstance(value, dict):
        return sum(map(count, value.values()))
    return sum(map(count, value)) if isinstance(value, list) else 1


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("build/saves.md"))
    given = parser.parse_args()
    lines = [row(name, make, given.repeats) for name, make in cases(given).items()]
    tensors = given.requests * given.steps * given.layers
    lines += [
        mirrored("a list of rows, sent as they are read", given, Steps.rows, tensors),
        mirrored("a cache of two tensors for each layer", given, Steps.caches, 2 * tensors),
    ]
    write(given.out, "Saves", [markdown("From the engine to the client", HEADER, lines)])


if __name__ == "__main__":
    main()
