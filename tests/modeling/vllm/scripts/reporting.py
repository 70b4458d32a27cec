"""What the programs share: a report, and a look at the processes they have started."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

MARK = "@@report "

TINY = {
    "dtype": "float32",
    "max_model_len": 512,
    "block_size": 32,
    "max_num_seqs": 8,
    "kv_cache_memory_bytes": 1 << 28,
}
"""Engine arguments, as in conftest, which is for an engine in the same process."""


@contextmanager
def reported(name: str) -> Iterator[dict[str, Any]]:
    """Print, at the end of the `with`, the facts put into the mapping it gives, and the time."""
    facts: dict[str, Any] = {}
    start = time.monotonic()
    yield facts
    facts["seconds"] = round(time.monotonic() - start, 3)
    print(f"{MARK}{json.dumps({'name': name, **facts})}", flush=True)


def engine_processes(root: int | None = None) -> list[psutil.Process]:
    """All processes below one, this one by default, without Python's own resource tracker."""
    below = psutil.Process(root).children(recursive=True)
    return [child for child in below if not is_tracker(child)]


def is_tracker(process: psutil.Process) -> bool:
    """Whether it is what removes the shared memory of Python processes that were killed."""
    try:
        return any("resource_tracker" in part for part in process.cmdline())
    except psutil.NoSuchProcess:
        return False


def shared_memory(processes: list[psutil.Process]) -> list[str]:
    """Names in /dev/shm that the processes have mapped."""
    mapped = (entry.path for process in processes for entry in process.memory_maps())
    return sorted({Path(path).name for path in mapped if path.startswith("/dev/shm/")})
