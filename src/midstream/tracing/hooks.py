"""Taking a thread's trace function for a moment, and giving it back."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from itertools import repeat
from types import FrameType
from typing import Any

__all__ = ["TraceHook"]


class TraceHook:
    """Our trace function on one frame, until `restore`.

    The thread's own trace function, and what a debugger or coverage tool keeps on the frame, are
    given back as they were. coverage's C tracer pairs calls and returns on a stack of its own: it
    is told of the calls that it missed and whose returns it is going to see.
    """

    def __init__(self, frame: FrameType, function: Callable[[FrameType, str, Any], Any]) -> None:
        self._frame: FrameType | None = frame
        self._previous: Any = sys.gettrace()
        self._on_frame = (frame.f_trace, frame.f_trace_lines)
        frame.f_trace, frame.f_trace_lines = function, True
        sys.settrace(function)

    def restore(self) -> None:
        """Give the trace functions back and let go of the frame; once is enough."""
        frame, self._frame = self._frame, None
        if frame is None:
            return
        frame.f_trace, frame.f_trace_lines = self._on_frame
        if not _counts_frames(self._previous):
            sys.settrace(self._previous)
            return
        sys.settrace(None)
        entered = list(_frames_inside(frame))[::-1]
        # A call also makes it the trace function, at once: from the first to the last no line of
        # ours may run, or it would be taken for a line of the wrong frame. All here is in C.
        deque(map(self._previous, entered, repeat("call"), repeat(None)), maxlen=0)


def _counts_frames(function: Any) -> bool:
    kind = type(function)
    return kind.__name__ == "CTracer" and kind.__module__.partition(".")[0] == "coverage"


def _frames_inside(frame: FrameType) -> Iterator[FrameType]:
    """Yield the running frames that `frame` has called, the innermost first."""
    inner: FrameType | None = sys._getframe(1)
    while inner is not None and inner is not frame:
        yield inner
        inner = inner.f_back
