"""What `model.trace`, `tracer.invoke` and `model.edit` have in common: their body is a block."""

from __future__ import annotations

import dis
from types import FrameType, TracebackType

from midstream.tracing import Block, Capture, forget_skip
from midstream.tracing.unbound import warn_bare_caches

_CACHE = dis.opmap["CACHE"]
_WITH = ("BEFORE_WITH", "LOAD_SPECIAL")  # what a `with` statement does with its manager first


class Capturing:
    """A context manager whose body is captured where it stands, not executed."""

    _capture: Capture | None = None
    _frame: FrameType | None = None

    def _begin(self, frame: FrameType, what: str) -> None:
        """Arrange to skip the body; called on entering.

        Args:
            frame: the frame that enters.
            what: the method that made this, for messages.
        """
        self._capture = Capture.begin(frame, what)
        self._frame = frame

    def _captured(self, block: Block, frame: FrameType) -> None:
        """Take the block of the body that stands in a frame."""
        raise NotImplementedError

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        capture, frame = self._capture, self._frame
        self._capture = self._frame = None
        assert capture is not None
        assert frame is not None
        block = capture.finish(kind, error)
        if block is None:
            return False
        try:
            warn_bare_caches(frame, block, Capturing)
            self._captured(block, frame)
        except BaseException as raised:
            forget_skip(raised)
            raise
        return True


def opens_with(frame: FrameType) -> bool:
    """Whether the call that a frame is in gives a `with` statement its context manager."""
    code = frame.f_code.co_code
    after = frame.f_lasti + 2
    while code[after] == _CACHE:
        after += 2
    return dis.opname[code[after]] in _WITH
