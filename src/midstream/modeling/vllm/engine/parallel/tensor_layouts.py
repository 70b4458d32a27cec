"""How the values of a model's locations are divided among the ranks, looked up by location."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from midstream.errors import UnsupportedError
from midstream.interleaving.locations import Location
from midstream.interleaving.structure import describe
from midstream.modeling.vllm.engine.parallel.sharding import SAME, Divided, Kind, Same


@dataclass(frozen=True)
class Leaf:
    """One tensor of a location as this rank had it, and how it is divided; None: not known."""

    shape: torch.Size
    kind: Kind | None

    def is_like(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is one of this location, whatever its number of rows."""
        return tensor.dim() == len(self.shape) and tensor.shape[1:] == self.shape[1:]


Leaves = Mapping[int, Leaf]
"""Tensors of a location, by their place among all leaves of its value."""


class Layouts:
    """What is known of each location; of one that is not here, nothing."""

    def __init__(self) -> None:
        self._known: dict[Location, Leaves] = {}
        self._counts: dict[Location, int] = {}

    def put(self, location: Location, count: int, leaves: Leaves) -> None:
        """Note a location.

        Args:
            count: of all leaves of its value, tensors or not.
        """
        self._known[location], self._counts[location] = leaves, count

    def of(self, location: Location, index: int, tensor: torch.Tensor) -> Kind | None:
        """How a leaf is divided."""
        known = self._known.get(location, {}).get(index)
        if known is None or known.kind is None or not known.is_like(tensor):
            return None
        fits = isinstance(known.kind, Same) or known.kind.fits(tensor)
        return known.kind if fits else None

    def returned(self, path: str, index: int, count: int, tensor: torch.Tensor) -> Kind | None:
        """How what a module returns is divided, where a block called it."""
        location = Location(path, "output")
        if self._counts.get(location) == count or index == 0:
            return self.of(location, index, tensor)
        return None

    def pieces(self, path: str, leaves: Sequence[Any], rank: int) -> list[Any]:
        """What a module is called with on one rank, from what a block calls it with.

        Raises:
            UnsupportedError: it is not known how that is divided.
        """
        known = self._arguments(path, leaves)
        return [
            leaf if known[index] is None else _piece(path, leaf, known[index], rank)
            for index, leaf in enumerate(leaves)
        ]

    def _arguments(self, path: str, leaves: Sequence[Any]) -> list[Divided | None]:
        """How each argument is divided; None for what is given as it is."""
        location = Location(path, "input")
        known = self._known.get(location, {})
        if all(isinstance(leaf.kind, Same) for leaf in known.values()):
            return [None] * len(leaves)
        if self._counts[location] != len(leaves):
            raise UnsupportedError(
                f"'{path}' takes tensors that are divided among the ranks of this engine, and was "
                f"called with {describe(list(leaves))}, which is not what the model calls it with. "
                "Call it as the model does: `(args, kwargs)` are its `.inputs`."
            )
        kinds = [known[i].kind if i in known else SAME for i in range(len(leaves))]
        for kind in kinds:
            if kind is None:
                raise UnsupportedError(
                    f"'{path}' cannot be called in a block: it is not known how what it takes is "
                    "divided among the ranks of this engine."
                )
        return [None if isinstance(kind, Same) else kind for kind in kinds]


def _piece(path: str, whole: Any, kind: Any, rank: int) -> Any:
    size = getattr(kind, "size", None)
    if not isinstance(whole, torch.Tensor) or size is None:
        return whole if not isinstance(whole, torch.Tensor) else kind.piece(whole, rank)
    if whole.dim() < -kind.axis or whole.shape[kind.axis] != size:
        raise ValueError(
            f"'{path}' was called with {describe(whole)}; it takes {size} along axis {kind.axis}."
        )
    return kind.piece(whole, rank).contiguous()
