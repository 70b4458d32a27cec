"""An engine process and its client: it ends when the client does, and says why it failed."""

from __future__ import annotations

import logging
import os
import signal
import threading
from functools import partial
from pathlib import Path

import msgspec

from midstream.interleaving import watchdog
from midstream.modeling.vllm._bootstrap import follow
from midstream.modeling.vllm.payloads.segments import discard, owner_id

CLIENT = "MIDSTREAM_CLIENT"
"""Environment variable: the client process, as `owner_id` names it."""

REPORT = "MIDSTREAM_BUILD_REPORT"
"""Environment variable: the file where a process that fails to start writes the cause."""

WAKE = signal.SIGCONT
"""Signal that makes a waiting engine process see the signals it was sent before, and a waiting
block that its time is up."""


class Failure(msgspec.Struct):
    """Why an engine process did not start."""

    type: str
    message: str
    traceback: str


def client() -> str:
    """The client this process works for: itself where the engine runs in process."""
    return os.environ.get(CLIENT) or owner_id()


def enter() -> None:
    """Called early in an engine process: it ends with its client, and leaves Ctrl-C to it.

    The client aborts what runs and keeps the engine. Called again after vLLM has set its own
    answer to Ctrl-C. Nothing where the engine is in the client's process.
    """
    owner = client()
    pid, tag = int(owner.partition(".")[0]), int(owner.rpartition(".")[2])
    if pid == os.getpid():
        return
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        watchdog.listen(WAKE)
    if not follow.last:
        follow.last.append(partial(discard, owner))
    follow.follow()
    if owner_id(pid, tag) != owner:  # it ended before there was anyone to see it
        follow.end()


class _Reporter(logging.Handler):
    """Writes the first logged exception of this process to the report file."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info is None or record.exc_info[1] is None:
            return
        error = record.exc_info[1]
        text = logging.Formatter().formatException(record.exc_info)
        report(type(error).__name__, str(error), text)


def report(kind: str, message: str, traceback: str = "") -> None:
    """Write a cause to the report, if one is asked for."""
    path = os.environ.get(REPORT)
    if not path:
        return
    try:
        with open(path, "ab") as file:
            file.write(msgspec.json.encode(Failure(kind, message, traceback)) + b"\n")
    except OSError:
        pass  # the client has read the report and removed it: the engine is up


def report_build_failures() -> None:
    """Have exceptions that vLLM logs while it starts written to the report, if one is asked for."""
    logger = logging.getLogger("vllm")
    if os.environ.get(REPORT) and not any(isinstance(h, _Reporter) for h in logger.handlers):
        logger.addHandler(_Reporter(logging.ERROR))


def read_failures(path: Path) -> list[Failure]:
    """What the engine's processes reported, first failure first."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return []
    return [msgspec.json.decode(line, type=Failure) for line in lines if line]
