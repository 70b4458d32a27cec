"""The one file that touches vLLM's capture of CUDA graphs.

A forward is captured as vLLM captures its own for whole decode steps: with dummy inputs in the
same static buffers, the attention in the graph and its metadata staged in every step. What differs
is that the model runs without its compiled graph, with vLLM's own kernels, and that the capture
has copies of what blocks read, and is broken where they write.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphCapture
from vllm.compilation.cudagraph_pool import capture_pool
from vllm.config import CUDAGraphMode
from vllm.distributed.parallel_state import graph_capture
from vllm.forward_context import set_forward_context
from vllm.model_executor.offloader.base import get_offloader
from vllm.utils.torch_utils import weak_ref_tensor
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.worker.gpu.cudagraph_utils import (
    BatchExecutionDescriptor,
    prepare_inputs_to_capture,
)

from midstream.interleaving.tapped import Tapped
from midstream.modeling.vllm.engine.graphs import Recorded


def captures_decodes(config: Any) -> bool:
    """Whether an engine of this configuration replays whole decode steps as CUDA graphs.

    Only then can they be replayed with breaks. Several ranks, adapters, drafts and inputs that are
    no token ids are left to eager steps.
    """
    mode = config.compilation_config.cudagraph_mode
    return (
        mode is not None
        and mode.decode_mode() == CUDAGraphMode.FULL
        and config.parallel_config.world_size == 1
        and config.parallel_config.data_parallel_size == 1
        and config.lora_config is None
        and config.speculative_config is None
        and not config.model_config.is_encoder_decoder
        and not config.model_config.is_multimodal_model
        and not config.model_config.enable_prompt_embeds
    )


def has_state(kv_cache_config: Any) -> bool:
    """Whether a layer keeps a state, which a forward that runs twice would advance twice."""
    return any(
        isinstance(group.kv_cache_spec, MambaSpec) for group in kv_cache_config.kv_cache_groups
    )


class _Segments(BreakableCUDAGraphCapture):  # type: ignore[misc]
    """A capture that other threads' CUDA calls do not break: vLLM's output thread makes some."""

    def _begin_segment(self) -> None:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
        self._current_graph, self._capturing = graph, True

    def hold(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor's memory, which the graph owns; a reference of ours would pin it."""
        return weak_ref_tensor(tensor)  # type: ignore[no-any-return]

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in the graph's memory, which the reference to it keeps for it alone."""
        return tensor.clone()

    def pause(self, serve: Callable[[], None]) -> None:
        """Break the graph here."""
        self.add_eager(serve)


class CudaGraphs:
    """Captures forwards of one model runner.

    Args:
        runner: vLLM's, after it has captured its own graphs.
        kernels: switches vLLM's own kernels in, as for an eager step.
    """

    def __init__(self, runner: Any, kernels: Callable[[], Any]):
        self._runner, self._kernels = runner, kernels

    def serves(self, shape: BatchExecutionDescriptor) -> bool:
        """Whether a batch is of requests with one token each, and has a graph of vLLM's."""
        return bool(shape.cg_mode == CUDAGraphMode.FULL and shape.uniform_token_count == 1)

    def shapes(self) -> list[BatchExecutionDescriptor]:
        """All of these that vLLM captures graphs for, the largest first."""
        captured = self._runner.cudagraph_manager._capture_descs.get(CUDAGraphMode.FULL, [])
        shapes = (shape for shape in captured if self.serves(shape))
        return sorted(shapes, key=lambda shape: shape.num_tokens, reverse=True)

    @torch.inference_mode()
    def __call__(self, shape: BatchExecutionDescriptor, tapped: Tapped) -> Recorded:
        """Capture the forward for one shape of batch. Waits for all that is under way."""
        runner, count = self._runner, shape.num_tokens
        if runner.blocks.mirrors is not None:
            runner.blocks.mirrors.wait()  # nothing else is launched or allocated meanwhile
        torch.cuda.synchronize()
        before = torch.cuda.mem_get_info()[0]
        hidden = runner.cudagraph_manager.hidden_states[:count]
        inputs = self._inputs(shape)
        with _without_gc(), graph_capture(device=runner.device), self._kernels():
            with self._context(shape):
                runner.model(**inputs)  # kernels that are built when first used
            get_offloader().sync_prev_onload()
            with (
                self._context(shape),
                capture_pool(runner.cudagraph_manager.pool, runner.vllm_config) as pool,
                _Segments(pool=pool) as segments,
            ):
                value = tapped.record(segments, runner.model.forward, inputs, (count,))
                hidden.copy_(value)
                get_offloader().join_after_forward()
        torch.cuda.synchronize()
        taken = before - torch.cuda.mem_get_info()[0]

        def replay(_forward: Callable[..., Any], _inputs: dict[str, Any]) -> torch.Tensor:
            get_offloader().sync_prev_onload()
            segments.replay()
            return hidden  # type: ignore[no-any-return]

        return Recorded(replay, max(0, taken))

    def _inputs(self, shape: BatchExecutionDescriptor) -> dict[str, Any]:
        runner, count = self._runner, shape.num_tokens
        buffers = runner.input_buffers
        return {
            "input_ids": buffers.input_ids[:count],
            "positions": buffers.positions[:count],
            "intermediate_tensors": None,
            **runner.model_state.prepare_dummy_inputs(shape.num_reqs or count, count),
        }

    @contextmanager
    def _context(self, shape: BatchExecutionDescriptor) -> Iterator[None]:
        """The forward context of a dummy batch; made anew, as attention layers may change it."""
        runner, count = self._runner, shape.num_tokens
        buffers = runner.input_buffers
        metadata, slots = prepare_inputs_to_capture(
            shape.num_reqs or count,
            count,
            runner.model_state,
            buffers,
            runner.block_tables,
            runner.attn_groups,
            runner.kv_cache_config,
            full_cudagraph=True,
            max_query_len=shape.max_query_len or shape.uniform_token_count,
        )
        buffers.is_padding.fill_(True)
        with set_forward_context(
            metadata,
            runner.vllm_config,
            num_tokens=count,
            cudagraph_runtime_mode=CUDAGraphMode.NONE,
            slot_mapping=slots,
            skip_compiled=True,
            is_padding=buffers.is_padding[:count],
        ):
            yield


@contextmanager
def _without_gc() -> Iterator[None]:
    """A collection during a capture may unload what the graph uses."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
