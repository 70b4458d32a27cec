"""How vLLM's own layers divide what they take and return."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from midstream.modeling.vllm.engine.parallel.sharding import Divided, Layout, Part, Sum


class Rule(NamedTuple):
    """How the tensors of one side of a module are divided, in their order.

    Attributes:
        kinds: the first one's, the second's, ...; the last one's holds for all further ones.
    """

    side: str
    kinds: tuple[Divided, ...]

    def of(self, number: int, tensor: torch.Tensor) -> Divided | None:
        """How one tensor is divided, if it can be."""
        kind = self.kinds[min(number, len(self.kinds) - 1)]
        return kind if kind.fits(tensor) else None


def bare(module: Any) -> Any:
    """The layer inside one that adds adapters to it."""
    return getattr(module, "base_layer", module)


def output_parts(layer: Any) -> tuple[Part, ...] | None:
    """The parts of what a column-parallel layer computes; None for a kind that is not known."""
    from vllm.model_executor.layers.linear import (
        ColumnParallelLinear,
        MergedColumnParallelLinear,
        QKVParallelLinear,
    )

    if type(layer) is QKVParallelLinear:
        copies = layer.num_kv_head_replicas
        return (
            Part(layer.num_heads * layer.head_size),
            Part(layer.num_kv_heads * layer.head_size, copies),
            Part(layer.num_kv_heads * layer.v_head_size, copies),
        )
    if type(layer) is MergedColumnParallelLinear:
        return tuple(Part(size // layer.tp_size) for size in layer.output_sizes)
    if type(layer) is ColumnParallelLinear:
        return tuple(Part(size) for size in layer.output_partition_sizes)
    return None


def rules(module: torch.nn.Module, parent: Any, ranks: int, heads: int) -> list[Rule]:
    """What is known of a module by its class.

    Args:
        module: of the model as it is loaded on one rank.
        parent: the module that it is in.
        ranks: among how many the model is divided.
        heads: heads of keys in the whole model.
    """
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.fused_moe import MoERunner, RoutedExperts, SharedExperts
    from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear

    layer = bare(module)
    if getattr(layer, "tp_size", ranks) != ranks:
        return []  # every rank has all of it
    if isinstance(layer, ColumnParallelLinear):
        parts = output_parts(layer)
        return [] if parts is None else [Rule("output", (Layout(parts, ranks),))]
    if isinstance(layer, RowParallelLinear):
        return _of_rows(layer, ranks)
    if isinstance(layer, Attention):
        return _of_attention(layer, parent, ranks, heads)
    experts = MoERunner | RoutedExperts | SharedExperts
    return [Rule("output", (Sum(),))] if isinstance(layer, experts) else []


def _of_rows(layer: Any, ranks: int) -> list[Rule]:
    found = []
    if layer.input_is_parallel:
        found.append(Rule("input", (Layout((Part(layer.input_size_per_partition),), ranks),)))
    if not layer.reduce_results:
        found.append(Rule("output", (Sum(),)))
    return found


def _of_attention(layer: Any, parent: Any, ranks: int, heads: int) -> list[Rule]:
    for child in parent.children() if parent is not None else ():
        heads = getattr(bare(child), "total_num_kv_heads", heads)
    copies = max(1, ranks // heads)
    keys, size = layer.num_kv_heads, layer.head_size
    values = getattr(layer, "head_size_v", size)
    inputs = (
        Layout((Part(layer.num_heads * size),), ranks),
        Layout((Part(keys * size, copies),), ranks),
        Layout((Part(keys * values, copies),), ranks),
    )
    return [
        Rule("input", inputs),
        Rule("output", (Layout((Part(layer.num_heads * values),), ranks),)),
    ]
