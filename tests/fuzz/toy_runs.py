"""Requests on the toy: through `interleaving`, and by hooks."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from midstream.interleaving.copies import Rows
from midstream.interleaving.interleaver import Interleaver
from midstream.interleaving.node import Tree
from midstream.interleaving.run import Run, current_run
from midstream.interleaving.steps import Steps
from tests.fuzz.dialects import Midstream
from tests.fuzz.grammar import Statement, render
from tests.fuzz.hooked import Hooked
from tests.fuzz.programs import Outcome, predicted_block, traced_block
from tests.fuzz.toy import WIDTH, Toy

VECTOR = torch.linspace(-1.0, 1.0, WIDTH, dtype=torch.float64)


@dataclass(frozen=True)
class Request:
    """A request on the toy.

    Attributes:
        rows: how many rows its first step has; later ones have one.
        steps: how many steps it has.
        body: its block; None for a plain one.
    """

    rows: int
    steps: int
    body: tuple[Statement, ...] | None

    def inputs(self, index: int) -> list[tuple[Tensor, Tensor]]:
        """What each step runs: ``[rows, width]`` and positions ``[rows]``."""
        generator = torch.Generator().manual_seed(100 + index)
        counts = [self.rows, *[1] * (self.steps - 1)]
        starts = [0, *range(self.rows, self.rows + self.steps)]
        return [
            (
                torch.randn(count, WIDTH, dtype=torch.float64, generator=generator),
                torch.arange(start, start + count),
            )
            for count, start in zip(counts, starts, strict=False)
        ]

    def names(self, index: int) -> dict[str, Any]:
        """What the block finds outside itself."""
        x = self.inputs(index)[0][0]
        return {"X": x * 0.3, "V": VECTOR, "Z": torch.zeros_like(x)}


class _Tracer:
    """What `tracer` is in a block on the toy."""

    @property
    def iter(self) -> Steps:
        return Steps(current_run("iter"))

    def stop(self) -> None:
        current_run("stop").stop()


class Playing:
    """Requests side by side on one toy, through `interleaving`.

    Args:
        requests: in the order of their rows.
        learned: whether an earlier step has shown the order of modules.
    """

    def __init__(self, requests: Sequence[Request], *, learned: bool):
        self._requests = requests
        self._tree = Tree(Toy())
        self._model = self._tree.root._module
        self._interleaver = Interleaver(self._tree.modules)
        if learned:
            run = Run(lambda: self._tree.root.layers[0].output and None)
            x, positions = requests[0].inputs(0)[0]
            self._forward({run: Rows(0, len(x))}, x, positions)
        self.outcomes = [Outcome() for _ in requests]
        self._runs = [self._run(i, request) for i, request in enumerate(requests)]

    def _run(self, index: int, request: Request) -> Run | None:
        if request.body is None:
            return None
        outcome = self.outcomes[index]
        names = request.names(index) | {"kept": outcome.kept, "caught": outcome.caught}
        names |= {"model": self._tree.root, "tracer": _Tracer()}
        say = Midstream("kept['{0}'] = {1}")
        run = Run(traced_block(request.body, names, say, "def block():"))
        run.uses_source = ".source." in "\n".join(render(request.body, say))  # as the engine tells
        return run

    def _forward(self, spans: dict[Run, Rows], x: Tensor, positions: Tensor) -> Tensor:
        with torch.inference_mode():
            self._interleaver.begin_step(list(spans))
            with self._interleaver.phase(spans, (len(x),)):
                out = self._model(x, positions)
            self._interleaver.finish_step()
        return out

    def play(self) -> list[Outcome]:
        """Run all steps of all requests."""
        given = [request.inputs(i) for i, request in enumerate(self._requests)]
        for step in range(max(request.steps for request in self._requests)):
            self._step(step, given)
        for run, outcome in zip(self._runs, self.outcomes, strict=True):
            if run is not None:
                run.close()
                outcome.error = None if run.error is None else type(run.error).__name__
                outcome.stopped = None if run.stopped is None else run.stopped.keeps_token
        assert all("forward" not in module.__dict__ for module in self._model.modules())
        return self.outcomes

    def _step(self, step: int, given: list[list[tuple[Tensor, Tensor]]]) -> None:
        parts, spans, places, start = [], {}, {}, 0
        for index, run in enumerate(self._runs):
            if step >= len(given[index]) or self._ended(run):
                continue
            parts.append(given[index][step])
            rows = Rows(start, start + len(parts[-1][0]))
            places[index], start = rows, rows.stop
            if run is not None and not run.done:
                run.visit = step
                if not run.started or (run.awaited is not None and run.awaited <= step):
                    spans[run] = rows
        if not parts:
            return
        x, positions = (torch.cat(part) for part in zip(*parts, strict=True))
        out = self._forward(spans, x, positions)
        for index, rows in places.items():
            self.outcomes[index].outputs.append(out[rows.start : rows.stop])

    @staticmethod
    def _ended(run: Run | None) -> bool:
        return run is not None and run.done and (run.error is not None or run.stopped is not None)


def predicted(request: Request, index: int) -> Outcome:
    """What hooks on a toy of its own say the request must give."""
    outcome, model = Outcome(), Toy()
    if request.body is None:
        outcome.outputs = [model(*given) for given in request.inputs(index)]
        return outcome
    plain = copy.deepcopy(model)
    block = predicted_block(request.body, request.names(index), outcome)
    run = Hooked(model, block, lambda path, *args: plain.get_submodule(path)(*args))
    with torch.no_grad():
        for x, positions in request.inputs(index):
            run.begin(len(x))
            outcome.outputs.append(model(x.clone(), positions.clone()))
            run.end()
            if run.error is not None or run.stopped is not None:
                break
        run.close()
    outcome.error = None if run.error is None else type(run.error).__name__
    outcome.stopped = run.stopped
    return outcome


def close(got: Any, right: Any) -> bool:
    """Whether two saved values are the same, but for the last bits of a float64."""
    if isinstance(right, torch.Tensor) and isinstance(got, torch.Tensor):
        if got.shape != right.shape or got.dtype != right.dtype:
            return False
        tolerance = 1e-4 if got.dtype == torch.float32 else 1e-8
        return torch.allclose(got, right, rtol=tolerance, atol=tolerance, equal_nan=True)
    return type(got) is type(right) and (right is None or got == right)
