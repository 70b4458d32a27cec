"""The rows of the GPU benchmark: what each is, what it is compared with, and its aim."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from benchmarks.measuring import Cell

Kind = Literal["share", "times", "rate", "added", "held", "time"]
FIRST = 0.80
"""Aim of the first run of a block that decodes, which learns and captures, as a share of plain."""


@dataclass(frozen=True)
class Row:
    """One row.

    Attributes:
        title: what is run; sizes in braces.
        base: what plain vLLM does beside it.
        kind: what is told: "share" of plain vLLM's tokens per second, "times" its time, "rate" of
            returned bytes, time "added" to its, bytes "held", or the "time" alone.
        aims: by requests at a time; 0 stands for any number.
        decodes: whether its first run has an aim.
    """

    title: str
    base: str
    kind: Kind
    aims: Mapping[int, float] = field(default_factory=dict)
    decodes: bool = False

    def aim(self, cell: Cell) -> float | None:
        """The aim of a measurement; None if it has none."""
        if cell.run == "first":
            return FIRST if self.decodes else None
        return self.aims.get(cell.requests, self.aims.get(0))


def _decoding(title: str, *aims: float) -> Row:
    return Row(title, "decode", "share", dict(zip((1, 8, 64), aims, strict=False)), decodes=True)


ROWS: Mapping[str, Row] = {
    "idle": Row("engine of ours, no trace", "decode", "share", {1: 0.99, 8: 0.99, 64: 0.99}),
    "one-layer": _decoding("one layer read each step and returned", 0.92, 0.90, 0.85),
    "all-layers": _decoding("all layers read each step and returned", 0.88, 0.80, 0.50),
    "steer": _decoding("one layer steered, a vector for each request", 0.92, 0.90, 0.88),
    "cache": _decoding("all layers through `tracer.cache`", 0.88, 0.85, 0.75),
    "lens": _decoding("logit lens at one layer each step", 0.85),
    "half": Row(
        "half of the batch reads one layer: the plain requests", "half", "share", {0: 0.90}
    ),
    "prompt": Row(
        "{medium}-token prompt, one token, one layer and logits returned",
        "medium",
        "times",
        {0: 1.25},
    ),
    "save": Row("{long}-token prompt, all layers returned", "long", "rate", {0: 3.0}),
    "many": Row("{many} prompts, one token each, one layer returned", "many", "times", {0: 1.3}),
    "poisson": Row(
        "requests come and leave at random, half read one layer: a step",
        "arrivals",
        "share",
        {0: 0.80},
    ),
    "data": Row("the layer read is chosen by the last drawn token's parity", "decode", "time"),
    "memory": Row("graphs of one set of locations, at so many batch sizes", "", "held", {0: 0.3}),
    "build": Row("engine build, a second one in the process", "build", "added", {0: 3.0}),
}
"""Rows by id, the most important first: a run that is out of time has those."""
