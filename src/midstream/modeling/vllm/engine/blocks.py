"""One block beside a request: the request's own, or an installed edit."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from midstream.errors import LimitExceededError
from midstream.interleaving.notes import annotate
from midstream.interleaving.printing import Notice
from midstream.interleaving.replays import WriteLog
from midstream.interleaving.snapshots import Snapshots
from midstream.interleaving.standing import habit_of
from midstream.modeling.dialects import advise_engine
from midstream.modeling.vllm.engine.commons import Common
from midstream.modeling.vllm.engine.edits import InstalledEdit
from midstream.modeling.vllm.engine.plain import is_plain
from midstream.modeling.vllm.engine.streaming import Appended
from midstream.modeling.vllm.limits import check_saves
from midstream.modeling.vllm.payloads import BlockError, BlockWarning, Print, Record
from midstream.modeling.vllm.unsupported import gradients
from midstream.modeling.vllm.wire import (
    EDIT,
    FAILED,
    NEW,
    SENT,
    STOPPED,
    STOPPED_BEFORE_TOKEN,
)
from midstream.tracing import Block, Execution, user_traceback

if TYPE_CHECKING:
    from midstream.modeling.vllm.engine.host import BlockHost


class HostedBlock:
    """A block from its first step to its record.

    Args:
        request_id: the request it runs beside.
        host: the worker's blocks, which have the model, the tracer and the limits.
        common, rest: the block as bytes: what others share of it, and what is its own.
        keep: names whose containers it fills together with other requests of its trace.
        edit: the installed edit that this is, if it is one.
        stream: whether what it appends to the lists it saves is sent at each step.

    Attributes:
        run: its execution beside the forward passes.
        recorded: whether its record has been sent.
    """

    def __init__(
        self,
        request_id: str,
        host: BlockHost,
        common: Common,
        rest: bytes = b"",
        keep: Sequence[str] = (),
        edit: InstalledEdit | None = None,
        *,
        stream: bool = False,
    ):
        self._request_id, self._host = request_id, host
        self._common, self._rest, self._keep = common, rest, keep
        self._edit = edit
        self._block: Block | None = None
        self._execution: Execution | None = None
        self._saved: dict[str, Any] = {}
        self._appended = Appended() if stream else None
        self.recorded = self.keeps_saves = False
        self.run = host.run_class(
            self._execute,
            seed=zlib.crc32(rest, common.digest),
            clock=host.clock,
            snapshots=Snapshots(host.limits.max_snapshot_bytes),
            log=WriteLog(host.limits.max_write_log_bytes),
        )
        self.run.uses_source = common.uses_source or b".source" in rest
        self.run.context = host.stored.objects
        self.run.gets_result = edit is None

    def _execute(self) -> None:
        stored = self.run.context
        self._block = self._common.opened.block(
            lambda name: self._host.resolve(name, stored), self._rest
        )
        self.run.code, self.run.plain = _digest(self._block), is_plain(self._block, stored)
        if self._host.mirroring is not None and self._appended is None:
            code = self._block.code
            self._host.mirroring.follow(self.run, None if code is None else code.compiled().code)
        execution = Execution(self._block, model=self._host.model, tracer=self._host.tracer)
        for name in self._keep:
            if name in execution.namespace:
                execution.scope.mark(execution.namespace[name], name)
                if self._appended is not None:
                    self._appended.begin(name, execution.namespace[name])
        self._execution = execution
        if self.run.plain and self._block.code is not None:
            self.run.habit = habit_of(self._block.code.compiled().form, execution.namespace)
        try:
            execution.run()
        except RuntimeError as error:
            refused = gradients(error)
            if refused is None:
                raise
            raise refused from None

    def enters_step(self, step: int, prompt: int) -> bool:
        """Begin a step of the request; whether there is something to do in it.

        Args:
            step: counted from 0, the step that ends the prompt.
            prompt: tokens of the prompt.
        """
        self.run.visit = step
        if self.run.log is not None:
            self.run.log.first = prompt - 1 + step if step else 0
        self.run.begin_step()
        return self.run.enters

    @property
    def is_done(self) -> bool:
        """Whether nothing more comes: the block has ended, and no cache of it goes on."""
        return self.run.done and not self.run.recorders

    def how_ended(self) -> str:
        """How it has ended its request (see ``wire``); empty if it has not."""
        if self.run.error is not None:
            return FAILED
        if self.run.stopped is not None:
            return STOPPED if self.run.stopped.keeps_token else STOPPED_BEFORE_TOKEN
        return ""

    def close(self, *, may_wait: bool = False) -> None:
        """Tell it that its request has ended, see ``Run.close``."""
        if not self.run.done:
            self.run.begin_step()
        self.run.close(may_wait=may_wait)

    def fail(self, error: Exception) -> None:
        """Give it an error that the machinery met; one that has been recorded is recorded again."""
        if self.run.done:
            self.run.error = self.run.error or error
        else:
            self.run.fail(error)
        self.recorded = False

    def record(self) -> Record:
        """What it sends home, once: when it is done, or when its request has closed."""
        mirroring = self._host.mirroring
        may_travel = mirroring is not None and not self.keeps_saves
        ways = [recorder.settle(may_travel=may_travel) for recorder in self.run.recorders]
        if mirroring is not None and any(ways):
            mirroring.mirrors.flush()
        self.recorded = True
        saves, error = self.saves, self.run.error
        if mirroring is not None and error is None:
            mirroring.learn(self.run, saves)
        if not self.keeps_saves:
            self._saved = {}
        try:
            check_saves(saves, self._host.limits.max_save_bytes)
        except LimitExceededError as exceeded:
            saves, error = {}, error or exceeded
        return Record(
            self._request_id,
            saves=saves,
            error=self._error(error),
            warnings=[_warning(notice) for notice in self.run.output.notices()],
            prints=[Print(stream, text) for stream, text in self.run.output.prints()],
            extra=self._extra(),
            sender=self.run,
        )

    def _extra(self) -> dict[str, Any]:
        if self._edit is not None:
            return {EDIT: self._edit.id}
        return {SENT: self._appended.counts} if self._appended is not None else {}

    def news(self) -> list[Record]:
        """What it has appended to the lists it saves, while it goes on; called after a step."""
        if self._appended is None or self._execution is None or self.run.done:
            return []
        new = self._appended.take(self._execution.saves())
        try:
            check_saves(new, self._host.limits.max_save_bytes)
        except LimitExceededError as exceeded:
            self.fail(exceeded)
            return []
        return [Record(self._request_id, saves=new, extra={NEW: True})] if new else []

    @property
    def saves(self) -> dict[str, Any]:
        """What it has saved, by name; asked for when it is done. Then only that is kept of it."""
        execution, self._execution = self._execution, None
        if execution is not None:
            self._saved = execution.saves()
        return self._saved

    def _error(self, error: BaseException | None) -> BlockError | None:
        if error is None:
            return None
        advise_engine(error)
        if self._edit is not None:
            annotate(error, f"Raised in the installed edit {self._edit.label}.")
        return BlockError.of(error, _traceback_of(error, self._block))


def _digest(block: Block) -> str | None:
    """What the block's code is known by; for a function without source, nothing."""
    code = block.code or block.listing
    return code.digest if code is not None else None


def _traceback_of(error: BaseException, block: Block | None) -> str:
    """The traceback as text; an exception that cannot be shown must not end the engine."""
    if block is None:
        return ""
    try:
        return user_traceback(block, error)
    except BaseException as met:  # noqa: BLE001  # its methods and attributes are the user's
        return f"<no traceback: showing it raised {type(met).__name__}>"


def _warning(notice: Notice) -> BlockWarning:
    kind = notice.category
    return BlockWarning(
        kind.__module__, kind.__qualname__, notice.message, notice.file, notice.line
    )
