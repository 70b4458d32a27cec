"""Names of the places where a block can meet a forward pass."""

from __future__ import annotations

from typing import NamedTuple


class Location(NamedTuple):
    """One side of one module, or one of the engine's own hand-overs.

    ``path`` is the module's dotted path below the model's root ("" is the root itself);
    ``side`` is "input" or "output" for modules, "logits" or "samples" for the engine.
    An operation inside a forward has a path such as "model.layers.0.mlp.source.self_act_fn_0", and
    ``within`` is the path of what the forward belongs to; None for all else.
    """

    path: str
    side: str
    within: str | None = None

    @property
    def name(self) -> str:
        """The location as users write it."""
        return ".".join(part for part in ("model", self.path, self.side) if part)

    def label(self, visit: int) -> str:
        """The location as errors show it, with the visit counted from the block's start."""
        return f"{self.name}.i{visit}"


SKIP = "skip"
"""Side of the place where a block waits to have its value taken for a module's output."""

LOGITS = Location("", "logits")
SAMPLES = Location("", "samples")

ENGINE_ORDER = {LOGITS: 1 << 40, SAMPLES: (1 << 40) + 1}
"""Position of the engine's own hand-overs: after every module of the forward."""
