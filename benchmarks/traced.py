"""The rows of the GPU benchmark on midstream's engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from benchmarks import blocks
from benchmarks.arrivals import Flow, Schedule, run_traced
from benchmarks.measuring import Cell, Recorder
from benchmarks.shapes import Scale


class Traced:
    """Measures rows, each by the method of its id.

    Args:
        model: midstream's `VLLM`, with its engine up.
        recorder: takes the times.
        scale: sizes.
    """

    def __init__(self, model: Any, recorder: Recorder, scale: Scale):
        self.model, self.recorder, self.scale = model, recorder, scale
        layers = model.model.layers
        self.count = len(layers)
        self.middle, self.early, self.late = (
            layers[self.count // 2],
            layers[self.count // 4],
            layers[3 * self.count // 4],
        )
        self.other = layers[self.count // 2 - 1]  # one that no other row reads

    def idle(self) -> None:
        """No trace."""
        for count in self.scale.batches:
            prompts, settings = self.scale.prompts(count), self.scale.greedy()

            def work(prompts: Any = prompts, settings: Any = settings) -> None:
                self.model.generate(prompts, **settings)

            self.recorder.measure("idle", count, work, base="decode", steps=self.scale.tokens)

    def one_layer(self) -> None:
        """One layer is read in each step, and returned."""
        self._decoding("one-layer", blocks.read_one, self.middle)

    def all_layers(self) -> None:
        """All layers are."""
        self._decoding("all-layers", blocks.read_all)

    def cache(self) -> None:
        """All layers are, through a cache."""
        self._decoding("cache", blocks.record_all)

    def steer(self) -> None:
        """One layer is changed by a vector of each request's own."""
        for count in self.scale.batches:
            vectors = self._vectors(count)
            self._decode_once("steer", count, blocks.steer, (self.middle,), (vectors,))

    def lens(self) -> None:
        """A logit lens at one layer, one request."""
        self._decode_once("lens", 1, blocks.lens, (self.middle,))

    def data(self) -> None:
        """Tokens choose the layer. They are drawn: greedy ones of random weights repeat."""
        for count in self.scale.batches:
            self._follow(count, self.scale.prompts(count))

    def _follow(self, count: int, prompts: list[list[int]]) -> None:
        answers: list[Any] = []
        block = blocks.fresh(blocks.follow)
        settings = {**self.scale.greedy(), "temperature": 1.0}

        def work() -> dict[str, Any]:
            rows, drawn = block(self.model, self.early, self.late, prompts, settings)
            answers[:] = (rows, drawn) if count == 1 else (rows[0], drawn[0])
            return {"bytes": size(rows)}

        self._measure("data", count, work)
        if answers:
            self.recorder.results.cells[-1].facts["note"] = self._judge(prompts[0], *answers)
            self.recorder.flush()

    def _judge(self, prompt: list[int], rows: list[Any], drawn: list[int]) -> str:
        """Compare what a request read with both layers of its text, run as one prompt."""
        text = prompt + drawn[:-1]
        pair = blocks.read_pair(self.model, self.early, self.late, text, self.scale.greedy(1))
        odd = [False] * len(prompt) + [token % 2 == 1 for token in drawn[:-1]]
        asked = torch.tensor(odd)[:, None]
        right = torch.where(asked, pair[1], pair[0]).float()
        wrong = torch.where(asked, pair[0], pair[1]).float()
        read = torch.cat(list(rows)).float()
        near, far = (torch.cosine_similarity(read, each, dim=-1) for each in (right, wrong))
        verdict = "right" if bool((near > far).all()) and float(near.min()) > 0.98 else "WRONG"
        return (
            f"{verdict}: cosine with the layer asked for {near.min():.4f} or more, with the other "
            f"{far.max():.4f} or less; {sum(odd)} of {len(odd)} rows from the later one"
        )

    def half(self) -> None:
        """Half of the largest batch is traced; what counts is when the plain ones are done."""
        count = self.scale.batches[-1]
        schedule = Schedule.together(count, self.scale.tokens)
        capture = blocks.fresh(blocks.capture_reads)

        def work() -> dict[str, Any]:
            flow = run_traced(self.model, self.middle, schedule, self.scale, capture)
            return plain_time(flow, schedule)

        self._measure("half", count, work, base="half")

    def poisson(self) -> None:
        """Requests come and leave at random, half of them traced."""
        schedule, capture = Schedule.poisson(self.scale), blocks.fresh(blocks.capture_reads)

        def work() -> dict[str, Any]:
            flow = run_traced(self.model, self.middle, schedule, self.scale, capture)
            return step_time(flow)

        count = self.scale.in_flight
        self._measure("poisson", count, work, base="arrivals", steps=1)

    def prompt(self) -> None:
        """One layer and the logits of a prompt."""
        (prompt,) = self.scale.prompts(1, self.scale.medium)
        block, settings = blocks.fresh(blocks.read_prompt), self.scale.greedy(1)

        def work() -> dict[str, Any]:
            return {"bytes": size(block(self.model, self.middle, prompt, settings))}

        self._measure("prompt", 1, work, base="medium", steps=1, repeats=self.scale.medium_repeats)

    def save(self) -> None:
        """All layers of long prompts."""
        for count in self.scale.long_batches:
            prompts = self.scale.prompts(count, self.scale.long)
            block = blocks.fresh(blocks.read_stacks)

            def work(block: Any = block, prompts: Any = prompts) -> dict[str, Any]:
                return {"bytes": size(block(self.model, prompts, self.scale.greedy(1)))}

            self._measure("save", count, work, base="long", steps=1)

    def many(self) -> None:
        """One layer of many prompts."""
        prompts, block = self.scale.prompts(self.scale.many), blocks.fresh(blocks.read_prompts)

        def work() -> dict[str, Any]:
            return {"bytes": size(block(self.model, self.middle, prompts, self.scale.greedy(1)))}

        self._measure("many", self.scale.many, work, base="many", steps=1)

    def memory(self) -> None:
        """Graphs of one set of locations at several batch sizes."""
        before, block = counts(self.model), blocks.fresh(blocks.read_one)
        for count in self.scale.sizes:
            for _ in range(2):
                block(self.model, self.other, self.scale.prompts(count), self.scale.greedy(4))
        after = counts(self.model)
        cell = Cell("memory", len(self.scale.sizes))
        if "graph bytes" in after:
            cell.facts["held"] = after["graph bytes"] - before["graph bytes"]
        else:
            cell.error = "not counted: `model.stats()` has no graphs"
        self.recorder.add(cell)

    def _decoding(self, row: str, function: Callable[..., Any], *given: Any) -> None:
        for count in self.scale.batches:
            self._decode_once(row, count, function, given)

    def _decode_once(
        self,
        row: str,
        count: int,
        function: Callable[..., Any],
        given: tuple[Any, ...],
        more: tuple[Any, ...] = (),
    ) -> None:
        block, prompts = blocks.fresh(function), self.scale.prompts(count)

        def work() -> dict[str, Any]:
            values = block(self.model, *given, prompts, *more, self.scale.greedy())
            return {"bytes": size(values)}

        self._measure(row, count, work)

    def _measure(self, row: str, count: int, work: Any, **how: Any) -> None:
        how = {"base": "decode", "steps": self.scale.tokens, **how}
        self.recorder.measure(row, count, work, keeps_first=True, **how)

    def _vectors(self, count: int) -> list[torch.Tensor]:
        config = self.model.vllm_entrypoint.llm_engine.vllm_config.model_config
        drawn = torch.Generator().manual_seed(3)
        width = config.get_hidden_size()
        return [torch.randn(width, generator=drawn).to(config.dtype) for _ in range(count)]


