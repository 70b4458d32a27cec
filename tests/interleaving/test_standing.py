"""Edits that a loop makes in each step, made in the blocks' place and together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from midstream.interleaving.copies import Rows
from midstream.interleaving.interleaver import Interleaver
from midstream.interleaving.node import Tree
from midstream.interleaving.replays import WriteLog
from midstream.interleaving.run import Run, current_run
from midstream.interleaving.standing import habit_of
from midstream.interleaving.steps import Steps as Loop
from midstream.tracing.forms import Form, Gathering
from tests.interleaving.toy import Toy, rows

STEPS = 6
MLP = "layers.1.mlp"


class Decoding:
    """Requests of one row each, whose blocks loop over steps; the first step is their prompt.

    Attributes:
        turns: by request, the steps in which its block executed the loop's body itself.
        outputs: what the forwards returned.
        logs: what is kept for a preemption.
    """

    def __init__(self, *, standing: bool, model: torch.nn.Module | None = None):
        self.model = (model or Toy()).requires_grad_(False)
        self.tree = Tree(self.model)
        self.interleaver = Interleaver(self.tree.modules)
        self._standing = standing
        self.turns: list[list[int]] = []
        self.outputs: list[torch.Tensor] = []
        self.logs: list[WriteLog] = []
        self.runs: list[Run] = []

    def add(
        self, body: Callable[[Any], None], form: Form | Gathering, which: slice, **names: Any
    ) -> None:
        """Add a request whose block runs a body in some steps, which is what the form says."""
        turns: list[int] = []

        def block() -> None:
            for step in Loop(current_run("steps"))[which]:
                turns.append(run.visit)
                assert step == run.visit
                body(self.tree.root)

        self.logs.append(WriteLog())
        run = Run(block, log=self.logs[-1])
        run.plain, run.code = True, "code"
        run.habit = habit_of(form, names) if self._standing else None
        self.turns.append(turns)
        self.runs.append(run)

    def go(self, *, absent: int | None = None, fails: bool = False, close: bool = True) -> None:
        """Run all steps; one request may have no block in the batch's place that it takes."""
        count = len(self.runs) + (absent is not None)
        places = [i for i in range(count) if i != absent]
        for step in range(STEPS):
            spans = {r: Rows(i, i + 1) for r, i in zip(self.runs, places, strict=True)}
            hidden = torch.cat([rows(1, 10 * step + i) for i in range(count)])
            for run, log in zip(self.runs, self.logs, strict=True):
                run.visit, log.first = step, step
            active = [r for r in self.runs if not r.started or r.awaited is not None]
            active = [r for r in active if r.awaited is None or r.awaited <= step]
            with torch.inference_mode():
                self.interleaver.begin_step([r for r in active if not r.done])
                with self.interleaver.phase(spans, (count,), logged=True):
                    self.outputs.append(self.model(hidden))
                self.interleaver.finish_step()
        for run in self.runs if close else ():
            run.close()
            assert fails or run.error is None


def in_place(root: Any, vector: Any) -> None:
    root.layers[1].output[0][:] += vector


def assigned(root: Any, vector: Any) -> None:
    root.layers[1].output[1][:] = root.layers[1].output[1] * vector


def replaced(root: Any, vector: Any) -> None:
    root.layers[1].mlp.output = root.layers[1].mlp.output - vector


def put(root: Any, vector: Any) -> None:
    root.layers[1].mlp.output[:] = vector


FORMS = {
    "in place": (in_place, Form("in place", "add", "vector", ("vector",), 0)),
    "assigned": (assigned, Form("assigned", "mul", "vector", ("vector",), 1)),
    "replaced": (replaced, Form("replaced", "sub", "vector", ("vector",), None)),
    "put": (put, Form("assigned", "", "vector", ("vector",), None)),
}
Vectors = list[Any]


def both(
    name: str, vectors: Vectors, which: slice = slice(None), absent: int | None = None
) -> tuple[Decoding, Decoding]:
    """The same requests with edits that stand, and with blocks that make each of them."""
    body, form = FORMS[name]
    found = []
    for standing in (True, False):
        at = Decoding(standing=standing)
        for vector in vectors:
            at.add(lambda root, v=vector: body(root, v), form, which, vector=vector)
        at.go(absent=absent)
        found.append(at)
    return found[0], found[1]


def vectors(count: int = 3) -> Vectors:
    """One for each request."""
    return [torch.randn(4, generator=torch.Generator().manual_seed(i)) + 1 for i in range(count)]


@pytest.mark.parametrize("absent", [None, 1])
@pytest.mark.parametrize("name", FORMS)
def test_the_same_as_the_blocks_themselves(name: str, absent: int | None) -> None:
    """All edits are those the blocks would make, bit for bit, also with others' rows between."""
    mine, its = both(name, vectors(), absent=absent)
    assert all(torch.equal(a, b) for a, b in zip(mine.outputs, its.outputs, strict=True))
    assert mine.turns == [[0, 1]] * 3
    assert its.turns == [list(range(STEPS))] * 3
    for a, b in zip(mine.logs, its.logs, strict=True):
        assert a.writes.keys() == b.writes.keys()
        for place in a.writes:
            for one, other in zip(a.writes[place], b.writes[place], strict=True):
                assert one._replace(value=None) == other._replace(value=None)  # type: ignore[arg-type]
                assert torch.equal(one.value, other.value)


def test_each_request_has_its_own_vector() -> None:
    """A vector of one request changes that request's rows, by what a block alone gets."""
    mine, _ = both("in place", vectors())
    for i, vector in enumerate(vectors()):
        others = [v if j == i else torch.zeros(4) for j, v in enumerate(vectors())]
        alone, _ = both("in place", others)
        assert torch.equal(alone.outputs[-1][i], mine.outputs[-1][i])
        assert (alone.outputs[-1] - mine.outputs[-1]).abs().max() > 0.1
        assert vector.abs().max() > 0.1


