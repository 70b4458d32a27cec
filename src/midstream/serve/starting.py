"""A server that is told to end while its engine starts.

The main thread then waits inside vLLM for the engine's processes, and Python's own handlers of
signals, which run in that thread, may not get their turn. The interpreter notes every signal in a
file descriptor as it arrives; another thread reads that one.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread
from time import monotonic

_DONE = b"\0"
_ENDING = (signal.SIGTERM, signal.SIGINT)
_PATIENCE = 5.0  # seconds for the engine's processes to end by themselves


@contextmanager
def ends_when_told() -> Iterator[None]:
    """End this process and its children at once if a signal asks for it in the body.

    There is nothing yet to be let finish. To be entered in the main thread, once the loop runs.
    """
    read, write = os.pipe()
    os.set_blocking(write, False)
    before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    watcher = Thread(target=_watch, args=(read,), daemon=True)
    watcher.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)  # the loop's
        os.write(write, _DONE)
        watcher.join()
        os.close(read)
        os.close(write)


def _watch(read: int) -> None:
    while (byte := os.read(read, 1)) != _DONE:
        if byte[0] in _ENDING:
            _leave(byte[0])


def _leave(number: int) -> None:
    children = multiprocessing.active_children()
    for child in children:
        child.terminate()
    deadline = monotonic() + _PATIENCE
    for child in children:
        child.join(max(0.0, deadline - monotonic()))
        child.kill()
    os._exit(128 + number)
