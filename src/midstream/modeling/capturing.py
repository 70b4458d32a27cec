"""What `model.trace`, `tracer.invoke` and `model.edit` have in common: their body is a block."""

from __future__ import annotations

import dis
from collections.abc import Awaitable
from types import FrameType, TracebackType
from typing import TypeVar

from midstream.tracing import Block, Capture, forget_skip
from midstream.tracing.unbound import warn_bare_caches

T = TypeVar("T")

_CACHE = dis.opmap["CACHE"]
_WITH = (  # what a `with` statement does with its manager first
    "BEFORE_WITH",
    "BEFORE_ASYNC_WITH",
    "LOAD_SPECIAL",
)


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

    async def _acaptured(self, block: Block, frame: FrameType) -> None:
        """Take the block of an `async with`."""
        raise NotImplementedError

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        block, frame = self._end(kind, error)
        if block is None:
            return False
        try:
            warn_bare_caches(frame, block, Capturing)
            self._captured(block, frame)
        except BaseException as raised:
            forget_skip(raised)
            raise
        return True

    def _end(
        self, kind: type[BaseException] | None, error: BaseException | None
    ) -> tuple[Block | None, FrameType]:
        """End the capture; the block, None if another exception is on its way, and its frame."""
        capture, frame = self._capture, self._frame
        self._capture = self._frame = None
        assert capture is not None
        assert frame is not None
        return capture.finish(kind, error), frame

    def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> Awaitable[bool]:
        return self._aexit(*self._end(kind, error))  # the capture ends before anyone awaits

    async def _aexit(self, block: Block | None, frame: FrameType) -> bool:
        if block is None:
            return False
        try:
            warn_bare_caches(frame, block, Capturing)
            await self._acaptured(block, frame)
        except BaseException as raised:
            forget_skip(raised)
            raise
        return True


async def at_once(value: T) -> T:
    """What `__aenter__` gives: nothing else may run between it and the body."""
    return value


def opens_with(frame: FrameType) -> bool:
    """Whether the call that a frame is in gives a `with` statement its context manager."""
    code = frame.f_code.co_code
    after = frame.f_lasti + 2
    while code[after] == _CACHE:
        after += 2
    return dis.opname[code[after]] in _WITH
