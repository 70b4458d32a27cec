"""Starts the programs of this folder and reads their reports; nothing of them outlives its use."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from tests.modeling.vllm.scripts.reporting import MARK, is_tracker

ROOT = Path(__file__).parents[4]
_OF_ENGINES = ("VLLM_", "TRITON_", "TORCH", "NUMEXPR_", "OMP_", "KMP_", "MIDSTREAM_")


class Program:
    """A program in a process group of its own.

    Args:
        script: its file.
        arguments: on its command line.
        path: folders before the others on PYTHONPATH.
        environment: further variables.
    """

    def __init__(
        self,
        script: Path,
        *arguments: object,
        path: tuple[Path, ...] = (),
        environment: Mapping[str, str] | None = None,
    ):
        self.seen: dict[str, dict[str, Any]] = {}
        self.lines: list[str] = []
        self._reports: queue.Queue[str | None] = queue.Queue()
        self.process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", str(script), *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            cwd=ROOT,
            env={**_environment(path), **(environment or {})},
            start_new_session=True,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if line.startswith(MARK):
                self._reports.put(line.removeprefix(MARK))
        self._reports.put(None)

    def facts(self, name: str, seconds: float = 180.0) -> dict[str, Any]:
        """The report of that name, when it is in.

        Raises:
            AssertionError: it did not come in time, or the program ended without it.
        """
        deadline = time.monotonic() + seconds
        while name not in self.seen:
            try:
                line = self._reports.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"No report '{name}' in {seconds} s.\n{self.tail()}") from None
            if line is None:
                self._reports.put(None)
                raise AssertionError(f"The program ended before '{name}'.\n{self.tail()}")
            report = json.loads(line)
            self.seen[report["name"]] = report
        return self.seen[name]

    def wait(self, seconds: float) -> int:
        """Its exit status, when it has ended by itself."""
        return self.process.wait(seconds)

    def tail(self) -> str:
        """The last of what it printed."""
        return "".join(self.lines[-60:])

    def end(self) -> None:
        """Kill it and all it has started, once Python's tracker has removed what they shared."""
        for process in _killable(self.process.pid):
            process.kill()
        _, left = psutil.wait_procs(_session(self.process.pid), timeout=10)
        for process in left:
            process.kill()
        self.process.wait(30)


def _killable(session: int) -> list[psutil.Process]:
    """The processes of a session but for the trackers."""
    return [process for process in _session(session) if not is_tracker(process)]


def _session(leader: int) -> list[psutil.Process]:
    return [process for process in psutil.process_iter() if _leader(process.pid) == leader]


def _leader(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return -1


def _environment(path: tuple[Path, ...]) -> dict[str, str]:
    """The environment without what an engine in the tests' process has left in it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_OF_ENGINES)}
    folders = [*map(str, path), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(filter(None, folders)),
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }


def running(pids: list[int]) -> list[int]:
    """Those of the processes that run; one that only waits to be reaped does not."""
    found = []
    for pid in pids:
        try:
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
        except psutil.NoSuchProcess:
            continue
    return found


def gone(pids: list[int], seconds: float) -> bool:
    """Whether all the processes have ended in that time."""
    deadline = time.monotonic() + seconds
    while running(pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not running(pids)


def kill(pid: int) -> None:
    """End a process as no handler can notice."""
    os.kill(pid, signal.SIGKILL)
