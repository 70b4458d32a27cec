"""Tensors that all requests share and none may change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

_SETTERS = ("__setitem__", "__delitem__", "__set__")


class ReadOnlyTensor(torch.Tensor):
    """A tensor that refuses what would write into it, views of it included.

    What is computed from it is an ordinary tensor. PyTorch has no such tensor of its own: it
    refuses writes into one that was made in inference mode only when they are done.
    """

    @staticmethod
    def of(tensor: torch.Tensor) -> ReadOnlyTensor:
        """The same memory, read-only."""
        made: ReadOnlyTensor = torch.Tensor._make_subclass(ReadOnlyTensor, tensor)
        return made

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation of PyTorch's on it.

        Raises:
            ValueError: the operation would write into it.
        """
        kwargs = kwargs or {}
        if _writes(func.__name__, args, kwargs):
            raise ValueError(
                "This tensor, a weight or a stored object, is shared by all requests, so no block "
                "may write into it. Change a copy (`x = tensor.clone()`), or what the module "
                "returns; a stored object is replaced with `model.put` between requests."
            )
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **kwargs)
            return _guarded(found, args)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """A copy is the block's own."""
        found: torch.Tensor = memo.setdefault(id(self), self.clone())
        return found


def _writes(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operation writes into a read-only argument of its own."""
    in_place = name in _SETTERS or (name.startswith("__i") and name != "__invert__")
    in_place = in_place or (name.endswith("_") and not name.endswith("__"))
    written = args[0] if args and (in_place or kwargs.get("inplace")) else None
    return any(_is_read_only(value) for value in (written, kwargs.get("out")))


def _is_read_only(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return any(isinstance(item, ReadOnlyTensor) for item in value)
    return isinstance(value, ReadOnlyTensor)


def _guarded(found: Any, args: tuple[Any, ...]) -> Any:
    """A result that looks into the same memory is read-only too."""
    if isinstance(found, tuple | list) and type(found) in (tuple, list):
        return type(found)(_guarded(item, args) for item in found)
    if isinstance(found, torch.Tensor):
        shares = not isinstance(found, ReadOnlyTensor) and _memory(found) in {
            _memory(each) for each in args if isinstance(each, ReadOnlyTensor)
        }
        return ReadOnlyTensor.of(found) if shares else found
    if isinstance(found, np.ndarray):
        found.flags.writeable = False
    return found


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else id(tensor)
