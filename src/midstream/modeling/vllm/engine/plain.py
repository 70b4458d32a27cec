"""Blocks whose switches need nothing exchanged, see ``midstream.tracing.plain``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from midstream.interleaving.node import Node
from midstream.modeling.vllm.engine.inside import BlockModel, BlockTracer
from midstream.modeling.vllm.engine.readonly import ReadOnlyTensor
from midstream.tracing import Block

_TYPES = frozenset(
    (
        *(bool, int, float, complex, str, bytes, type(None), slice, range),
        *(torch.Tensor, torch.nn.Parameter, torch.dtype, torch.device, torch.Size),
        ReadOnlyTensor,
    )
)
_OURS = (Node, BlockModel, BlockTracer)
_MOST_ITEMS = 100


def is_plain(block: Block, stored: Mapping[str, Any]) -> bool:
    """Whether a block does nothing but compute, as far as can be seen.

    Args:
        stored: what it may take from ``model.stored``.
    """
    if block.code is None or not block.code.compiled().plain:
        return False
    values = list(block.values.values())
    if "stored" in block.code.compiled().code.co_names:
        values += stored.values()
    return _are_plain(values)


def _are_plain(values: list[Any]) -> bool:
    """Whether operations on values, and calls of their known methods, only compute."""
    left, seen = values, set[int]()
    while left:
        value = left.pop()
        if type(value) in _TYPES or value is torch or isinstance(value, _OURS):
            continue
        if id(value) in seen:  # a list may hold itself
            continue
        seen.add(id(value))
        if type(value) not in (list, tuple, dict) or max(len(seen), len(value)) > _MOST_ITEMS:
            return False
        left += [*value.keys(), *value.values()] if isinstance(value, dict) else value
    return True
