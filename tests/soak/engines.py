"""Engines for the soak: too small for what it asks of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.conftest import record_steps
from tests.support.checkpoints import checkpoint

CACHE_BLOCK = 32 * 4096
"""Bytes of a block of 32 tokens in T-LLAMA's KV cache."""
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 256,
    "block_size": 32,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 128,  # plain prompts above it are run in pieces
    "kv_cache_memory_bytes": 12 * CACHE_BLOCK,  # for three requests of the longest prompts
    "block_timeout": 2.0,
}


@contextmanager
def engine(*, asynchronous: bool, tapped: bool = False) -> Iterator[Any]:
    """An engine on T-LLAMA under one of vLLM's two ways of scheduling.

    Args:
        tapped: have decode steps run as recorded forwards, as graphs do on a GPU.
    """
    from midstream import VLLM

    with VLLM(str(checkpoint("T-LLAMA", with_tokenizer=True)), **SETTINGS) as model:
        with pytest.MonkeyPatch.context() as patch:
            schedule(patch, asynchronous=asynchronous)
            model.dispatch()
        assert (core(model).batch_queue is not None) == asynchronous
        if tapped:
            record_steps(model)
        yield model


def schedule(patch: pytest.MonkeyPatch, *, asynchronous: bool) -> None:
    """Choose how steps are scheduled, which vLLM's platform check decides on a CPU."""
    from vllm.engine.arg_utils import EngineArgs

    create = EngineArgs.create_engine_config

    def chosen(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = create(self, *args, **kwargs)
        config.scheduler_config.async_scheduling = asynchronous
        return config

    patch.setattr(EngineArgs, "create_engine_config", chosen)


def core(model: Any) -> Any:
    """VLLM's engine core in this process."""
    return model.vllm_entrypoint.llm_engine.engine_core.engine_core


def held(model: Any) -> list[dict[str, int]]:
    """What each worker holds. It learns of a request's end with the step after it."""
    found: list[dict[str, int]] = model.vllm_entrypoint.collective_rpc(_held_by)
    return found


def _held_by(worker: Any) -> dict[str, int]:
    """A block counts until its worker has let go of it, whether or not it has sent its record."""
    blocks = worker.model_runner.blocks
    return {
        "blocks": len(blocks._admitted) + len(blocks._parked),
        "parts": len(blocks.commons),
        "caches": blocks.live_caches,
        "recorded modules": len(blocks.interleaver._recording),
    }


class Counts:
    """What an engine did.

    Attributes:
        preempted: ids of the requests that were preempted, once for each time.
        pieces: how many prompts were run in pieces.
    """

    def __init__(self, model: Any):
        self.preempted: list[str] = []
        self.pieces = 0
        scheduler = core(model).scheduler
        self._preempt, self._schedule = scheduler._preempt_request, scheduler.schedule
        scheduler._preempt_request = self._preempting
        scheduler.schedule = self._scheduling

    def _preempting(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self.preempted.append(request.request_id)
        return self._preempt(request, *args, **kwargs)

    def _scheduling(self, *args: Any, **kwargs: Any) -> Any:
        output = self._schedule(*args, **kwargs)
        self.pieces += sum(
            new.num_computed_tokens + output.num_scheduled_tokens[new.req_id]
            < len(new.prompt_token_ids or ())
            for new in output.scheduled_new_reqs
        )
        return output
