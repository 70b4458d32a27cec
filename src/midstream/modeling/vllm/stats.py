"""What `model.stats()` gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Stats:
    """What an engine has done since it was built, and what it holds.

    Attributes:
        steps: how many steps ran, by kind: "vanilla", vLLM's code as it stands; "eager", without
            its compiled graph, because a block was inside the forward; "tapped", as a CUDA graph
            with breaks where blocks are known to go.
        eager_reasons: how many eager steps there were for each reason: the first location that a
            block waited for, or module that it recorded.
        graphs: of the CUDA graphs with breaks: "captures", "replays", "wrong_guesses" (a block
            asked for what the graph had no break for, and the step ran again eagerly),
            "evictions", "held" and "bytes"; empty in an engine without them.
        block_seconds: time that blocks have taken on the forward thread.
        live_blocks: requests whose block the engine holds.
        live_caches: caches (`tracer.cache()`) that are being recorded.
        shared_segments: shared memory written for this process that it has not received.
    """

    steps: Mapping[str, int] = field(
        default_factory=lambda: {"vanilla": 0, "tapped": 0, "eager": 0}
    )
    eager_reasons: Mapping[str, int] = field(default_factory=dict)
    graphs: Mapping[str, int] = field(default_factory=dict)
    block_seconds: float = 0.0
    live_blocks: int = 0
    live_caches: int = 0
    shared_segments: int = 0

    @classmethod
    def of(cls, ranks: Sequence[Mapping[str, Any]], shared_segments: int) -> Stats:
        """Bring the ranks' answers together: all run the same steps, and hold their own."""
        first = ranks[0]
        return cls(
            steps=first["steps"],
            eager_reasons=first["reasons"],
            graphs=first["graphs"],
            block_seconds=first["seconds"],
            live_blocks=max(rank["blocks"] for rank in ranks),
            live_caches=max(rank["caches"] for rank in ranks),
            shared_segments=shared_segments,
        )
