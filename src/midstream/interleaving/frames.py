"""Which line of the user's code is executing."""

from __future__ import annotations

import os
import sys
from types import FrameType

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def user_line(frame: FrameType | None = None) -> tuple[str, int]:
    """File and line of the nearest frame outside midstream; ("", 0) if there is none.

    Args:
        frame: where to begin; the caller's by default.
    """
    frame = sys._getframe(1) if frame is None else frame
    while frame is not None and _is_ours(frame):
        frame = frame.f_back
    return (frame.f_code.co_filename, frame.f_lineno) if frame is not None else ("", 0)


def is_user_file(file: str) -> bool:
    """Whether a file is neither midstream's nor what Python names when it runs out of frames."""
    return file not in ("sys", "<sys>") and not file.startswith(_PACKAGE)


def _is_ours(frame: FrameType) -> bool:
    package = frame.f_globals.get("__package__") or ""
    return bool(package.partition(".")[0] == __name__.partition(".")[0])
