"""The blocks of one worker: taken in with requests, run beside the steps, closed at the end."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import msgspec
import torch

from midstream.errors import LimitExceededError, MidstreamError, UnsupportedError
from midstream.interleaving.caches import Cache
from midstream.interleaving.indices import Limit
from midstream.interleaving.interleaver import Interleaver
from midstream.interleaving.node import Tree
from midstream.interleaving.printing import Notice
from midstream.interleaving.recording import open_cache
from midstream.interleaving.run import Run, current_run
from midstream.interleaving.snapshots import Snapshots
from midstream.interleaving.source import find_source
from midstream.interleaving.steps import Steps
from midstream.interleaving.watchdog import Clock
from midstream.modeling.vllm.engine.edits import InstalledEdit, InstalledEdits
from midstream.modeling.vllm.engine.refusals import refused
from midstream.modeling.vllm.engine.stored import Store
from midstream.modeling.vllm.limits import Limits, check_saves
from midstream.modeling.vllm.locations import EngineModel
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
from midstream.tracing.saves import save
from midstream.tracing.shipping import loads

Rename = Mapping[str, str | list[str]]


class Admitted:
    """One request's block, from its first step to its close.

    Args:
        edits: installed edits that run before it, each a block beside the same request.
        edit: the installed edit that this is, if it is one.
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
        for turn, block in enumerate([*edits, self] if edits else ()):
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
        entering = [self.run] if self._enters_step() else []
        if self._edits:
            entering = [*(edit.run for edit in self._edits if edit._enters_step()), *entering]
        return entering

    def _enters_step(self) -> bool:
        self.run.visit, self._steps = self._steps, self._steps + 1
        self.run.begin_step()
        if self.run.records:
            return True
        if self.run.done or not self._has_block:
            return False
        return not self.run.started or (
            self.run.awaited is not None and self.run.awaited <= self.run.visit
        )

    @property
    def is_done(self) -> bool:
        """Whether nothing more comes: its blocks have ended, and no cache of theirs goes on."""
        mine = not self._has_block or (self.run.done and not self.run.recorders)
        return mine and all(edit.is_done for edit in self._edits)

    @property
    def _has_block(self) -> bool:
        """Whether there is one; a request may run installed edits only."""
        return bool(self._payload.block) or self._edit is not None

    def records(self) -> list[Record]:
        """What the request sends home, once: when it is done or closes, a record a block."""
        self.recorded = True
        found = [record for edit in self._edits for record in edit.records()]
        return [*found, self._record()] if self._has_block else found

    def _record(self) -> Record:
        if not self.run.done:
            self.run.begin_step()
        self.run.close()
        for recorder in self.run.recorders:
            recorder.settle()
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
        done = [a for a in found if a is not None and a.is_done and not a.recorded]
        return [record for admitted in done for record in admitted.records()]

    def close(self, request_ids: Iterable[str]) -> list[Record]:
        """End the blocks of finished requests.

        Returns:
            The records that have not been sent, in the order of the requests' ids, those of edits
            first.
        """
        if not self._admitted:
            return []
        closed = [self._admitted.pop(i) for i in sorted(request_ids) if i in self._admitted]
        return [record for a in closed if not a.recorded for record in a.records()]

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._admitted

    def __len__(self) -> int:
        return sum(not admitted.recorded for admitted in self._admitted.values())

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


