"""What tests of running forwards share: a toy's steps, and the same values without instruments."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.interleaving.toy import Steps, Toy, rows


@pytest.fixture(params=["first step", "later step"])
def steps(request: Any) -> Steps:
    """Steps of a toy, before or after the order of its modules is known."""
    steps = Steps()
    if request.param == "later step":
        steps.step([rows(2, 7)], [lambda: steps.root.layers[0].output])
    return steps


def right(x: torch.Tensor, edits: dict[tuple[int, str], Any] | None = None) -> Any:
    """The toy's logits and the values inside its layers, computed without instruments."""
    model, edits, seen = Toy().requires_grad_(False), edits or {}, []
    hidden, residual = x, None
    for index, layer in enumerate(model.layers):
        total = hidden if residual is None else residual + hidden
        total = edits.get((index, "total"), lambda v: v)(total)
        tanh = edits.get((index, "tanh"), lambda v: v)(torch.tanh(total))
        mlp = edits.get((index, "mlp"), lambda v: v)(layer.mlp(tanh))
        seen.append({"total": total, "tanh": tanh, "mlp": mlp})
        hidden, residual = mlp, total
    return model.head((hidden + residual)[-1:]), seen
