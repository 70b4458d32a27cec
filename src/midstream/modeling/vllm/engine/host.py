"""The blocks of one worker: taken in with requests, run beside the steps, closed at the end."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
import torch

from midstream.errors import LimitExceededError, MidstreamError
from midstream.interleaving.indices import Limit
from midstream.interleaving.interleaver import Interleaver
from midstream.interleaving.node import Tree
from midstream.interleaving.printing import Notice
from midstream.interleaving.run import Run
from midstream.interleaving.snapshots import Snapshots
from midstream.interleaving.source import find_source
from midstream.interleaving.watchdog import Clock
from midstream.modeling.vllm.engine.edits import InstalledEdit, InstalledEdits
from midstream.modeling.vllm.engine.inside import BlockModel, BlockTracer, Rename
from midstream.modeling.vllm.engine.stored import Store
from midstream.modeling.vllm.limits import Limits, check_saves
from midstream.modeling.vllm.payloads import BlockError, BlockWarning, Print, Record
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
from midstream.tracing.shipping import loads


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
        self._block: Block | None = None
        self._execution: Execution | None = None
        self.run = Run(
            self._execute,
            seed=zlib.crc32(payload.block),
            clock=host.clock,
            snapshots=Snapshots(host.limits.max_snapshot_bytes),
        )
        self.run.uses_source = b"source" in payload.block
        self.run.context = host.stored.objects
        self.blocks = [*edits, self] if payload.block or edit is not None else [*edits]
        for turn, block in enumerate(self.blocks if edits else ()):
            block.run.turn = turn
        self.reported = False
        self.recorded = False
        self._steps = 0

    def _execute(self) -> None:
        stored = self.run.context
        self._block = loads(self._payload.block, lambda name: self._host.resolve(name, stored))
        execution = Execution(self._block, model=self._host.model, tracer=self._host.tracer)
        for name in self._payload.keep:
            if name in execution.namespace:
                execution.scope.mark(execution.namespace[name], name)
        self._execution = execution
        execution.run()

    def entering(self) -> list[Run]:
        """Count a step of the request; its runs that have something to do in it, in their turn."""
        return [block.run for block in self.blocks if block._enters_step()]

    def _enters_step(self) -> bool:
        self.run.visit, self._steps = self._steps, self._steps + 1
        self.run.begin_step()
        if self.run.records:
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

    def record(self) -> Record:
        """What the request sends home, once: when its block is done or it closes."""
        if not self.run.done:
            self.run.begin_step()
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

    def _saves(self) -> dict[str, Any]:
        execution, self._execution = self._execution, None
        return execution.saves() if execution is not None else {}

    def how_ended(self) -> str:
        """How a block has ended the request; an edit that failed lets it go on."""
        for edit in self._edits:
            if edit.run.stopped is not None:
                return _how_ended(edit.run)
        return _how_ended(self.run)

    def _error(self, error: BaseException | None) -> BlockError | None:
        if error is None:
            return None
        if self._edit is not None:
            error.add_note(f"Raised in the installed edit {self._edit.label}.")
        return BlockError.of(error, _traceback_of(error, self._block))


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
        always = _containing(self.model.tree, {id(layer) for layer in stateful})
        self.interleaver = Interleaver(self.model.tree.modules, limit, always)
        self.edits, self.stored = InstalledEdits(), Store()
        self._admitted: dict[str, Admitted] = {}

    def admit(self, request_id: str, sampling: Any) -> None:
        """Take in a request; one that returns after a preemption keeps its block.

        Args:
            sampling: vLLM's sampling parameters, which carry the block and name the edits.
        """
        given = (sampling.extra_args or {}).get(KEY)
        if given is not None and request_id not in self._admitted:
            payload = msgspec.msgpack.decode(given, type=Payload)
            ends = frozenset({sampling.eos_token_id, *(sampling.stop_token_ids or ())} - {None})
            edits = [
                Admitted(request_id, Payload(edit.block), self, ends, edit=edit)
                for edit in self.edits.chosen(payload.edits)
            ]
            self._admitted[request_id] = Admitted(request_id, payload, self, ends, edits)

    def ending_ids(self, request_id: str) -> frozenset[int]:
        """Token ids that end a request: end of sequence, unless ignored, and its stop tokens."""
        return self._admitted[request_id].ending_ids

    def active(self, request_ids: Iterable[str]) -> dict[str, list[Run]]:
        """Runs, by request, of those blocks that have something to do in the step that begins.

        A request that runs edits has several, in the order in which they take turns.

        Args:
            request_ids: the requests of the step; called once for each step.
        """
        if not self._admitted:
            return {}
        found = ((i, self._admitted.get(i)) for i in request_ids)
        entering = ((i, a.entering()) for i, a in found if a is not None)
        return {i: runs for i, runs in entering if runs}

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
            those of edits first.
        """
        if not self._admitted:
            return []
        closed = [self._admitted.pop(i) for i in sorted(request_ids) if i in self._admitted]
        blocks = (block for admitted in closed for block in admitted.blocks)
        return [block.record() for block in blocks if not block.recorded]

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._admitted

    def __len__(self) -> int:
        return sum(
            not all(block.recorded for block in admitted.blocks)
            for admitted in self._admitted.values()
        )

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


def _containing(tree: Tree, layers: set[int]) -> list[str]:
    """Paths of the modules that are, or contain, one of the layers."""
    return [
        path
        for path, module in tree.modules.items()
        if any(id(inner) in layers for inner in module.modules())
    ]
