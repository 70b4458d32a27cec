"""A toy model and a driver: steps of an interleaver without an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from midstream.interleaving.copies import Rows
from midstream.interleaving.interleaver import Interleaver
from midstream.interleaving.locations import LOGITS
from midstream.interleaving.node import Node, Tree
from midstream.interleaving.run import Run


class Layer(torch.nn.Module):
    """Returns a pair, and rewrites the residual in place as fused kernels do."""

    def __init__(self, width: int):
        super().__init__()
        self.mlp = torch.nn.Linear(width, width)

    def forward(
        self, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add the hidden state into the residual in place, and go on from the sum."""
        residual = hidden.clone() if residual is None else residual.add_(hidden)
        return self.mlp(torch.tanh(residual)), residual


class Toy(torch.nn.Module):
    """Three layers and a head over flat rows."""

    def __init__(self, width: int = 4, vocab: int = 6):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(Layer(width) for _ in range(3))
        self.head = torch.nn.Linear(width, vocab)
        self.unused = torch.nn.Linear(width, width)
        self.register_buffer("table", torch.arange(5.0))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Run the layers; ``[rows, width]`` to ``[rows, width]``."""
        residual = None
        positions = torch.arange(len(hidden))
        for layer in self.layers:
            hidden, residual = layer(positions, hidden=hidden, residual=residual)
        return hidden + residual


class Steps:
    """Drives an interleaver over a toy model: several blocks in one step, each with its rows."""

    def __init__(self, model: Toy | None = None):
        self.model = (model or Toy()).requires_grad_(False)
        self.tree = Tree(self.model)
        self.root: Node = self.tree.root
        self.interleaver = Interleaver(self.tree.modules)

    def step(
        self, inputs: Sequence[torch.Tensor], blocks: Sequence[Callable[[], None]]
    ) -> torch.Tensor:
        """One step: each block beside its input's rows. Block errors are raised."""
        out, runs = self.try_step(inputs, blocks)
        for run in runs:
            if run.error is not None:
                raise run.error
        return out

    def try_step(
        self, inputs: Sequence[torch.Tensor], blocks: Sequence[Callable[[], None]]
    ) -> tuple[torch.Tensor, list[Run]]:
        """One step; block errors stay on the runs. Inputs without a block ride along."""
        runs = [Run(block) for block in blocks]
        spans, start = {}, 0
        for index, rows in enumerate(inputs):
            if index < len(runs):
                spans[runs[index]] = Rows(start, start + len(rows))
            start += len(rows)
        heads = {run: Rows(index, index + 1) for index, run in enumerate(runs)}
        with torch.inference_mode():
            self.interleaver.begin_step(runs)
            with self.interleaver.phase(spans, (start,)):
                hidden = self.model(torch.cat(list(inputs)))
            ends = torch.tensor([len(rows) for rows in inputs]).cumsum(0) - 1
            with self.interleaver.phase(heads, (len(inputs),)):
                logits = self.model.head(hidden[ends])
            logits = self.interleaver.hand_over(LOGITS, logits, heads, (len(inputs),))
            self.interleaver.finish_step()
        return logits, runs


def rows(count: int, seed: int) -> torch.Tensor:
    """Random input rows ``[count, 4]``."""
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))
