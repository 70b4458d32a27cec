"""How fast what blocks save goes home: from tensors in the engine to tensors in the client.

    python benchmarks/saves.py [--device cuda] [--requests N] [--steps N] [--layers N]
        [--hidden N] [--repeats N] [--out FILE]

One process plays both parts, without a model: records are measured as they close (`check_saves`),
packed, and read back. Rows are views of a step's batched copy, as the engine gives them to blocks.
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
from midstream.modeling.vllm.limits import check_saves, size_of
from midstream.modeling.vllm.payloads import Record, pack, segments, unpack

HEADER = ["saves", "tensors", "MB", "measured, µs a tensor", "packed", "read", "GB/s in all"]
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


def measured(saves: Saves) -> tuple[float, float, float]:
    """Seconds to measure the records of some requests, to pack them and to read them."""
    start = time.perf_counter()
    for each in saves:
        check_saves(each, 1 << 40)
    checked = time.perf_counter()
    records = [Record(str(i), each) for i, each in enumerate(saves)]
    message = pack(records, owner=segments.owner_id())
    packed = time.perf_counter()
    found = unpack(message)
    read = time.perf_counter()
    assert all(record.error is None for record in found)
    return checked - start, packed - checked, read - packed


def row(name: str, make: Callable[[], Saves], repeats: int) -> list[str]:
    """One line of the table; the first run, which allocates, does not count."""
    saves = make()
    tensors = sum(map(count, saves))
    size = sum(map(size_of, saves))
    times = [measured(saves) for _ in range(repeats + 1)][1:]
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
    write(given.out, "Saves", [markdown("From the engine to the client", HEADER, lines)])


if __name__ == "__main__":
    main()
