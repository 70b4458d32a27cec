"""The blocks of one worker: taken in with requests, run beside the steps, closed at the end."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
import torch

from midstream.errors import MidstreamError
from midstream.interleaving.indices import Limit
from midstream.interleaving.interleaver import Interleaver
from midstream.interleaving.replays import Replay
from midstream.interleaving.run import Run
from midstream.interleaving.source import find_source
from midstream.interleaving.watchdog import Clock
from midstream.modeling.vllm.engine.commons import Commons
from midstream.modeling.vllm.engine.declared import declared
from midstream.modeling.vllm.engine.edits import InstalledEdits
from midstream.modeling.vllm.engine.inside import BlockModel, BlockTracer, Rename
from midstream.modeling.vllm.engine.layers import containing
from midstream.modeling.vllm.engine.mirroring import Mirroring
from midstream.modeling.vllm.engine.parallel.pipeline import Pipeline, staged
from midstream.modeling.vllm.engine.requests import HostedRequest, Progress
from midstream.modeling.vllm.engine.stored import Store
from midstream.modeling.vllm.limits import Limits
from midstream.modeling.vllm.payloads import Mirrors, Record
from midstream.modeling.vllm.results import Result
from midstream.modeling.vllm.wire import KEY, MODEL, NODE, STORED, TOKENIZER, TRACER, Payload

__all__ = ["BlockHost", "Progress"]

_PAYLOAD = msgspec.msgpack.Decoder(Payload)


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
        taps: the locations that blocks may ask for, see ``taps.as_data``; none for all.
        patience: seconds more than the limits allow, where another rank ends blocks that take too
            long.
        pipeline: the other stages, if the model is spread over several.

    Attributes:
        commons: what requests to come have in common.
        run_class: what runs a block.
        reports: whether records of blocks leave from this worker.
        mirroring: sends copies home while steps run, if anybody does.
    """

    mirroring: Mirroring | None = None

    def __init__(
        self,
        root: torch.nn.Module,
        tokenizer: Callable[[], Any],
        rename: Rename | None = None,
        limit: Limit | None = None,
        stateful: Iterable[Any] = (),
        limits: Limits | None = None,
        step_timeout: float = math.inf,
        taps: Sequence[Sequence[str | None]] = (),
        patience: float = 0.0,
        pipeline: Pipeline | None = None,
    ):
        self.limits = limits or Limits()
        self.clock = Clock(self.limits.block_timeout + patience, step_timeout + patience)
        self.model = BlockModel(root, tokenizer, rename if pipeline is None else None)
        self.tracer = BlockTracer(self.model.tree)
        always = containing(self.model.tree, {id(layer) for layer in stateful})
        self.run_class: type[Run] = Run
        self.reports = pipeline is None or pipeline.is_last
        if pipeline is None:
            self.interleaver = Interleaver(self.model.tree.modules, limit, always)
        else:
            self.interleaver, self.run_class = staged(pipeline, self.model, rename, limit, always)
        self.interleaver.declared = declared(self.model.tree, taps)
        self.edits, self.stored, self.commons = InstalledEdits(), Store(), Commons()
        self._admitted: dict[str, HostedRequest] = {}
        self._parked: dict[str, HostedRequest] = {}
        self._to_tell: list[str] = []

    def mirror_to(self, mirrors: Mirrors) -> None:
        """Have what blocks save sent home while they go on."""
        interleaver = self.interleaver
        self.mirroring = Mirroring(lambda: interleaver.runs, mirrors)
        interleaver.mirroring = self.mirroring

    @property
    def mirrors(self) -> Mirrors | None:
        """Where copies go that are sent home while steps run."""
        return None if self.mirroring is None else self.mirroring.mirrors

    def admit(self, request_id: str, sampling: Any) -> None:
        """Take in a request; one that returns after a preemption keeps its block.

        Args:
            sampling: vLLM's sampling parameters, which carry the block and name the edits.
        """
        given = (sampling.extra_args or {}).get(KEY)
        if given is not None and request_id not in self._admitted:
            payload = _PAYLOAD.decode(given)
            ends = frozenset({sampling.eos_token_id, *(sampling.stop_token_ids or ())} - {None})
            edits = self.edits.chosen(payload.edits)
            self._admitted[request_id] = HostedRequest(request_id, payload, self, ends, edits)

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
        """What blocks have to send while their requests go on, in the requests' order."""
        found = [self._admitted[i] for i in sorted(request_ids) if i in self._admitted]
        return [record for admitted in found for record in admitted.finished()]

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
        if not self.reports:
            for admitted in closed:
                admitted.drop()
            return []
        with self.interleaver.together(_going_on(closed)):
            waits = [admitted.close() for admitted in closed]
        records: list[Record] = []
        for admitted, waiting in zip(closed, waits, strict=True):
            if waiting:
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
        with self.interleaver.together(_going_on([admitted for admitted, _ in found])):
            for admitted, result in found:
                admitted.give_result(result)
        return [record for admitted, _ in found for record in admitted.unsent()]

    def runs(self, request_ids: Iterable[str]) -> dict[str, list[Run]]:
        """The runs of requests, in their turn."""
        found = {i: self._admitted[i] for i in request_ids if i in self._admitted}
        return {i: [block.run for block in admitted.blocks] for i, admitted in found.items()}

    def have_any_of(self, request_ids: Iterable[str]) -> bool:
        """Whether one of the requests has, or had, a block."""
        return bool(self._admitted) and any(i in self._admitted for i in request_ids)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._admitted

    def __len__(self) -> int:
        going_on = [admitted for admitted in self._admitted.values() if admitted.goes_on]
        if not self.reports:  # what is done here sends no record that would tell so
            going_on = [each for each in going_on if not all(b.is_done for b in each.blocks)]
        return len(going_on) + len(self._parked)

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


def _going_on(requests: Iterable[HostedRequest]) -> list[Run]:
    """Runs of blocks that have not ended."""
    return [block.run for each in requests for block in each.blocks if not block.run.done]
