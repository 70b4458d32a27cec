"""The blocks of one worker: taken in with requests, run beside the steps, closed at the end."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn

import msgspec
import torch

from midstream.errors import MidstreamError, UnsupportedError
from midstream.interleaving.indices import Limit
from midstream.interleaving.interleaver import Interleaver
from midstream.interleaving.node import Tree
from midstream.interleaving.run import Notice, Run, current_run
from midstream.interleaving.steps import Steps
from midstream.modeling.vllm.engine.commons import Common, Commons
from midstream.modeling.vllm.locations import EngineModel
from midstream.modeling.vllm.payloads import BlockError, BlockWarning, Record
from midstream.modeling.vllm.wire import (
    FAILED,
    KEY,
    MODEL,
    NODE,
    STOPPED,
    STOPPED_BEFORE_TOKEN,
    TOKENIZER,
    TRACER,
    Payload,
)
from midstream.tracing import Block, Execution, user_traceback

Rename = Mapping[str, str | list[str]]
_PAYLOAD = msgspec.msgpack.Decoder(Payload)


class Admitted:
    """One request's block, from its first step to its close."""

    def __init__(self, request_id: str, payload: bytes, host: BlockHost, ends: frozenset[int]):
        self.request_id = request_id
        self.ending_ids = ends
        self._payload, self._host = _PAYLOAD.decode(payload), host
        self._common, self._rest = _parts(self._payload, host.commons)
        self._block: Block | None = None
        self._execution: Execution | None = None
        self.run = Run(self._execute, seed=zlib.crc32(self._rest, self._common.digest))
        self.reported = False
        self.recorded = False
        self._steps = 0

    def _execute(self) -> None:
        self._block = self._common.opened.block(self._host.resolve, self._rest)
        execution = Execution(self._block, model=self._host.model, tracer=self._host.tracer)
        for name in self._payload.keep:
            if name in execution.namespace:
                execution.scope.mark(execution.namespace[name], name)
        self._execution = execution
        execution.run()

    def enters_step(self) -> bool:
        """Count a step of the request; whether the block has something to do in it."""
        self.run.visit, self._steps = self._steps, self._steps + 1
        if self.run.done:
            return False
        return not self.run.started or (
            self.run.awaited is not None and self.run.awaited <= self.run.visit
        )

    def record(self) -> Record:
        """What the request sends home, once: when its block is done or it closes."""
        self.run.close()
        self.recorded = True
        execution, self._execution = self._execution, None
        return Record(
            self.request_id,
            saves=execution.saves() if execution is not None else {},
            error=self._error(self.run.error),
            warnings=[_warning(notice) for notice in self.run.warnings],
        )

    def _error(self, error: BaseException | None) -> BlockError | None:
        if error is None:
            return None
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

    Attributes:
        commons: what requests to come have in common.
    """

    def __init__(
        self,
        root: torch.nn.Module,
        tokenizer: Callable[[], Any],
        rename: Rename | None = None,
        limit: Limit | None = None,
    ):
        self.model = BlockModel(root, tokenizer, rename)
        self.tracer = BlockTracer()
        self.interleaver = Interleaver(self.model.tree.modules, limit)
        self.commons = Commons()
        self._admitted: dict[str, Admitted] = {}

    def admit(self, request_id: str, sampling: Any) -> None:
        """Take in a request; one that returns after a preemption keeps its block.

        Args:
            sampling: vLLM's sampling parameters, which carry the block.
        """
        payload = (sampling.extra_args or {}).get(KEY)
        if payload is not None and request_id not in self._admitted:
            ends = {sampling.eos_token_id, *(sampling.stop_token_ids or ())} - {None}
            self._admitted[request_id] = Admitted(request_id, payload, self, frozenset(ends))

    def ending_ids(self, request_id: str) -> frozenset[int]:
        """Token ids that end a request: end of sequence, unless ignored, and its stop tokens."""
        return self._admitted[request_id].ending_ids

    def active(self, request_ids: Iterable[str]) -> dict[str, Run]:
        """Runs, by request, of those blocks that have something to do in the step that begins.

        Args:
            request_ids: the requests of the step; called once for each step.
        """
        if not self._admitted:
            return {}
        found = ((i, self._admitted.get(i)) for i in request_ids)
        return {i: a.run for i, a in found if a is not None and a.enters_step()}

    def ended(self) -> list[tuple[str, str]]:
        """Requests that their block has ended since the last call, and how (see ``wire``)."""
        found = []
        for request_id, admitted in self._admitted.items():
            how = _how_ended(admitted.run)
            if how and not admitted.reported:
                admitted.reported = True
                found.append((request_id, how))
        return found

    def finished(self, request_ids: Iterable[str]) -> list[Record]:
        """Records of those blocks that are done while their requests go on, in their order."""
        found = (self._admitted.get(i) for i in sorted(request_ids))
        return [a.record() for a in found if a is not None and a.run.done and not a.recorded]

    def close(self, request_ids: Iterable[str]) -> list[Record]:
        """End the blocks of finished requests.

        Returns:
            The records that have not been sent, in the order of the requests' ids.
        """
        if not self._admitted:
            return []
        closed = [self._admitted.pop(i) for i in sorted(request_ids) if i in self._admitted]
        return [admitted.record() for admitted in closed if not admitted.recorded]

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._admitted

    def __len__(self) -> int:
        return sum(not admitted.recorded for admitted in self._admitted.values())

    def resolve(self, reference: str) -> Any:
        """The engine's own object for a reference in a block.

        Raises:
            MidstreamError: there is none.
        """
        if reference == MODEL:
            return self.model
        if reference == TRACER:
            return self.tracer
        if reference == TOKENIZER:
            return self.model.tokenizer
        kind, _, path = reference.partition(":")
        node = self.model.tree.nodes.get(path) if kind == NODE else None
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

    def trace(self, *args: Any, **settings: Any) -> NoReturn:
        """Refuse: a block runs beside one request.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            "A trace inside a trace is not supported. Save what the other trace needs, and trace "
            "again after the `with`."
        )


_ATTENTION = (
    "it contains attention or a state, which reads and writes the cache of all requests in the "
    "step. Call the modules around it (norms, projections, the MLP), or edit its input"
)


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

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"`tracer.{name}` is not available inside a block. Saved values are bound to their "
            "names when the `with` ends."
        )