def plain_time(flow: Flow, schedule: Schedule) -> dict[str, Any]:
    """When the last request without a block was done."""
    return {"seconds": max(flow.ended[i] for i, yes in enumerate(schedule.traced) if not yes)}


def step_time(flow: Flow) -> dict[str, Any]:
    """Time of a step while requests still came, and how many ran."""
    seconds = flow.last_arrival / flow.steps_until_last
    return {"seconds": seconds, "note": f"{flow.mean_running:.1f} in flight on average"}


def size(value: Any) -> int:
    """Bytes of the tensors in what a trace returned."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, list | tuple):
        return sum(map(size, value))
    if hasattr(value, "visits"):  # a cache
        return sum(size(module.output) for module in value.values())
    return 0


def counts(model: Any) -> dict[str, float]:
    """What the engine counts: steps by kind, and its graphs if it has any."""
    stats = model.stats()
    found = {f"{kind} steps": float(number) for kind, number in stats.steps.items()}
    graphs = getattr(stats, "graphs", None)
    if dataclasses.is_dataclass(graphs):
        graphs = vars(graphs)
    if isinstance(graphs, Mapping):
        known = {name: number for name, number in graphs.items() if isinstance(number, int | float)}
        found |= {f"graph {name.replace('_', ' ')}": float(n) for name, n in known.items()}
    return found
