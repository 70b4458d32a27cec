"""The blocks of one worker: taken in with requests, run beside the steps, closed at the end."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec
import torch

from midstream.errors import LimitExceededError, MidstreamError
from midstream.interleaving.indices import Limit
from midstream.interleaving.interleaver import Interleaver
from midstream.interleaving.notes import annotate
from midstream.interleaving.printing import Notice
from midstream.interleaving.replays import Replay, WriteLog
from midstream.interleaving.run import Run
from midstream.interleaving.snapshots import Snapshots
from midstream.interleaving.source import find_source
from midstream.interleaving.watchdog import Clock
from midstream.modeling.vllm.engine.commons import Common, Commons
from midstream.modeling.vllm.engine.edits import InstalledEdit, InstalledEdits
from midstream.modeling.vllm.engine.inside import BlockModel, BlockTracer, Rename
from midstream.modeling.vllm.engine.layers import containing
from midstream.modeling.vllm.engine.stored import Store
from midstream.modeling.vllm.limits import Limits, check_saves
from midstream.modeling.vllm.payloads import BlockError, BlockWarning, Print, Record
from midstream.modeling.vllm.results import Result
from midstream.modeling.vllm.unsupported import gradients
from midstream.modeling.vllm.wire import (
    EDIT,
    FAILED,
    KEY,
    MODEL,
    NODE,
    STOPPED,
    STOPPED_BEFORE_TOKEN,
    STORED,
    TOKENIZER,
    TRACER,
    Payload,
)
from midstream.tracing import Block, Execution, user_traceback


class Progress(NamedTuple):
    """The part of a request that a step runs.

    Attributes:
        first, stop: positions it runs, as long as they are in the prompt.
        whole: tokens of the prompt; after a preemption, with what had been drawn.
    """

    request_id: str
    first: int
    stop: int
    whole: int

    @property
    def in_prompt(self) -> bool:
        """Whether it runs anything that was known before."""
        return self.first < self.whole


_PAYLOAD = msgspec.msgpack.Decoder(Payload)


class Admitted:
    """One request's block, from its first step to its close.

    Args:
        edits: installed edits that run before it, each a block beside the same request.
        edit: the installed edit that this is, if it is one.

    Attributes:
        blocks: all blocks of the request in their turn, this one last; a request that runs edits
            only has no other.
    """

    def __init__(
        self,
        request_id: str,
        payload: Payload,
        host: BlockHost,
        ends: frozenset[int],
        edits: Sequence[Admitted] = (),
        edit: InstalledEdit | None = None,
    ):
        self.request_id = request_id
        self.ending_ids = ends
        self._payload, self._host = payload, host
        self._edits, self._edit = edits, edit
        self._common, self._rest = _parts(payload, host.commons)
        self._block: Block | None = None
        self._execution: Execution | None = None
        self.run = Run(
            self._execute,
            seed=zlib.crc32(self._rest, self._common.digest),
            clock=host.clock,
            snapshots=Snapshots(host.limits.max_snapshot_bytes),
            log=WriteLog(host.limits.max_write_log_bytes),
        )
        self.run.uses_source = self._common.uses_source or b".source" in self._rest
        self.run.context = host.stored.objects
        self.run.gets_result = edit is None
        self.blocks = [*edits, self] if payload.block or edit is not None else [*edits]
        for turn, block in enumerate(self.blocks if edits else ()):
            block.run.turn = turn
        self.reported = False
        self.recorded = False
        self._steps = 0
        self._prompt: int | None = None
        self._broken = False

    def _execute(self) -> None:
        stored = self.run.context
        self._block = self._common.opened.block(
            lambda name: self._host.resolve(name, stored), self._rest
        )
        code = self._block.code or self._block.listing
        self.run.code = code.digest if code is not None else None
        execution = Execution(self._block, model=self._host.model, tracer=self._host.tracer)
        for name in self._payload.keep:
            if name in execution.namespace:
                execution.scope.mark(execution.namespace[name], name)
        self._execution = execution
        try:
            execution.run()
        except RuntimeError as error:
            refused = gradients(error)
            if refused is None:
                raise
            raise refused from None

    def entering(self, progress: Progress) -> list[Run]:
        """Its runs that have something to do in a step of the request, in their turn."""
        if self._prompt is None:
            self._prompt = progress.whole
        if self.how_ended():
            return []  # a step that was planned before it was known
        step = progress.whole - self._prompt if progress.in_prompt else self._steps
        if progress.stop < progress.whole or step < self._steps:
            return []  # not at the end of what is to be run, or in a step that was taken back
        self._steps = step + 1
        return [block.run for block in self.blocks if block._enters_step(step, self._prompt)]

    def replays(self, progress: Progress) -> list[Replay]:
        """What its blocks wrote in rows that a step runs anew."""
        if not (progress.in_prompt and self._steps):
            return []
        found = []
        for block in self.blocks:
            log, failed = block.run.log, partial(self._break, block)
            if log is not None and log.full:
                failed(_log_is_full(log))
            elif log:
                found.append(Replay(log, progress.first, progress.stop, failed))
        return found

    def _break(self, block: Admitted, error: Exception) -> None:
        """End the request: its cache would not hold what a block of it has written."""
        if block.run.done:
            block.run.error = block.run.error or error
        else:
            block.run.fail(error)
        block.recorded, self._broken = False, True

    def _enters_step(self, step: int, prompt: int) -> bool:
        self.run.visit = step
        if self.run.log is not None:
            self.run.log.first = prompt - 1 + step if step else 0
        self.run.begin_step()
        if self.run.recorders and self.run.records:
            return True
        if self.run.done:
            return False
        return not self.run.started or (
            self.run.awaited is not None and self.run.awaited <= self.run.visit
        )

    @property
    def is_done(self) -> bool:
        """Whether nothing more comes: the block has ended, and no cache of it goes on."""
        return self.run.done and not self.run.recorders

    def waits(self) -> bool:
        """Close the blocks; whether the request's own then waits for its result."""
        for block in self.blocks:
            if not block.run.done:
                block.run.begin_step()
            block.run.close(may_wait=block is self)
        return self.run.waits_for_result

    def give_result(self, result: Any) -> None:
        """Let the request's own block, which waits for it, have the result."""
        self.run.begin_step()
        self.run.give_result(MidstreamError(_ABORTED) if result is None else result)

    def record(self) -> Record:
        """What a block sends home, once: when it is done or its request closes."""
        self.run.close()
        for recorder in self.run.recorders:
            recorder.settle()
        self.recorded = True
        saves, error = self._saves(), self.run.error
        try:
            check_saves(saves, self._host.limits.max_save_bytes)
        except LimitExceededError as exceeded:
            saves, error = {}, error or exceeded
        return Record(
            self.request_id,
            saves=saves,
            error=self._error(error),
            warnings=[_warning(notice) for notice in self.run.output.notices()],
            prints=[Print(stream, text) for stream, text in self.run.output.prints()],
            extra={EDIT: self._edit.id} if self._edit is not None else {},
        )

    def unsent(self) -> list[Record]:
        """Records of its blocks that have not been sent, those of edits first."""
        return [block.record() for block in self.blocks if not block.recorded]

    def _saves(self) -> dict[str, Any]:
        execution, self._execution = self._execution, None
        return execution.saves() if execution is not None else {}

    def how_ended(self) -> str:
        """How a block has ended the request; an edit that failed lets it go on."""
        if self._broken:
            return FAILED
        for edit in self._edits:
            if edit.run.stopped is not None:
                return _how_ended(edit.run)
        return _how_ended(self.run)

    def _error(self, error: BaseException | None) -> BlockError | None:
        if error is None:
            return None
        if self._edit is not None:
            annotate(error, f"Raised in the installed edit {self._edit.label}.")
        return BlockError.of(error, _traceback_of(error, self._block))


