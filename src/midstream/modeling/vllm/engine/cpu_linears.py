"""The CPU's linear layers, with a look at what they are given.

vLLM's product on a CPU takes rows of any width and writes as if they had its own: a block that
calls a module on other rows would overwrite the engine's memory. The checks are set on the layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def check_arguments(model: torch.nn.Module) -> None:
    """Let every linear layer of a loaded model refuse rows of another width or dtype."""
    layers: list[Any] = list(model.modules())
    for layer in layers:
        product = getattr(layer, "cpu_linear", None)
        width = getattr(layer, "input_size_per_partition", getattr(layer, "embedding_dim", None))
        if product is not None and width is not None:
            dtype = layer.weight.dtype
            layer.cpu_linear = _checked(product, type(layer).__name__, width, dtype)


def _checked(
    product: Callable[..., torch.Tensor], name: str, width: int, dtype: torch.dtype
) -> Callable[..., torch.Tensor]:
    def linear(x: torch.Tensor, weight: Any, bias: Any) -> torch.Tensor:
        if x.shape[-1] != width or x.dtype != dtype:
            raise ValueError(
                f"{name} was given {list(x.shape)} of {x.dtype}; "
                f"it takes rows of {width} of {dtype}."
            )
        return product(x, weight, bias)

    return linear
