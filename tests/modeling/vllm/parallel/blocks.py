"""Blocks that use several workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def carrying(scale: float) -> Callable[[Any, Any], Any]:
    """A block that adds what layer 3 gave, scaled, to layer 0 in the step after."""

    def block(model: Any, tracer: Any) -> dict[str, Any]:
        carried, logits, added = None, [], []
        for _ in tracer.iter[:]:
            if carried is not None:
                model.model.layers[0].output[0][:] += scale * carried
                added.append(scale * carried)
            carried = model.model.layers[3].mlp.output[-1:].clone()
            logits.append(model.logits)
        return {"logits": logits, "added": added}

    return block
