"""The blocks of one worker: taken in with requests, run beside the steps, closed at the end."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import torch

from midstream.errors import MidstreamError, UnsupportedError
from midstream.interleaving.interleaver import Interleaver
from midstream.interleaving.run import Run
from midstream.modeling.vllm.locations import EngineModel
from midstream.modeling.vllm.payloads import BlockError, Record
from midstream.modeling.vllm.wire import KEY, MODEL, NODE, TOKENIZER, TRACER
from midstream.tracing import Block, Execution, user_traceback
from midstream.tracing.shipping import loads


class Admitted:
    """One request's block, from its first step to its close."""

    def __init__(self, request_id: str, payload: bytes, host: BlockHost):
        self.request_id = request_id
        self._payload, self._host = payload, host
        self._block: Block | None = None
        self._execution: Execution | None = None
        self.run = Run(self._execute, seed=zlib.crc32(payload))
        self.reported = False

    def _execute(self) -> None:
        self._block = loads(self._payload, self._host.resolve)
        self._execution = Execution(self._block, model=self._host.model, tracer=self._host.tracer)
        self._execution.run()

    def record(self) -> Record:
        """What the request sends home when it closes."""
        self.run.kill()
        execution, error = self._execution, self.run.error
        saves = execution.saves() if execution is not None else {}
        return Record(self.request_id, saves=saves, error=self._error(error))

    def _error(self, error: BaseException | None) -> BlockError | None:
        if error is None:
            return None
        block = self._block
        return BlockError.of(error, user_traceback(block, error) if block is not None else "")


class BlockHost:
    """All blocks of one worker.

    Args:
        root: the model vLLM loaded.
        tokenizer: gives the checkpoint's tokenizer, called when a block first uses it.
    """

    def __init__(self, root: torch.nn.Module, tokenizer: Callable[[], Any]):
        self.model = BlockModel(root, tokenizer)
        self.tracer = BlockTracer()
        self.interleaver = Interleaver(self.model.tree.modules)
        self._admitted: dict[str, Admitted] = {}

    def admit(self, request_id: str, extra_args: Mapping[str, Any] | None) -> None:
        """Take in a request; one that returns after a preemption keeps its block."""
        payload = (extra_args or {}).get(KEY)
        if payload is not None and request_id not in self._admitted:
            self._admitted[request_id] = Admitted(request_id, payload, self)

    def active(self, request_ids: Iterable[str]) -> dict[str, Run]:
        """Runs, by request, of those blocks that have not ended."""
        if not self._admitted:
            return {}
        found = ((i, self._admitted.get(i)) for i in request_ids)
        return {i: a.run for i, a in found if a is not None and not a.run.done}

    def failed(self) -> list[str]:
        """Requests whose block has failed since the last call."""
        found = [a for a in self._admitted.values() if a.run.error is not None and not a.reported]
        for admitted in found:
            admitted.reported = True
        return [admitted.request_id for admitted in found]

    def close(self, request_ids: Iterable[str]) -> list[Record]:
        """End the blocks of finished requests.

        Returns:
            Their records, in the order of the requests' ids.
        """
        if not self._admitted:
            return []
        closed = [self._admitted.pop(i) for i in sorted(request_ids) if i in self._admitted]
        return [admitted.record() for admitted in closed]

    def __len__(self) -> int:
        return len(self._admitted)

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


class BlockModel(EngineModel):
    """What `model` is inside a block.

    Args:
        root: the model vLLM loaded.
        tokenizer: gives the checkpoint's tokenizer.
    """

    def __init__(self, root: torch.nn.Module, tokenizer: Callable[[], Any]):
        super().__init__(root)
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


class BlockTracer:
    """What `tracer` is inside a block."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"`tracer.{name}` is not available inside a block. Saved values are bound to their "
            "names when the `with` ends."
        )
