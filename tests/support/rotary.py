"""Rotary embeddings of an engine in this process, computed by vLLM's code in PyTorch."""

from __future__ import annotations

from typing import Any


def rotate_in_pytorch(model: Any) -> None:
    """Have an engine's rotary embeddings take their PyTorch form.

    On a CPU vLLM's kernel turns queries that come as ``[tokens, heads, size]`` wrongly, which is
    how latent attention calls it.
    """
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase

    core = model.vllm_entrypoint.llm_engine.engine_core.engine_core
    for module in core.model_executor.driver_worker.model_runner.model.modules():
        if isinstance(module, RotaryEmbeddingBase):
            module._forward_method = module.forward_native
