"""Requests that come while others run, and when they are done.

The synchronous API submits the requests of a trace together and returns when all are done. Here an
engine's own loop is driven, so that requests come at given steps and each one's end is seen. The
clock of arrivals is the engine's steps: any engine then has the same load, and time tells how
fast it bears it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import blocks
from benchmarks.shapes import Scale


@dataclass(frozen=True)
class Schedule:
    """Requests by the step they come in, ascending.

    Attributes:
        due: the step each comes in.
        lengths: how many tokens each is answered with.
        traced: whether each has a block, where blocks are run.
    """

    due: tuple[int, ...]
    lengths: tuple[int, ...]
    traced: tuple[bool, ...]

    @classmethod
    def together(cls, count: int, tokens: int) -> Schedule:
        """All at once, every second one with a block."""
        return cls((0,) * count, (tokens,) * count, tuple(i % 2 == 0 for i in range(count)))

    @classmethod
    def poisson(cls, scale: Scale) -> Schedule:
        """Requests that come at random, with answers of random length, in balance from the start.

        Lengths are exponential: those of the first requests, which are halfway, look like all.
        """
        drawn, mean = random.Random(5), scale.tokens
        count = scale.in_flight + scale.arrivals
        at, due = 0.0, [0] * scale.in_flight
        for _ in range(scale.arrivals):
            at += drawn.expovariate(scale.in_flight / mean)
            due.append(int(at))
        most = 4 * mean
        lengths = [min(most, 1 + int(drawn.expovariate(1 / mean))) for _ in range(count)]
        return cls(tuple(due), tuple(lengths), tuple(drawn.random() < 0.5 for _ in range(count)))


class Flow:
    """One run of a schedule: lets requests in and notes what happens when.

    Args:
        schedule: what comes.
        add: submits the request of a number and gives the id it has.
        step: makes a step of the engine and gives what finished in it.
    """

    def __init__(
        self, schedule: Schedule, add: Callable[[int], str], step: Callable[[], list[Any]]
    ):
        self._schedule, self._add, self._make = schedule, add, step
        self._numbers: dict[str, int] = {}
        self._running = self._steps = self._seen = 0
        self.ended: dict[int, float] = {}
        self.start = self.last_arrival = 0.0
        self.steps_until_last = 1
        self.mean_running = 0.0

    @property
    def has_more(self) -> bool:
        """Whether requests are to come."""
        return len(self._numbers) < len(self._schedule.due)

    def begin(self) -> None:
        """Let in what comes first."""
        self.start = time.perf_counter()
        self._let_in()

    def step(self) -> list[Any]:
        """Make a step, then let in who is due; if nobody runs any more, whoever is next."""
        outputs = self._make()
        self._steps += 1
        self._seen += self._running
        for output in outputs:
            if output.finished and output.request_id in self._numbers:
                self.ended[self._numbers[output.request_id]] = time.perf_counter() - self.start
                self._running -= 1
        self._let_in()
        return outputs

    def _let_in(self) -> None:
        came = self.has_more
        while self.has_more:
            number = len(self._numbers)
            if self._schedule.due[number] > self._steps and self._running:
                break
            self._numbers[self._add(number)] = number
            self._running += 1
        if came and not self.has_more:
            self.last_arrival = time.perf_counter() - self.start
            self.steps_until_last = max(1, self._steps)
            self.mean_running = self._seen / self.steps_until_last


def run_plain(llm: Any, schedule: Schedule, scale: Scale) -> Flow:
    """A schedule on plain vLLM, nobody with a block."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    core, prompts = llm.llm_engine, scale.prompts(len(schedule.due))

    def add(number: int) -> str:
        params = SamplingParams(**scale.greedy(schedule.lengths[number]))
        params.output_kind = RequestOutputKind.FINAL_ONLY
        core.add_request(str(number), {"prompt_token_ids": prompts[number]}, params)
        return str(number)

    flow = Flow(schedule, add, core.step)
    flow.begin()
    while flow.has_more or core.has_unfinished_requests():
        flow.step()
    return flow


def run_traced(model: Any, layer: Any, schedule: Schedule, scale: Scale, capture: Any) -> Flow:
    """A schedule on an engine with blocks: those that are traced read a layer in each step."""
    submissions = _submissions(model, layer, schedule, scale, capture)
    model.dispatch()
    engine = model._engine
    admit, make = engine._add_all, engine._step
    waiting: list[Any] = []

    def begin(_: Sequence[Any], commons: Any) -> None:
        waiting.append(commons)
        flow.begin()

    def add(number: int) -> str:
        admit([submissions[number]], waiting[0])
        return next(reversed(engine._outcomes))

    flow = Flow(schedule, add, make)
    engine._add_all, engine._step = begin, flow.step  # on this instance, for this run
    try:
        engine.run(submissions)
    finally:
        del engine._add_all, engine._step
    return flow


def _submissions(
    model: Any, layer: Any, schedule: Schedule, scale: Scale, capture: Any
) -> list[Any]:
    from midstream.modeling.vllm.data import Request

    prompts = scale.prompts(len(schedule.due))
    settings = [scale.greedy(length) for length in schedule.lengths]
    chosen = [number for number, traced in enumerate(schedule.traced) if traced]
    tracer = (capture or blocks.capture_reads)(
        model, layer, [prompts[i] for i in chosen], [settings[i] for i in chosen]
    )
    requests = dict(zip(chosen, tracer._requests, strict=True))
    plain = (Request({"prompt_token_ids": p}, s) for p, s in zip(prompts, settings, strict=True))
    params: dict[int, Any] = {}
    return [
        model._submission(requests.get(number, request), params)
        for number, request in enumerate(plain)
    ]
