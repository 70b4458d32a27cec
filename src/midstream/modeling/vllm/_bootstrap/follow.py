"""Ends this process when the one that started it has ended. Imports nothing of midstream."""

import os
import signal
import threading
import time
from collections.abc import Callable

POLL = 1.0  # seconds between looks

last: list[Callable[[], object]] = []
"""Called before this process is ended."""

_following = 0  # process id: a fork inherits the value but not the thread


def follow() -> None:
    """Start to watch the parent process; a second call is nothing."""
    global _following
    if _following != os.getpid():
        _following = os.getpid()
        threading.Thread(
            target=_watch, args=(os.getppid(),), name="midstream-follow", daemon=True
        ).start()


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
