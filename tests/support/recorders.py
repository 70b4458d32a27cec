"""What stands for CUDA graphs where there is no GPU: a recording that runs the forward each time.

All of `Tapped` is as on a GPU, breaks, buffers, wrong guesses: only launches are missing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from midstream.interleaving.copies import row_axis
from midstream.interleaving.tapped import Tapped
from midstream.modeling.vllm.engine.graphs import Recorded

MOST = 8
"""Requests of the largest batch that is recorded for declared taps."""


class PlainRecorder:
    """Serves each break as the forward gets there.

    When the forward is over, what was held is overwritten: a graph's memory is the next run's.
    """

    def __init__(self) -> None:
        self._held: list[torch.Tensor] = []
        self.breaks = 0

    def hold(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself."""
        self._held.append(tensor)
        return tensor

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy."""
        return tensor.clone()

    def pause(self, serve: Callable[[], None]) -> None:
        """Serve at once."""
        self.breaks += 1
        serve()

    def run(self, tapped: Tapped, forward: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
        """The forward with its breaks."""
        given = [x for x in kwargs.values() if isinstance(x, torch.Tensor)]
        value = tapped.record(self, forward, kwargs, (len(given[0]),))
        kept = {_memory(x) for x in [value, *given] if isinstance(x, torch.Tensor)}
        is_models = tapped._interleaver.sources.is_models  # operations are given weights too
        sizes = {x.shape[-1] for x in given if not x.is_floating_point()} or {len(given[0])}
        for tensor in self._held:
            if (
                _memory(tensor) in kept
                or is_models(tensor)
                or row_axis(tensor, list(sizes)) is None
            ):
                continue
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)
        return value


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class PlainGraphs:
    """In the place of ``CudaGraphs``: steps in which each request has one token are recorded."""

    def serves(self, shape: Any) -> bool:
        """Whether all that a batch runs are tokens behind a prompt, or prompts of one."""
        return bool(shape.num_tokens == shape.num_reqs)

    def shapes(self) -> list[Any]:
        """Those of up to `MOST` requests, as the engine on a CPU describes them."""
        from vllm.config import CUDAGraphMode
        from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

        none = CUDAGraphMode.NONE
        return [BatchExecutionDescriptor(none, count, count) for count in range(MOST, 0, -1)]

    def __call__(self, shape: Any, tapped: Tapped) -> Recorded:
        """Nothing to record: each run is its own."""
        return Recorded(lambda forward, inputs: PlainRecorder().run(tapped, forward, inputs), 1)
