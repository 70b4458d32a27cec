"""Objects that clients keep in one worker, for blocks to use by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NoReturn

import torch

from midstream.modeling.vllm.engine.readonly import ReadOnlyTensor
from midstream.tracing.shipping import loads


class Names(dict[str, Any]):
    """A dictionary whose missing names say what there is."""

    def __missing__(self, name: str) -> NoReturn:
        there = ", ".join(map(repr, self)) or "nothing"
        raise KeyError(
            f"'{name}' is not stored in the engine (stored: {there}). "
            f"`model.put('{name}', ...)` puts it there."
        )


class Store:
    """The objects of one worker.

    Attributes:
        objects: they by name; another mapping after each change, so a request that keeps the one
            it began with keeps the objects too.
    """

    def __init__(self) -> None:
        self.objects: Mapping[str, Any] = MappingProxyType(Names())

    def put(
        self, name: str, data: bytes, device: torch.device, resolve: Callable[[str], Any]
    ) -> None:
        """Take in an object, in place of one of that name.

        Args:
            data: a block with the object among its values, as `shipping.dumps` wrote it.
            device: where its tensors go.
            resolve: gives the engine's own objects for references in it.

        Raises:
            MidstreamError: it cannot be rebuilt in this process.
        """
        value = read_only(loads(data, resolve).values[name], device)
        self.objects = MappingProxyType(Names(self.objects, **{name: value}))

    def remove(self, name: str) -> None:
        """Forget an object; twice is no error."""
        self.objects = MappingProxyType(Names({k: v for k, v in self.objects.items() if k != name}))


def read_only(value: Any, device: torch.device) -> Any:
    """A tensor, or a module in evaluation mode, on the device, that refuses writes in place."""
    if isinstance(value, torch.Tensor):
        return _frozen(value, device)
    _freeze(value, device)
    return value


def _freeze(module: torch.nn.Module, device: torch.device) -> None:
    """Replace all parameters and buffers; one that has two names stays one."""
    frozen: dict[int, torch.Tensor] = {}
    module.eval()
    for part in module.modules():
        for held in (part._parameters, part._buffers):
            for name, tensor in held.items():
                if tensor is None:
                    continue
                if id(tensor) not in frozen:
                    frozen[id(tensor)] = _frozen(tensor, device)
                held[name] = frozen[id(tensor)]  # type: ignore[assignment]


def _frozen(tensor: torch.Tensor, device: torch.device) -> ReadOnlyTensor:
    with torch.inference_mode(False):
        return ReadOnlyTensor.of(tensor.detach().to(device, copy=True))
