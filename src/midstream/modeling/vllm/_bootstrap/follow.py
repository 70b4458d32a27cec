"""Ends this process when the one that started it has ended. Imports nothing of midstream."""

import os
import signal
import threading
import time
from collections.abc import Callable

POLL = 1.0  # seconds between looks

PARENT = "MIDSTREAM_PARENT"
"""Environment variable: id of the process that starts others; it may end before they look."""

last: list[Callable[[], object]] = []
"""Called before this process is ended."""

_following = 0  # process id: a fork inherits the value but not the thread


def follow() -> None:
    """Start to watch the parent process; a second call is nothing."""
    global _following
    if _following == os.getpid():
        return
    _following = os.getpid()
    parent = int(os.environ.get(PARENT) or os.getppid())
    os.environ[PARENT] = str(os.getpid())  # for those that this one starts
    threading.Thread(target=_watch, args=(parent,), name="midstream-follow", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(POLL)
    end()


def end() -> None:
    """End this process at once, whatever its other threads do."""
    try:
        for call in last:
            call()
    finally:
        os.kill(os.getpid(), signal.SIGKILL)
