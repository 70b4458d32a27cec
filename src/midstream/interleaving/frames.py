"""Which line of the user's code is executing."""

from __future__ import annotations

import os
import sys
from types import FrameType

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_OURS = f"{__name__.partition('.')[0]}."


def user_frame(frame: FrameType | None = None) -> FrameType | None:
    """The nearest frame outside midstream.

    Args:
        frame: where to begin; the caller's by default.
    """
    frame = sys._getframe(1) if frame is None else frame
    while frame is not None:
        if not (frame.f_globals.get("__package__") or "").startswith(_OURS):
            return frame
        frame = frame.f_back
    return None


def user_line(frame: FrameType | None = None) -> tuple[str, int]:
    """File and line of that frame; ("", 0) if there is none."""
    frame = user_frame(sys._getframe(1) if frame is None else frame)
    return (frame.f_code.co_filename, frame.f_lineno) if frame is not None else ("", 0)


def is_user_file(file: str) -> bool:
    """Whether a file is neither midstream's nor what Python names when it runs out of frames."""
    return file not in ("sys", "<sys>") and not file.startswith(_PACKAGE)
