"""Ctrl-C at a moment when it can be answered."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import greenlet


@contextmanager
def held() -> Iterator[None]:
    """Keep Ctrl-C waiting until the end of the `with`, whose work must not be cut in half.

    A running block is interrupted at once: its error is its own, and the work around it goes on.
    A second Ctrl-C does not wait either.
    """
    usual = _handler()
    if usual is None:
        yield
        return
    waiting: list[int] = []

    def wait(number: int, frame: FrameType | None) -> None:
        if waiting or greenlet.getcurrent().parent is not None:
            usual(number, frame)
        else:
            waiting.append(number)

    signal.signal(signal.SIGINT, wait)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
    if waiting:
        usual(signal.SIGINT, None)


def _handler() -> Callable[[int, FrameType | None], Any] | None:
    """What answers Ctrl-C in Python here; None where that is nothing of this thread's."""
    if threading.current_thread() is not threading.main_thread():
        return None
    handler = signal.getsignal(signal.SIGINT)
    return handler if callable(handler) else None
