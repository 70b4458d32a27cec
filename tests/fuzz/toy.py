"""A model with every kind of value a module may take and return, in float64."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

WIDTH = 4
SHARED = 50
"""Length of a table that has no row per token; no step has as many rows."""


class Pair(NamedTuple):
    """What a module returns by name."""

    low: Tensor
    high: Tensor


class Norm(nn.Module):
    """Adds into the residual in place, as fused kernels do."""

    def forward(self, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the normed sum and the sum, ``[rows, width]`` each."""
        residual = hidden if residual is None else residual.add_(hidden)
        return torch.tanh(residual), residual


class Mix(nn.Module):
    """Returns a dictionary with a list in it."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, 2 * WIDTH, dtype=torch.float64)

    def forward(self, hidden: Tensor) -> dict[str, Any]:
        """Return views of one tensor."""
        a, b = self.lin(hidden).split(WIDTH, dim=-1)
        return {"a": a, "b": [b]}


class Table(nn.Module):
    """Returns rows, a table that all requests share, and a number."""

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, int]:
        """Return ``[rows, width]``, ``[SHARED]`` and 3."""
        return hidden + 0.25, torch.linspace(0.0, 1.0, SHARED, dtype=torch.float64), 3


class Twins(nn.Module):
    """Returns one tensor twice."""

    def forward(self, hidden: Tensor) -> Pair:
        """Return the argument, which its caller holds too."""
        return Pair(hidden, hidden)


class Layer(nn.Module):
    """A residual layer; its parts share tensors wherever they can."""

    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.norm, self.mix, self.gate = Norm(), Mix(), nn.Identity()
        self.twins, self.act = Twins(), act
        self.mlp = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(
        self, positions: Tensor, hidden: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the next hidden state and residual, ``[rows, width]`` each."""
        hidden, residual = self.norm(hidden, residual)
        mixed = self.mix(hidden)
        hidden = hidden + self.act(self.mlp(hidden))  # the MLP's input goes on beside it
        low, high = self.twins(self.gate(hidden))
        return low * mixed["a"] + mixed["b"][0] + 0.1 * high + 0.01 * positions[:, None], residual


class Toy(nn.Module):
    """Two layers, one activation that both call, and a module that is never called."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        act = nn.Tanh()
        self.embed = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.layers = nn.ModuleList(Layer(act) for _ in range(2))
        self.table = Table()
        self.unused = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.7, generator=generator)
        self.requires_grad_(False)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Run the model; ``[rows, width]`` in and out, ``positions`` ``[rows]``."""
        hidden, residual = self.embed(ids), None
        for layer in self.layers:
            hidden, residual = layer(positions, hidden=hidden, residual=residual)
        rows, table, number = self.table(hidden + residual)
        return rows * table.sum() / number
