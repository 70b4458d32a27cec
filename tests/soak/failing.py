"""Kinds that go wrong, and kinds that abuse what the process shares."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from tests.soak.kinds import traced, with_settings


@traced
def raises(model: Any, tracer: Any) -> None:
    model.model.layers[1].output[0][:] = 0
    raise KeyError("gone")


@traced
def raises_later(model: Any, tracer: Any) -> None:
    for step in tracer.all():
        model.samples
        if step == 2:
            1 / 0


@traced
def wrong_shape(model: Any, tracer: Any) -> None:
    model.model.layers[1].mlp.output = torch.zeros(2, 3)


@traced
def wrong_structure(model: Any, tracer: Any) -> None:
    model.model.layers[1].output = model.model.layers[1].output[0]


@traced
def out_of_order(model: Any, tracer: Any) -> None:
    model.model.layers[2].output
    model.model.layers[1].output


@traced
def caught_and_went_on(model: Any, tracer: Any) -> Any:
    late = model.model.layers[2].output
    try:
        model.model.layers[1].output
    except Exception as error:  # noqa: BLE001
        return [type(error).__name__, late, model.logits]


@traced
def token_outside_the_vocabulary(model: Any, tracer: Any) -> None:
    model.samples[:] = 4711


@traced
def not_called(model: Any, tracer: Any) -> None:
    model.lm_head.output


@traced
def exits(model: Any, tracer: Any) -> None:
    model.logits
    raise SystemExit(3)


@with_settings(slow=True)
def endless(model: Any, tracer: Any) -> None:
    """Goes over the block's time limit."""
    model.model.layers[1].output
    while True:
        pass


@traced
def unpicklable(model: Any, tracer: Any) -> Any:
    model.logits
    return (item for item in [1])


@traced
def nan_everywhere(model: Any, tracer: Any) -> None:
    model.model.layers[1].output[0][:] = float("nan")
    model.logits = torch.zeros(1, 128)
    model.logits[:, 9] = 1.0
    tracer.stop()


@traced
def random_numbers(model: Any, tracer: Any) -> Any:
    """Draws from every generator, and seeds them."""
    found = []
    for _ in tracer.all():
        found.append((random.random(), float(np.random.rand()), float(torch.rand(()))))
        model.samples
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    return len(found)


@traced
def seeded_noise(model: Any, tracer: Any) -> None:
    torch.manual_seed(5)
    for _ in tracer.all():
        hidden = model.model.layers[0].output[0]
        hidden += torch.randn(hidden.shape)


@traced
def modes_left_open(model: Any, tracer: Any) -> Any:
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float64)
    torch.autocast("cpu", torch.bfloat16).__enter__()
    torch.inference_mode(True).__enter__()
    model.model.layers[1].output
    return torch.zeros(1).dtype == torch.float64