def _parts(payload: Payload, commons: Commons) -> tuple[Common, bytes]:
    """A block's part that others share and the rest of it; a block alone has no rest."""
    if not payload.common:
        return Common(payload.block), b""
    return commons.take(payload.common), payload.block


def _traceback_of(error: BaseException, block: Block | None) -> str:
    """The traceback as text; an exception that cannot be shown must not end the engine."""
    if block is None:
        return ""
    try:
        return user_traceback(block, error)
    except BaseException as met:  # noqa: BLE001  # its methods and attributes are the user's
        return f"<no traceback: showing it raised {type(met).__name__}>"


class BlockHost:
    """All blocks of one worker.

    Args:
        root: the model vLLM loaded.
        tokenizer: gives the checkpoint's tokenizer, called when a block first uses it.
        rename: further names for modules.
        limit: bounds of the indices that modules look up.
        stateful: the layers that run whoever skips them.
        limits: what a block may take.
        step_timeout: seconds that all blocks of a step may take together.

    Attributes:
        commons: what requests to come have in common.
    """

    def __init__(
        self,
        root: torch.nn.Module,
        tokenizer: Callable[[], Any],
        rename: Rename | None = None,
        limit: Limit | None = None,
        stateful: Iterable[Any] = (),
        limits: Limits | None = None,
        step_timeout: float = math.inf,
    ):
        self.limits = limits or Limits()
        self.clock = Clock(self.limits.block_timeout, step_timeout)
        self.model = BlockModel(root, tokenizer, rename)
        self.tracer = BlockTracer(self.model.tree)
        always = containing(self.model.tree, {id(layer) for layer in stateful})
        self.interleaver = Interleaver(self.model.tree.modules, limit, always)
        self.edits, self.stored, self.commons = InstalledEdits(), Store(), Commons()
        self._admitted: dict[str, Admitted] = {}
        self._parked: dict[str, Admitted] = {}
        self._to_tell: list[str] = []

    def admit(self, request_id: str, sampling: Any) -> None:
        """Take in a request; one that returns after a preemption keeps its block.

        Args:
            sampling: vLLM's sampling parameters, which carry the block and name the edits.
        """
        given = (sampling.extra_args or {}).get(KEY)
        if given is not None and request_id not in self._admitted:
            payload = _PAYLOAD.decode(given)
            ends = frozenset({sampling.eos_token_id, *(sampling.stop_token_ids or ())} - {None})
            edits = [
                Admitted(request_id, Payload(edit.block), self, ends, edit=edit)
                for edit in self.edits.chosen(payload.edits)
            ]
            self._admitted[request_id] = Admitted(request_id, payload, self, ends, edits)

    def ending_ids(self, request_id: str) -> frozenset[int]:
        """Token ids that end a request: end of sequence, unless ignored, and its stop tokens."""
        return self._admitted[request_id].ending_ids

    def enter_step(
        self, batch: Iterable[Progress]
    ) -> tuple[dict[str, list[Run]], dict[str, list[Replay]]]:
        """What there is to do in the step that begins, by request.

        Args:
            batch: the requests of the step; called once for each step.

        Returns:
            The runs of blocks that have something to do in it (a request that runs edits has
            several, in the order in which they take turns), and what is to be written again.
        """
        active: dict[str, list[Run]] = {}
        replays: dict[str, list[Replay]] = {}
        for progress in batch if self._admitted else ():
            admitted = self._admitted.get(progress.request_id)
            if admitted is None:
                continue
            if again := admitted.replays(progress):
                replays[progress.request_id] = again
            if runs := admitted.entering(progress):
                active[progress.request_id] = runs
        return active, replays

    def ended(self) -> list[tuple[str, str]]:
        """Requests that their block has ended since the last call, and how (see ``wire``)."""
        found = []
        for request_id, admitted in self._admitted.items():
            how = admitted.how_ended()
            if how and not admitted.reported:
                admitted.reported = True
                found.append((request_id, how))
        return found

    def finished(self, request_ids: Iterable[str]) -> list[Record]:
        """Records of those blocks that are done while their requests go on, in their order."""
        found = (self._admitted.get(i) for i in sorted(request_ids))
        blocks = (block for admitted in found if admitted is not None for block in admitted.blocks)
        return [block.record() for block in blocks if block.is_done and not block.recorded]

    def close(self, request_ids: Iterable[str]) -> list[Record]:
        """End the blocks of finished requests.

        Returns:
            The records that have not been sent, in the order of the requests' ids, of one request
            those of edits first. A request whose block waits for its result has none yet; see
            ``waiting`` and ``finish``.
        """
        if not self._admitted:
            return []
        closed = [self._admitted.pop(i) for i in sorted(request_ids) if i in self._admitted]
        records: list[Record] = []
        for admitted in closed:
            if admitted.waits():
                self._parked[admitted.request_id] = admitted
                self._to_tell.append(admitted.request_id)
            else:
                records += admitted.unsent()
        return records

    def waiting(self) -> list[str]:
        """Closed requests whose blocks have begun to wait for a result since the last call."""
        found, self._to_tell = self._to_tell, []
        return found

    def finish(self, results: Mapping[str, Result | None]) -> list[Record]:
        """End blocks that wait for their requests' results.

        Args:
            results: by request; None for one that was aborted.

        Returns:
            Their records.
        """
        found = [
            (self._parked.pop(i), result) for i, result in results.items() if i in self._parked
        ]
        for admitted, result in found:
            admitted.give_result(result)
        return [record for admitted, _ in found for record in admitted.unsent()]

    def have_any_of(self, request_ids: Iterable[str]) -> bool:
        """Whether one of the requests has, or had, a block."""
        return bool(self._admitted) and any(i in self._admitted for i in request_ids)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._admitted

    def __len__(self) -> int:
        going_on = sum(
            not all(block.recorded for block in admitted.blocks)
            for admitted in self._admitted.values()
        )
        return going_on + len(self._parked)

    @property
    def live_caches(self) -> int:
        """How many caches are being recorded."""
        blocks = (block for admitted in self._admitted.values() for block in admitted.blocks)
        return sum(recorder.open for block in blocks for recorder in block.run.recorders)

    def resolve(self, reference: str, stored: Mapping[str, Any] | None = None) -> Any:
        """The engine's own object for a reference in a block.

        Args:
            stored: what clients had put into the engine when the request began; what is there now.

        Raises:
            MidstreamError: there is none.
            KeyError: nothing is stored under the name.
        """
        if reference == MODEL:
            return self.model
        if reference == TRACER:
            return self.tracer
        if reference == TOKENIZER:
            return self.model.tokenizer
        kind, _, path = reference.partition(":")
        if kind == STORED:
            return (self.stored.objects if stored is None else stored)[path]
        tree = self.model.tree
        node = (tree.nodes.get(path) or find_source(tree, path)) if kind == NODE else None
        if node is None:
            raise MidstreamError(
                f"The block refers to '{reference}', which this engine does not have. Was it "
                "captured on another model?"
            )
        return node


def _warning(notice: Notice) -> BlockWarning:
    kind = notice.category
    return BlockWarning(
        kind.__module__, kind.__qualname__, notice.message, notice.file, notice.line
    )


def _how_ended(run: Run) -> str:
    if run.error is not None:
        return FAILED
    if run.stopped is not None:
        return STOPPED if run.stopped.keeps_token else STOPPED_BEFORE_TOKEN
    return ""


_ABORTED = "The request was aborted before it had finished, so `tracer.result` has nothing to give."


def _log_is_full(log: WriteLog) -> LimitExceededError:
    return LimitExceededError(
        f"The request was preempted, and its block had written more than max_write_log_bytes="
        f"{log.limit:.0f}: what it wrote could not be written again. Give the engine a larger KV "
        "cache, write less, or build the model with a higher `max_write_log_bytes`."
    )
