"""Indices that a block writes into a module's arguments, checked before the module looks them up.

A lookup outside its table raises in the model's forward, or reads foreign memory: either would end
the engine for all its requests.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from midstream.interleaving.copies import Rows
from midstream.interleaving.structure import flatten

Limit = Callable[[torch.nn.Module, str], int | None]
"""One past the greatest index a module takes in a parameter; None where it looks nothing up."""


class IndexCheck:
    """Raises for integers that a module cannot look up.

    Args:
        module: the module that is called.
        call: what with, ``(args, kwargs)``.
        limit: the bound of a module's parameter, by its name.
    """

    def __init__(self, module: torch.nn.Module, call: Any, limit: Limit):
        self._module, self._call, self._limit = module, call, limit

    def __call__(self, index: int, value: torch.Tensor, rows: Rows) -> None:
        """Check a leaf of the arguments.

        Raises:
            ValueError: it holds an index outside the bounds.
        """
        if value.is_floating_point() or value.is_complex() or not value.numel():
            return
        name = self._names()[index]
        limit = self._limit(self._module, name)
        if limit is None:
            return
        low, high = int(value.min()), int(value.max())
        if low < 0 or high >= limit:
            raise ValueError(
                f"'{name}' of {type(self._module).__name__} was given "
                f"{low if low < 0 else high}; it takes 0 to {limit - 1}."
            )

    def _names(self) -> list[str]:
        """The parameter each leaf belongs to."""
        args, kwargs = self._call
        parameters = [*inspect.signature(type(self._module).forward).parameters][1:]
        parameters += [""] * len(args)  # those of `*args`
        pairs = [*zip(parameters, args, strict=False), *kwargs.items()]
        return [name for name, argument in pairs for _ in flatten(argument)[0]]


class RangeCheck:
    """Raises for integers outside the range that the step itself has at this place, and for masks.

    What an operation does with integers is not known; those that the step has are fit for it. A
    mask may decide how many rows a tensor has, which the rest of the forward relies on.

    Args:
        value: the operation's arguments or result, with the rows of all requests.
    """

    def __init__(self, value: Any):
        self._leaves = flatten(value)[0]

    def __call__(self, index: int, value: torch.Tensor, rows: Rows) -> None:
        """Check a leaf.

        Raises:
            ValueError: it holds an integer outside the range, or is a mask.
        """
        there = self._leaves[index]
        if there.dtype == torch.bool:
            raise ValueError(
                "A mask inside a forward cannot be written, since the shapes of other tensors may "
                "depend on it. Write what is computed with it."
            )
        if there.is_floating_point() or there.is_complex():
            return
        if not value.numel() or not there.numel():
            return
        low, high = int(there.min()), int(there.max())
        if int(value.min()) < low or int(value.max()) > high:
            raise ValueError(
                f"Integers {int(value.min())} to {int(value.max())} were written into an operation "
                f"whose own are {low} to {high} in this step. They may be indices that a kernel "
                "looks up unchecked, so they have to stay in that range."
            )
