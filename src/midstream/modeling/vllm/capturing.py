"""What `model.trace`, `tracer.invoke` and `model.edit` have in common: their body is a block."""

from __future__ import annotations

from types import FrameType, TracebackType

from midstream.tracing import Block, Capture, forget_skip
from midstream.tracing.unbound import warn_bare_caches


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