class BlockModel(EngineModel):
    """What `model` is inside a block.

    Args:
        root: the model vLLM loaded.
        tokenizer: gives the checkpoint's tokenizer.
        rename: further names for modules.
    """

    def __init__(self, root: torch.nn.Module, tokenizer: Callable[[], Any], rename: Rename | None):
        super().__init__(root, rename)
        self.tree.uncallable.update(dict.fromkeys(_with_attention(self.tree), _ATTENTION))
        self._load_tokenizer = tokenizer

    @property
    def tokenizer(self) -> Any:
        """The checkpoint's tokenizer."""
        return self._load_tokenizer()

    @property
    def stored(self) -> Mapping[str, Any]:
        """What clients had put into the engine when this request began, by name."""
        return current_run("`model.stored`").context  # type: ignore[no-any-return]

    def trace(self, *args: Any, **settings: Any) -> NoReturn:
        """Refuse: a block runs beside one request.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            "A trace inside a trace is not supported. Save what the other trace needs, and trace "
            "again after the `with`."
        )

    generate = refused("generate", "Generate before or after the `with`.")
    put = refused("put", "Put it in before the request.")
    session = refused("session", "Open it around the traces.")
    edit = refused("edit", "Install the edit before the request.")
    clear_edits = refused("clear_edits", "Clear edits before the request, or leave them out there.")


_ATTENTION = (
    "it contains attention or a state, which reads and writes the cache of all requests in the "
    "step. Call the modules around it (norms, projections, the MLP), or edit its input"
)


def _containing(tree: Tree, layers: set[int]) -> list[str]:
    """Paths of the modules that are, or contain, one of the layers."""
    return [
        path
        for path, module in tree.modules.items()
        if any(id(inner) in layers for inner in module.modules())
    ]


def _with_attention(tree: Tree) -> list[str]:
    """Paths of the modules that use the KV cache, or contain one that does."""
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    return [
        path
        for path, module in tree.modules.items()
        if any(isinstance(inner, AttentionLayerBase) for inner in module.modules())
    ]


class BlockTracer:
    """What `tracer` is inside a block. All blocks of the engine share it, so none may change it."""

    def __init__(self, tree: Tree):
        object.__setattr__(self, "_tree", tree)

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(
            f"`tracer.{name}` cannot be assigned: the tracer has no state in a block. Use a "
            "variable of the block."
        )

    @property
    def iter(self) -> Steps:
        """The request's steps: ``for step in tracer.iter[:3]``, see ``Steps``."""
        return Steps(current_run("`tracer.iter`"))

    def all(self) -> Iterator[int]:
        """All steps from the one the block is in: ``for step in tracer.all()``."""
        return self.iter[:]

    def invoke(self, *args: Any, **settings: Any) -> NoReturn:
        """Refuse: a block runs beside one request.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            "`tracer.invoke()` inside a block is not supported: the block runs beside its own "
            "request. Open the trace without a prompt to give it several invokes."
        )

    def stop(self) -> None:
        """End this request here. What the block saved comes back; the rest of it does not run.

        The finish reason is "stop", the stop reason "tracer.stop", whatever `ignore_eos` and
        `min_tokens` say. The step's token counts only if the block had reached `model.samples`.
        """
        current_run("`tracer.stop()`").stop()

    def cache(
        self,
        modules: Any = None,
        device: torch.device | str | None = "cpu",
        dtype: torch.dtype | None = None,
        detach: bool = True,
        include_output: bool = True,
        include_inputs: bool = False,
        non_blocking: bool = False,
    ) -> Cache:
        """Record modules from here to the end of the request, also after the block has ended.

        Args:
            modules: modules or their paths, one or several; all if left out.
            device: where values are kept while the request runs; None leaves them where they are.
                They come home on the CPU.
            dtype: what floating-point values are converted to.
            detach: has no effect: nothing in the engine records gradients.
            include_output: record what the modules return, after all edits.
            include_inputs: record what they are called with, after all edits.
            non_blocking: copy to the CPU beside the forward, into page-locked memory.

        Returns:
            The cache, which is saved under the name it is bound to.

        Raises:
            ValueError: the block has read or written something already, or there is no such module.
        """
        sides = {"output": include_output, "input": include_inputs}
        wanted = {
            "sides": frozenset(side for side, included in sides.items() if included),
            "device": None if device is None else torch.device(device),
            "dtype": dtype,
            "non_blocking": non_blocking,
        }
        return save(open_cache(current_run("`tracer.cache()`"), self._tree, modules, wanted))

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"`tracer.{name}` is not available inside a block. Saved values are bound to their "
            "names when the `with` ends."
        )
