"""What benchmarks share: medians, machine, and the Markdown they write."""

from __future__ import annotations

import datetime
import functools
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path


def median_us(work: Callable[[], object], *, repeats: int, warm: int = 1) -> float:
    """Median time of one call in microseconds."""
    for _ in range(warm):
        work()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def interleaved_us(
    works: Sequence[Callable[[], object]], *, repeats: int, warm: int = 2
) -> list[float]:
    """Median time of each work in microseconds, measured in turns so that drift hits all alike."""
    return [statistics.median(series) for series in turns_us(works, repeats=repeats, warm=warm)]


def turns_us(
    works: Sequence[Callable[[], object]],
    *,
    repeats: int,
    warm: int = 2,
    clock: Callable[[], float] = time.perf_counter,
) -> list[list[float]]:
    """Times of each work in microseconds, one a round; each round begins with the next work."""
    times: list[list[float]] = [[] for _ in works]
    for turn in range(warm + repeats):
        for offset in range(len(works)):
            index = (turn + offset) % len(works)
            start = clock()
            works[index]()
            seconds = clock() - start
            if turn >= warm:
                times[index].append(seconds * 1e6)
    return times


@functools.cache
def machine() -> str:
    """Hardware and versions, one line."""
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else _processor()
    versions = ", ".join(f"{name} {version(name)}" for name in ("vllm", "torch", "transformers"))
    return (
        f"{device}, {os.cpu_count()} CPU cores; Python {platform.python_version()}, {versions}; "
        f"{datetime.date.today():%Y-%m-%d}"
    )


def version(name: str) -> str:
    """Version of an installed distribution; the CPU build of vLLM counts as vLLM."""
    for candidate in (name, f"{name}-cpu"):
        try:
            return metadata.version(candidate)
        except metadata.PackageNotFoundError:
            continue
    import importlib

    try:
        return str(getattr(importlib.import_module(name), "__version__", "not installed"))
    except ModuleNotFoundError:
        return "not installed"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def markdown(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown section with a table."""
    lines = [f"## {title}", "", "| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([*lines, ""])


def write(path: Path, title: str, sections: Sequence[str], *, show: bool = True) -> None:
    """Write a result file and print it, or not."""
    text = "\n".join([f"# {title}", "", f"{machine()}.", "", *sections])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    if show:
        print(text)
