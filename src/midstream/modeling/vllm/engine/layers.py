"""Layers of vLLM's models that a block cannot do everything with."""

from __future__ import annotations

from midstream.interleaving.node import Tree

HEAD = (
    "vLLM keeps the head as weights that its logits processor applies. Write "
    "`model.logits_processor(model.lm_head, hidden)`"
)


def heads(tree: Tree) -> list[str]:
    """Paths of the heads, which have no forward of their own."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    return [path for path, module in tree.modules.items() if isinstance(module, ParallelLMHead)]


def containing(tree: Tree, layers: set[int]) -> list[str]:
    """Paths of the modules that are, or contain, one of the layers."""
    return [
        path
        for path, module in tree.modules.items()
        if any(id(inner) in layers for inner in module.modules())
    ]
