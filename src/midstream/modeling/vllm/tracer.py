"""One trace: a prompt, a block, and what comes back."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from midstream.errors import CaptureError, EngineDeadError, InterventionError, NotInTraceError
from midstream.modeling.vllm.data import write
from midstream.modeling.vllm.payloads import BlockError
from midstream.tracing import Block, Capture, bind, forget_skip
from midstream.tracing.shipping import dumps

if TYPE_CHECKING:
    from midstream.modeling.vllm.client import Outcome
    from midstream.modeling.vllm.model import VLLM


class Tracer:
    """What `model.trace(...)` gives.

    As a context manager it captures the body of its `with` statement, runs it in the engine, and
    binds the saved values to their names. With ``block=`` the function has run when the call
    returns, and its values are in ``saves``.

    Attributes:
        saves: the saved values by name.
        result: vLLM's finished `RequestOutput` (text, token ids, finish reason); None before the
            trace has run and for a request that was aborted.
    """

    def __init__(
        self, model: VLLM, prompt: dict[str, Any], settings: Mapping[str, Any], *, run: bool = True
    ):
        self._model, self._prompt, self._settings = model, prompt, dict(settings)
        self._run = run
        self._block: bytes | None = None
        self._where = "a captured trace"
        self._capture: Capture | None = None
        self._frame: FrameType | None = None
        self.saves: dict[str, Any] = {}
        self.result: Any = None

    def __enter__(self) -> Tracer:
        self._frame = sys._getframe(1)
        self._capture = Capture.begin(self._frame, "model.trace")
        return self

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
            self._take(block)
        except BaseException as raised:
            forget_skip(raised)
            raise
        finally:
            bind(frame, self.saves)
        return True

    def _take(self, block: Block) -> None:
        """Run a captured block, or keep it."""
        self._block = dumps(block, self._model._reference)
        if (code := block.code or block.listing) is not None:
            self._where = f"{code.filename}, line {code.first_line}"
        if self._run:
            self._execute()

    def _execute(self) -> None:
        """Run the block on this trace's prompt, keeping what it saved.

        Raises:
            InterventionError: the block failed; what it had saved by then is kept.
            EngineDeadError: the engine did not survive it.
        """
        assert self._block is not None
        try:
            outcome = self._model._submit(self._prompt, self._settings, self._block)
        except EngineDeadError as dead:
            raise EngineDeadError(f"{dead} The block that ran: {self._where}.") from dead.__cause__
        self.result = outcome.output
        if outcome.record is not None:
            self.saves = outcome.record.saves
            for warning in outcome.record.warnings:
                warning.emit()
        _raise(outcome)

    @property
    def iter(self) -> NoReturn:
        """The request's steps, inside the block: ``for step in tracer.iter[:3]``."""
        raise NotInTraceError("`tracer.iter` exists only inside the block.")

    def all(self) -> NoReturn:
        """All steps of the request, inside the block: ``for step in tracer.all()``."""
        raise NotInTraceError("`tracer.all()` exists only inside the block.")

    def stop(self) -> NoReturn:
        """End the request, inside the block."""
        raise NotInTraceError("`tracer.stop()` exists only inside the block.")

    def to_bytes(self) -> bytes:
        """The captured trace as bytes, for ``VLLM.run`` in another process. Needs no engine.

        Raises:
            CaptureError: nothing has been captured yet.
            TransportError: a setting cannot travel.
        """
        if self._block is None:
            raise CaptureError(
                "Nothing has been captured yet: call `to_bytes()` after the `with` statement."
            )
        return write(self._prompt, self._settings, self._block)


def _raise(outcome: Outcome) -> None:
    record = outcome.record
    if record is not None and record.error is not None:
        raise intervention(record.error)


def intervention(error: BlockError) -> BaseException:
    """The exception a failed block becomes in the caller.

    Its text begins with the original type and message; its cause is the original where the type
    can be imported. Ctrl-C that met a block in this process stays Ctrl-C.
    """
    cause = error.rebuild()
    if isinstance(cause, KeyboardInterrupt):
        return cause
    text = f"{error.type_name}: {error.message}"
    if error.traceback:
        text += f"\n\nIn the block:\n{error.traceback}"
    raised = InterventionError(text)
    raised.__cause__ = cause
    return raised