@pytest.mark.parametrize("which", [slice(1, 4), slice(2, None), slice(0, STEPS), slice(1, 2)])
def test_loops_with_an_end(which: slice) -> None:
    """The last turn of a loop is the block's own, which goes on behind it; no step is left out."""
    mine, its = both("in place", vectors(), which)
    assert all(torch.equal(a, b) for a, b in zip(mine.outputs, its.outputs, strict=True))
    steps = range(STEPS)[which]
    first = [step for step in steps if step in (0, steps[0])]
    learned = next(step for step in [*steps, STEPS] if step and step >= steps[0])
    last = [steps[-1]] if which.stop is not None else []
    expected = sorted({*first, *[s for s in [learned] if s in steps], *last})
    assert mine.turns == [expected] * 3


@pytest.mark.parametrize(
    "mixed",
    [
        [torch.ones(4), torch.ones(4, dtype=torch.float64), 2.0],
        [0.5, 0.5, 3],
        [torch.ones(1, 4), torch.ones(1), torch.tensor(2.0)],
    ],
    ids=["dtypes", "numbers", "shapes"],
)
def test_operands_that_differ_in_kind(mixed: Vectors) -> None:
    """Numbers, dtypes and shapes of several requests do not change each other's arithmetic."""
    mine, its = both("in place", mixed)
    assert all(torch.equal(a, b) for a, b in zip(mine.outputs, its.outputs, strict=True))


def last_entry(root: Any, vector: Any) -> None:
    root.layers[1].mlp.output[0][-1] += vector


def test_the_last_entry_of_a_tensors_row_is_a_number() -> None:
    """What is the last row of a tuple's tensor is one number of a tensor, and no other changes."""
    form = Form("in place", "add", "vector", ("vector",), 0, True)
    results = []
    for standing in (True, False):
        at = Decoding(standing=standing)
        for vector in (2.0, 3.0):
            at.add(lambda root, v=vector: last_entry(root, v), form, slice(None), vector=vector)
        at.go()
        results.append(at.outputs)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("name", ["put", "assigned"])
def test_operands_with_more_axes_than_the_rows(name: str) -> None:
    """What torch puts into rows without them is put there, and no other request fails of it."""
    own = [torch.randn(1, 1, 4), torch.randn(4), torch.randn(1, 4)]
    mine, its = both(name, own)
    assert all(torch.equal(a, b) for a, b in zip(mine.outputs, its.outputs, strict=True))
    assert mine.turns == [[0, 1]] * 3


def test_zeros_of_both_signs() -> None:
    """A request that divides by 0.0 and one that divides by -0.0 get infinities of both signs."""
    form = Form("in place", "div", "vector", ("vector",), None)

    def divided(root: Any, vector: float) -> None:
        root.layers[1].mlp.output[:] /= vector

    results = []
    for standing in (True, False):
        at = Decoding(standing=standing)
        for zero in (0.0, -0.0):
            at.add(lambda root, v=zero: divided(root, v), form, slice(None), vector=zero)
        at.go()
        results.append(at.outputs)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert results[0][-1].isinf().any()


class Held(Toy):
    """Goes on with a tensor that a module returned, and with the same one once more."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Identity()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """As the toy's, and what the first module was given on top."""
        return super().forward(self.first(hidden)) + hidden


def test_an_edit_in_place_beside_a_replacement() -> None:
    """A write in place is in the module's own tensor, whatever another request replaces."""

    def replacing(root: Any, vector: Any) -> None:
        root.first.output = root.first.output + vector

    def writing(root: Any, vector: Any) -> None:
        root.first.output[:] *= vector

    forms = {
        replacing: Form("replaced", "add", "vector", ("vector",), None),
        writing: Form("in place", "mul", "vector", ("vector",), None),
    }
    results = []
    for standing in (True, False):
        at = Decoding(standing=standing, model=Held())
        for body, form in forms.items():
            vector = torch.full((4,), 3.0)
            at.add(lambda root, b=body, v=vector: b(root, v), form, slice(None), vector=vector)
        at.go()
        results.append(at.outputs)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_an_operand_that_is_written_to() -> None:
    """A tensor that somebody changes between the steps is taken as it is then."""
    vector = torch.ones(4)
    body, form = FORMS["in place"]
    results = []
    for standing in (True, False):
        own = vector.clone()
        at = Decoding(standing=standing)
        at.add(lambda root, v=own: body(root, v), form, slice(None), vector=own)

        def change(root: Any, v: torch.Tensor = own) -> None:
            v += 1.0

        at.add(change, form, slice(None), vector="no operand")
        at.go()
        results.append(at.outputs)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert (results[0][-1][0] - results[0][1][0]).abs().max() > 0.1


@pytest.mark.parametrize("extra", [0, 1])
def test_a_loop_that_is_cut_short(extra: int) -> None:
    """The warning counts the turns that were done, also if one more step had been planned."""
    body, form = FORMS["in place"]
    texts = []
    for standing in (True, False):
        at = Decoding(standing=standing)
        at.add(lambda root: body(root, 1.0), form, slice(1, STEPS + 1), vector=1.0)
        at.go(close=False)
        at.runs[0].visit += extra
        at.runs[0].close()
        assert at.runs[0].error is None
        texts.append([notice.message for notice in at.runs[0].output.notices()])
    assert texts[0] == texts[1]
    assert f"asked for {STEPS} steps and the request ran {STEPS - 1} of them" in texts[0][0]
