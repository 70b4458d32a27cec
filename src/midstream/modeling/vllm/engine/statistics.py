"""What an engine counts: steps by kind, and why they were of that kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

VANILLA, EAGER, TAPPED = "vanilla", "eager", "tapped"

_MOST_REASONS = (
    200  # that are told apart; a model has as many locations as it has modules, and more
)
_OTHERS = "a block waits for another location"


class Statistics:
    """Counts of one worker, since its engine was built."""

    def __init__(self) -> None:
        self.steps = Counter({VANILLA: 0, TAPPED: 0, EAGER: 0})
        self.reasons: Counter[str] = Counter()

    def count(self, wanted: Iterable[str], *, tapped: bool = False) -> None:
        """Count a step.

        Args:
            wanted: what the blocks wait for that makes it run without vLLM's compiled graph;
                nothing in a step that runs vLLM's code as it stands.
            tapped: whether it runs as a graph with breaks.
        """
        if tapped:
            self.steps[TAPPED] += 1
            return
        first = next(iter(wanted), None)
        self.steps[VANILLA if first is None else EAGER] += 1
        if first is None:
            return
        reason = f"a block waits for {first}"
        if reason not in self.reasons and len(self.reasons) >= _MOST_REASONS:
            reason = _OTHERS
        self.reasons[reason] += 1

    def report(self, **more: Any) -> dict[str, Any]:
        """The counts, and further facts, as plain data."""
        return {"steps": dict(self.steps), "reasons": dict(self.reasons), **more}
