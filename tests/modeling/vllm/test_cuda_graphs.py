"""On which engines decode steps with blocks may be CUDA graphs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

from midstream.modeling.vllm.engine.cuda_graphs import CudaGraphs, captures_decodes, has_state


def config(mode: CUDAGraphMode = CUDAGraphMode.FULL_AND_PIECEWISE, **changed: Any) -> Any:
    """What is looked at of vLLM's configuration: one GPU, no adapters, text only."""
    parts = {
        "compilation_config": {"cudagraph_mode": mode},
        "parallel_config": {"world_size": 1, "data_parallel_size": 1},
        "model_config": {
            "is_encoder_decoder": False,
            "is_multimodal_model": False,
            "enable_prompt_embeds": False,
        },
    }
    found: dict[str, Any] = {"lora_config": None, "speculative_config": None}
    for name, values in parts.items():
        values.update({key: changed.pop(key) for key in list(changed) if key in values})
        found[name] = SimpleNamespace(**values)
    return SimpleNamespace(**{**found, **changed})


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        (CUDAGraphMode.FULL_AND_PIECEWISE, True),
        (CUDAGraphMode.FULL_DECODE_ONLY, True),
        (CUDAGraphMode.FULL, True),
        (CUDAGraphMode.PIECEWISE, False),
        (CUDAGraphMode.NONE, False),
    ],
)
def test_vllm_has_to_capture_whole_decode_steps(mode: CUDAGraphMode, expected: bool) -> None:
    """Without full graphs for decoding, as on an eager engine, there are none with breaks."""
    assert captures_decodes(config(mode)) is expected


@pytest.mark.parametrize(
    "changed",
    [
        {"world_size": 2},
        {"data_parallel_size": 2},
        {"lora_config": SimpleNamespace()},
        {"speculative_config": SimpleNamespace()},
        {"is_encoder_decoder": True},
        {"is_multimodal_model": True},
        {"enable_prompt_embeds": True},
    ],
)
def test_engines_that_stay_eager(changed: dict[str, Any]) -> None:
    """Several ranks, adapters, drafts and inputs that are no token ids are left to eager steps."""
    assert not captures_decodes(config(**changed))


def test_a_state_cannot_be_run_twice() -> None:
    """A layer that keeps a state would advance it twice where a guess is wrong."""
    attention = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)
    state = MambaSpec(block_size=16, shapes=((2, 2),), dtypes=(torch.float32,))
    groups = [SimpleNamespace(kv_cache_spec=spec) for spec in (attention, state)]
    assert has_state(SimpleNamespace(kv_cache_groups=groups))
    assert not has_state(SimpleNamespace(kv_cache_groups=groups[:1]))


@pytest.mark.parametrize(
    ("mode", "count", "expected"),
    [
        (CUDAGraphMode.FULL, 1, True),
        (CUDAGraphMode.FULL, None, False),
        (CUDAGraphMode.FULL, 2, False),
        (CUDAGraphMode.PIECEWISE, 1, False),
        (CUDAGraphMode.NONE, None, False),
    ],
)
def test_only_batches_of_single_tokens(
    mode: CUDAGraphMode, count: int | None, expected: bool
) -> None:
    """A graph with breaks is of requests that decode, one token each."""
    shape = BatchExecutionDescriptor(mode, num_tokens=4, num_reqs=4, uniform_token_count=count)
    assert CudaGraphs(None, lambda: None).serves(shape) is expected
