"""One block beside the forwards of a trace: an invoke's own, or an edit."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

from midstream.interleaving.beside import LocalRun
from midstream.interleaving.gradients import helpers
from midstream.interleaving.notes import annotate
from midstream.modeling.dialects import advise_local
from midstream.modeling.failing import Failure
from midstream.modeling.local.names import Names
from midstream.tracing import Block, Execution, user_traceback


class LocalBlock:
    """A block with its run.

    Args:
        block: what runs.
        model, tracer: what the function form is called with.
        names: the code form's variables.
        is_edit: whether it is a part of the model, not of the trace.

    Attributes:
        run: its execution.
        names: its variables.
    """

    def __init__(
        self, block: Block, model: Any, tracer: Any, names: dict[str, Any], *, is_edit: bool = False
    ):
        self._block, self.names, self.is_edit = block, names, is_edit
        self._execution = Execution(
            block, model=model, tracer=tracer, namespace=names, helpers=helpers()
        )
        self.run = LocalRun(self._execution.run)
        code = block.code or block.listing
        self.run.uses_source = code is None or ".source" in code.source

    def enters_step(self, step: int) -> bool:
        """Begin a forward; whether there is something to do beside it."""
        run = self.run
        run.visit = step
        if run.recorders and run.records:
            return True
        return not run.done and (
            not run.started or (run.awaited is not None and run.awaited <= step)
        )

    @property
    def is_done(self) -> bool:
        """Whether the forward can go on without it."""
        return self.run.done and not (self.run.recorders and self.run.records)

    def close(self) -> None:
        """Tell it that no forward comes any more."""
        self.run.close(may_wait=True)

    def saves(self) -> dict[str, Any]:
        """What it has saved, by name."""
        for recorder in self.run.recorders:
            recorder.settle()
        return self._execution.saves()

    def let_go(self) -> None:
        """Hold no other block's variables any more."""
        if isinstance(self.names, Names):
            self.names.part()

    def warn(self) -> None:
        """Warn about what its run warned about, at the user's lines.

        Raises:
            Warning: the caller's filters turn it into an error.
        """
        for notice in self.run.output.notices():
            warnings.warn_explicit(notice.message, notice.category, notice.file, notice.line)

    def failure(self) -> Failure | None:
        """What it failed with, with notes; asked for once."""
        error, self.run.error = self.run.error, None  # its traceback has the run in it: a cycle
        if error is None:
            return None
        advise_local(error)
        name = error.name if isinstance(error, NameError) else None
        if isinstance(self.names, Names) and name in self.names.elsewhere:
            annotate(error, _NOT_YET.format(name=name))
        shown = user_traceback(self._block, error)
        return Failure(type(error).__qualname__, _text_of(error), shown, error)


def failures(blocks: Iterable[LocalBlock]) -> list[Failure]:
    """What those of the blocks that failed did with."""
    found = [block.failure() for block in blocks]
    return [failure for failure in found if failure is not None]


_NOT_YET = (
    "Another invoke assigns '{name}', but its block had not got there. Let both call a barrier, "
    "`barrier = tracer.barrier(2)` above them: one after it has assigned '{name}', the other "
    "before it reads it."
)


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as met:  # noqa: BLE001  # the exception's own method is the user's
        return f"<its text could not be made: {type(met).__name__}>"
