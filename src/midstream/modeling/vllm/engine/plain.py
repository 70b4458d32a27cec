"""Blocks whose switches need nothing exchanged, see ``midstream.tracing.plain``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from midstream.interleaving.node import Node
from midstream.modeling.vllm.engine.inside import BlockModel, BlockTracer
from midstream.tracing import Block

_TYPES = frozenset(
    (
        *(bool, int, float, complex, str, bytes, type(None), slice, range),
        *(torch.Tensor, torch.nn.Parameter, torch.dtype, torch.device, torch.Size),
    )
)
_OURS = (Node, BlockModel, BlockTracer)
_MOST_ITEMS = 100


def is_plain(block: Block) -> bool:
    """Whether a block does nothing but compute, as far as can be seen."""
    if block.code is None or not block.code.compiled().plain:
        return False
    return all(map(_is_plain_value, block.values.values()))


def _is_plain_value(value: Any) -> bool:
    """Whether operations on a value, and calls of its known methods, only compute."""
    if type(value) in _TYPES or value is torch or isinstance(value, _OURS):
        return True
    if type(value) not in (list, tuple, dict) or len(value) > _MOST_ITEMS:
        return False
    items = [*value.keys(), *value.values()] if isinstance(value, Mapping) else value
    return all(map(_is_plain_value, items))
