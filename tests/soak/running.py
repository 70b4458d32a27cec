"""Drawing requests, running them together, and comparing each with its run alone."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from midstream.modeling.vllm.payloads import segments
from tests.soak import failing, reading, writing
from tests.soak.engines import Counts, held
from tests.soak.kinds import KINDS
from tests.soak.results import Result, difference, result_of
from tests.support.checkpoints import LONG

TABLES = (reading, writing, failing)  # importing them fills `KINDS`
LENGTHS = (3, 31, 63, 90, 150, 220)
SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 1},
    {"temperature": 1.0, "seed": 11},
    {"temperature": 0.7, "seed": 5, "top_k": 20},
    {"temperature": 0.0, "prompt_logprobs": 1},
    {"temperature": 0.8, "seed": 3, "top_p": 0.9, "repetition_penalty": 1.2},
)
TOKENS = (1, 4, 16, 60)
TOGETHER = 16
"""How many are submitted at once; the engine runs eight of them side by side."""


@dataclass(frozen=True)
class Draw:
    """A request: its kind, its prompt's length, its sampling and how many tokens it asks for."""

    kind: str
    length: int
    sampling: int
    tokens: int

    def requests(self, model: Any) -> list[Any]:
        """The requests it captures, most kinds one."""
        ids = [x % 90 + 5 for x in LONG[: self.length]]
        settings = {**SAMPLING[self.sampling], "max_tokens": self.tokens}
        found: list[Any] = KINDS[self.kind].make(model, ids, settings)
        return found


PLAIN = Draw("plain", 3, 0, 1)


def draws(seed: int, count: int) -> list[Draw]:
    """So many requests; each kind comes once before any comes again, slow ones less often."""
    chance, found = random.Random(seed), list[Draw]()
    while len(found) < count:
        round_ = [name for name, kind in KINDS.items() if not kind.slow or chance.random() < 0.5]
        chance.shuffle(round_)
        for name in round_:
            lengths = [length for length in LENGTHS if length <= KINDS[name].most]
            sampling = chance.randrange(len(SAMPLING))
            found.append(Draw(name, chance.choice(lengths), sampling, chance.choice(TOKENS)))
    return found[:count]


@dataclass
class Soak:
    """One engine under the soak.

    Attributes:
        model: the engine, with the edit "halve" installed for those who choose it.
        alone: results of runs alone, by draw; shared by engines of one checkpoint.
        differences: what went wrong, with the draw.
        preempted: how many preemptions there were.
    """

    model: Any
    alone: dict[Draw, list[Result]] = field(default_factory=dict)
    differences: list[str] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)
    preempted: int = 0

    def __post_init__(self) -> None:
        self.counts = Counts(self.model)
        model = self.model
        with model.edit(name="halve") as (tracer, _):
            for _ in tracer.all():
                hidden, residual = model.model.layers[1].output
                hidden *= 0.5
                residual *= 0.5

    def run(self, found: list[Draw]) -> None:
        """Run all draws, several at once, each beside others than alone."""
        for draw in found:
            if draw not in self.alone:
                self.model.vllm_entrypoint.reset_prefix_cache()  # alone, whatever ran before
                self.alone[draw] = self._submit([draw])[0]
        for start in range(0, len(found), TOGETHER):
            group = found[start : start + TOGETHER]
            for draw, results in zip(group, self._submit(group), strict=True):
                self.kinds[draw.kind] += 1
                self._compare(draw, results)
            self._look_for_leftovers()

    def _submit(self, group: list[Draw]) -> list[list[Result]]:
        captured = [draw.requests(self.model) for draw in group]
        flat = [request for requests in captured for request in requests]
        for request in flat:  # without a choice, installed edits run beside every request
            request.settings.setdefault("edits", [])
        self.counts.preempted.clear()
        outcomes = iter(self.model._submit(flat))
        results = [[result_of(next(outcomes)) for _ in requests] for requests in captured]
        self.preempted += len(self.counts.preempted)
        return results

    def _compare(self, draw: Draw, results: list[Result]) -> None:
        for index, (got, right) in enumerate(zip(results, self.alone[draw], strict=True)):
            found = difference(got, right)
            if found:
                times = sum(got.name in name for name in self.counts.preempted)
                self.differences.append(f"{draw} [{index}], preempted {times} times: {found}")

    def _look_for_leftovers(self) -> None:
        self._submit([PLAIN])  # so that workers hear of the last requests' end
        left, files = held(self.model), segments.remaining(self.model._engine._owner)
        if any(count for worker in left for count in worker.values()) or files:
            self.differences.append(f"left behind: {left}, segments {files}")
