"""Compact pickles of torch tensors; torch is never imported here before the user has."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["reduce_tensor"]


def reduce_tensor(value: Any) -> tuple[Callable[..., Any], tuple[Any, ...]] | None:
    """Return how to rebuild a dense tensor or parameter from its elements alone, else None.

    The elements go contiguous and from CPU memory, so a view does not carry the storage it looks
    into; tensors that shared memory no longer do. Subclasses, sparse, quantized and meta tensors
    are left to torch's own pickling.
    """
    torch = sys.modules.get("torch")
    if torch is None or type(value) not in (torch.Tensor, torch.nn.Parameter):
        return None
    if value.layout is not torch.strided or value.is_meta or value.is_quantized:
        return None
    dense = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
    elements = pickle.PickleBuffer(dense.reshape(-1).view(torch.uint8).numpy())
    is_parameter = type(value) is torch.nn.Parameter
    state = (elements, value.dtype, tuple(value.shape), value.requires_grad, is_parameter)
    return _rebuild, state


def _rebuild(
    elements: bytearray,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    requires_grad: bool,
    is_parameter: bool,
) -> torch.Tensor:
    import torch

    flat = torch.frombuffer(elements, dtype=dtype) if elements else torch.empty(0, dtype=dtype)
    value = flat.reshape(shape)
    if is_parameter:
        return torch.nn.Parameter(value, requires_grad=requires_grad)
    return value.requires_grad_(requires_grad)
