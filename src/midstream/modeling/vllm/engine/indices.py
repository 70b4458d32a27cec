"""Which arguments of vLLM's modules are indices, and how far they may go."""

from __future__ import annotations

import torch

from midstream.interleaving.indices import Limit


def index_limit(vocabulary: int, length: int) -> Limit:
    """Bounds of token ids and positions.

    Args:
        vocabulary: number of token ids.
        length: most tokens of a request.
    """
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    bounds = {"input_ids": vocabulary, "positions": length, "position_ids": length}

    def limit(module: torch.nn.Module, name: str) -> int | None:
        if isinstance(module, VocabParallelEmbedding):
            return int(module.org_vocab_size)
        if isinstance(module, torch.nn.Embedding):
            return module.num_embeddings
        if isinstance(module, RotaryEmbeddingBase):  # whose parameters have no names
            return length
        return bounds.get(name)

    return limit
