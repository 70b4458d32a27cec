"""What the residual stream is in what a layer of vLLM's returns."""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Any

import torch
from torch import nn

ONE, SUM, FIRST = "layer.output", "sum(layer.output)", "layer.output[0]"
"""The stream is what the layer returns, the sum of a pair, or a pair's first element."""

_RESIDUAL = "residual"


def stream_of(output: Any, *, overwrites: bool) -> tuple[str, torch.Tensor]:
    """The residual stream of a layer's output, and which of its forms that is.

    Args:
        output: what the layer returned: one tensor or a pair.
        overwrites: see ``overwrites_residual``.
    """
    if not isinstance(output, tuple | list):
        return ONE, output
    parts = [part for part in output if isinstance(part, torch.Tensor)]
    if overwrites or len(parts) == 1:
        return FIRST, parts[0]
    return SUM, parts[0] + parts[1]


def overwrites_residual(layer: nn.Module) -> bool:
    """Whether a layer pays no heed to the residual that it is called with.

    Then the first element that the layer before returned is the whole stream, and the second one
    is left over. Most layers add the two, and begin with asking whether there is a second one.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(type(layer).forward)))
    except (OSError, TypeError, SyntaxError):
        return False
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == _RESIDUAL]
    if not names:
        return False
    earliest = min(names, key=lambda node: (node.lineno, node.col_offset))
    return isinstance(earliest.ctx, ast.Store)
