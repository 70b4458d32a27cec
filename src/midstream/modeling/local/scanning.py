"""Calls that give shapes without computing: on tensors that have no numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.func import functional_call

from midstream.errors import UnsupportedError
from midstream.interleaving.structure import flatten


class Scanning:
    """Calls a module with fake tensors in the place of its own and of its inputs.

    Args:
        module: on any device, the meta device included.
    """

    def __init__(self, module: torch.nn.Module):
        self._module = module
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Let all that is computed be fake."""
        with self._mode:
            yield

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module; what it returns is fake too.

        Raises:
            UnsupportedError: what it does depends on numbers.
        """
        tensors = chain(
            self._module.named_parameters(remove_duplicate=False),
            self._module.named_buffers(remove_duplicate=False),
        )
        made: dict[int, torch.Tensor] = {}
        fakes = {name: self._fake(tensor, made) for name, tensor in tensors}
        leaves, build = flatten((args, kwargs))
        given = [self._fake(leaf, made) if _is_real(leaf) else leaf for leaf in leaves]
        args, kwargs = build(given)
        try:
            return functional_call(self._module, fakes, args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise UnsupportedError(
                f"{type(self._module).__name__} cannot be scanned with this input: its forward "
                f"looks at numbers ({error}), and a scan has none. Trace it instead."
            ) from error

    def _fake(self, tensor: torch.Tensor, made: dict[int, torch.Tensor]) -> torch.Tensor:
        """An empty tensor of the same form; tied weights stay one."""
        if id(tensor) not in made:
            device = torch.device("cpu") if tensor.is_meta else tensor.device
            empty = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device
            )
            empty.requires_grad_(tensor.requires_grad)
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            made[id(tensor)] = (
                torch.nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
            )
        return made[id(tensor)]


def _is_real(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)
