"""Forwards with breaks at the locations that blocks of known code visit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from midstream.errors import OutOfOrderError
from midstream.interleaving.copies import Rows
from midstream.interleaving.interleaver import Interleaver
from midstream.interleaving.locations import LOGITS, Location
from midstream.interleaving.node import Node, Tree
from midstream.interleaving.recording import open_cache
from midstream.interleaving.routes import MOST_WRONG
from midstream.interleaving.run import Run, current_run
from midstream.interleaving.steps import Steps as Loop
from midstream.interleaving.tapped import Missed, Tapped
from tests.interleaving.toy import Toy, rows
from tests.support.recorders import PlainRecorder

STEPS = 5
Body = Callable[["Decoding"], None]


def steps() -> Any:
    """The steps of the block's request after its first."""
    return Loop(current_run("steps"))[1:]


class Decoding:
    """Requests of several steps, two rows each; forwards are tapped where there is a guess.

    Attributes:
        kinds: of each step, "eager", "tapped" or "again".
        breaks: of each step, how many there were.
        outputs: what the forwards returned, [rows, width] a step.
        logits: what the head returned.
    """

    uses_source = False

    def __init__(self, *, tapped: bool, model: torch.nn.Module | None = None):
        self.model = (model or Toy()).requires_grad_(False)
        self.tree = Tree(self.model)
        self.root: Node = self.tree.root
        self.interleaver = Interleaver(self.tree.modules)
        self._tapped = tapped
        self.kinds: list[str] = []
        self.breaks: list[int] = []
        self.outputs: list[torch.Tensor] = []
        self.logits: list[torch.Tensor] = []

    def run(self, *bodies: Body, count: int = STEPS) -> list[Run]:
        """Run requests with a block each to their end, side by side; errors stay on the runs."""
        runs = [Run(lambda body=body: body(self)) for body in bodies]
        for run, body in zip(runs, bodies, strict=True):
            run.code, run.uses_source = body.__qualname__, self.uses_source
        for step in range(count):
            self._step([run for run in runs if self._enters(run, step)], runs, step)
        for run in runs:
            run.close()
        return runs

    def _enters(self, run: Run, step: int) -> bool:
        run.visit = step
        waits = not run.started or (run.awaited is not None and run.awaited <= step)
        return not run.done and (waits or bool(run.recorders))

    def _step(self, active: list[Run], runs: list[Run], step: int) -> None:
        spans = {run: Rows(2 * i, 2 * i + 2) for i, run in enumerate(runs) if run in active}
        hidden = torch.cat([rows(2, 10 * step + i) for i in range(len(runs))])
        with torch.inference_mode():
            self.interleaver.begin_step(active)
            guess = self.interleaver.tapping.guess(active) if self._tapped and step else None
            out = (
                self._eager(spans, hidden) if guess is None else self._replay(guess, spans, hidden)
            )
            self.outputs.append(out)
            with self.interleaver.phase(spans, (len(hidden),)):
                logits = self.model.head(out)
            self.logits.append(
                self.interleaver.hand_over(LOGITS, logits, spans, (len(hidden),)).clone()
            )
            self.interleaver.finish_step()

    def _eager(self, spans: dict[Run, Rows], hidden: torch.Tensor, kind: str = "eager") -> Any:
        self.kinds.append(kind)
        with self.interleaver.phase(spans, (len(hidden),), logged=True):
            return self.model(hidden)

    def _replay(self, guess: Any, spans: dict[Run, Rows], hidden: torch.Tensor) -> Any:
        recorder, tapped = PlainRecorder(), Tapped(self.interleaver, guess.needs)
        try:
            with self.interleaver.tapping.phase(tapped, spans, (len(hidden),), [hidden]):
                found = recorder.run(tapped, self.model.forward, {"hidden": hidden})
                tapped.finish()
            self.kinds.append("tapped")
            self.breaks.append(recorder.breaks)
            return found
        except Missed:
            self.interleaver.tapping.run_again(guess.needs)
            return self._eager(spans, hidden, "again")


def compared(
    *bodies: Callable[[list[Any]], Body], model: Callable[[], torch.nn.Module] = Toy
) -> Decoding:
    """The same blocks with and without taps: what they keep and what the model returns is equal.

    Args:
        bodies: each gives a block that appends what it has seen to a list.
    """
    seen: dict[bool, list[list[Any]]] = {}
    found: dict[bool, Decoding] = {}
    for tapped in (False, True):
        decoding = found[tapped] = Decoding(tapped=tapped, model=model())
        kept: list[list[Any]] = [[] for _ in bodies]
        runs = decoding.run(*(body(one) for body, one in zip(bodies, kept, strict=True)))
        assert [run.error for run in runs] == [None] * len(runs)
        seen[tapped] = kept
    assert set(found[False].kinds) == {"eager"}
    for mine, its in zip(seen[True], seen[False], strict=True):
        assert len(mine) == len(its) > 0
        for a, b in zip(mine, its, strict=True):
            assert torch.equal(a, b)
    for mine, its in (
        (found[True].outputs, found[False].outputs),
        (found[True].logits, found[False].logits),
    ):
        assert all(torch.equal(a, b) for a, b in zip(mine, its, strict=True))
    return found[True]


def test_a_known_block_runs_beside_a_recorded_forward() -> None:
    """From its second later step on what a block reads is kept, and the forward never breaks."""

    def reading(kept: list[Any]) -> Body:
        def body(at: Decoding) -> None:
            for _ in steps():
                kept.extend(at.root.layers[1].output)
                kept.append(at.root.layers[2].mlp.output)

        return body

    found = compared(reading)
    assert found.kinds == ["eager", "eager", "tapped", "tapped", "tapped"]
    assert found.breaks == [0, 0, 0]


def test_the_code_is_known_to_the_next_request() -> None:
    """A second request of the same code needs no step to learn from."""

    def body(at: Decoding) -> None:
        for _ in steps():
            at.root.layers[1].output

    at = Decoding(tapped=True)
    at.run(body)
    at.kinds.clear()
    at.run(body)
    assert at.kinds == ["eager", "tapped", "tapped", "tapped", "tapped"]


def test_a_sweep_is_waited_for() -> None:
    """The same code at one place is prepared for at once; at many, when they have come again."""
    at = Decoding(tapped=True)
    routes = at.interleaver.tapping.routes
    found = []
    for index in (0, 0, 1, 2):

        def body(at: Decoding, index: int = index) -> None:
            for _ in steps():
                at.root.layers[index].output

        at.run(body)
        guess = routes.guess({body.__qualname__})
        assert guess is not None
        found.append((len(guess.needs.locations), guess.patience))
    assert found == [(1, 1), (1, 1), (2, 2), (3, 3)]


def test_edits_land_and_stay_with_their_request() -> None:
    """What a block writes in place at a break changes its own rows, as by hand (B9)."""

    def steering(kept: list[Any]) -> Body:
        def body(at: Decoding) -> None:
            for _ in steps():
                at.root.layers[0].output[1][:] += 3.0
                kept.append(at.root.layers[1].mlp.output)

        return body

    def reading(kept: list[Any]) -> Body:
        def body(at: Decoding) -> None:
            for _ in steps():
                kept.append(at.root.layers[1].mlp.output)

        return body

    found = compared(steering, reading)
    assert found.kinds[2:] == ["tapped"] * 3
    clean = Decoding(tapped=True)
    clean.run(reading([]), reading([]))
    for mine, its in zip(found.outputs[1:], clean.outputs[1:], strict=True):
        assert torch.equal(mine[2:], its[2:])
        assert (mine[:2] - its[:2]).abs().max() > 0.1


class Sharing(torch.nn.Module):
    """A residual stream whose holders are several: the normalised copy must not touch it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = torch.nn.LayerNorm(4)
        self.head = torch.nn.Linear(4, 6)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[rows, width]`` to the same."""
        return self.norm(hidden) + 2 * hidden


def test_a_replaced_input_leaves_its_other_holders() -> None:
    """A break where the model goes on with another tensor has one of its own to go on with."""

    def replacing(kept: list[Any]) -> Body:
        def body(at: Decoding) -> None:
            for _ in steps():
                at.root.norm.input = at.root.norm.input * 0 + torch.arange(4.0)
                kept.append(at.root.norm.output)

        return body

    found = compared(replacing, model=Sharing)
    assert found.kinds == ["eager", "eager", "tapped", "tapped", "tapped"]
    right = found.model.norm(torch.arange(4.0)) + 2 * torch.cat([rows(2, 40)])
    assert torch.allclose(found.outputs[-1], right, atol=1e-6)
    assert (right - found.model.norm(torch.arange(4.0)) - 2 * torch.arange(4.0)).abs().max() > 0.1


def test_a_replacement_that_was_not_known() -> None:
    """A block that has read so far, and now replaces, has the forward run again."""

    def turning(kept: list[Any]) -> Body:
        def body(at: Decoding) -> None:
            for step in steps():
                value = at.root.norm.input
                kept.append(value)
                if step >= 3:
                    at.root.norm.input = value + 5
                kept.append(at.root.norm.output)

        return body

    found = compared(turning, model=Sharing)
    assert found.kinds == ["eager", "eager", "tapped", "again", "tapped"]


@pytest.mark.parametrize("late", ["read", "skip", "source", "outer"])
def test_a_wrong_guess_is_served_right(late: str) -> None:
    """A block that asks for something else gets it; what was written before is written again."""

    def turning(kept: list[Any]) -> Body:
        def body(at: Decoding) -> None:
            layers = at.root.layers
            for step in steps():
                layers[0].output[1][:] *= 2.0
                kept.append(layers[1].mlp.output)
                if step != 3:
                    continue
                if late == "read":
                    layers[2].mlp.output[:] += 1
                elif late == "skip":
                    layers[2].skip((torch.ones(2, 4), torch.ones(2, 4)))
                elif late == "source":
                    kept.append(layers[2].mlp.source.F_linear_0.output)
                else:
                    kept.extend(layers[1].output)

        return body

    def steering(kept: list[Any]) -> Body:
        def body(at: Decoding) -> None:
            for _ in steps():
                at.root.layers[0].output[0][:] += 1.0
                at.root.layers[1].mlp.output = at.root.layers[1].mlp.output + 1
                kept.append(at.root.layers[2].output[1])

        return body

    found = compared(turning, steering)
    assert found.kinds[:4] == ["eager", "eager", "tapped", "again"]
    after = "tapped" if late in ("read", "outer") else "eager"
    assert found.kinds[4] == after


def test_a_block_that_is_often_wrong_stays_eager() -> None:
    """After some wrong guesses there are none any more, and the block is still served right."""

    def wandering(kept: list[Any]) -> Body:
        def body(at: Decoding) -> None:
            places = [*at.root.layers, *(layer.mlp for layer in at.root.layers)]
            for step in steps():
                at.root.layers[0].input
                value = places[step % len(places)].output
                kept.append(value if isinstance(value, torch.Tensor) else value[1])

        return body

    found = compared(wandering)
    assert "again" in found.kinds
    at = Decoding(tapped=True)

    def erratic(at: Decoding) -> None:
        at.root.layers[0].output
        for _ in steps():
            at.root.layers[0].output

    at.run(erratic)
    for _ in range(MOST_WRONG):
        at.interleaver.tapping.routes.count_wrong(erratic.__qualname__)
    at.kinds.clear()
    at.run(erratic)
    assert set(at.kinds) == {"eager"}


def test_caches_are_filled_once_a_step() -> None:
    """A cache has one value a step, also where a wrong guess makes the forward run again."""

    def caching(kept: list[Any]) -> Body:
        def body(at: Decoding) -> None:
            cache = open_cache(
                current_run("a cache"),
                at.tree,
                ["layers.0.mlp", "layers.2.mlp"],
                {"sides": frozenset({"output"})},
            )
            for step in steps():
                at.root.layers[0].mlp.output[:] += 1
                if step == 3:
                    kept.append(at.root.layers[1].mlp.output)
            for path in ("layers.0.mlp", "layers.2.mlp"):
                kept.append(torch.cat(cache.visits[path]["output"]))
                assert len(cache.visits[path]["output"]) == STEPS

        return body

    assert compared(caching).kinds == ["eager", "eager", "tapped", "again", "tapped"]


def test_what_has_passed_is_refused() -> None:
    """A location before the break a block stands at is refused, and no forward runs again."""

    def body(at: Decoding) -> None:
        for step in steps():
            at.root.layers[1].output
            if step == 3:
                at.root.layers[0].mlp.output

    at = Decoding(tapped=True)
    (run,) = at.run(body)
    assert isinstance(run.error, OutOfOrderError)
    assert at.kinds[:4] == ["eager", "eager", "tapped", "tapped"]


def test_an_error_is_its_blocks_alone() -> None:
    """A block that raises at a break ends; the others are served on."""

    def failing(at: Decoding) -> None:
        for step in steps():
            at.root.layers[1].output
            if step == 3:
                raise ValueError("mine")

    kept: list[torch.Tensor] = []

    def reading(at: Decoding) -> None:
        for _ in steps():
            kept.append(at.root.layers[2].output[1])

    at = Decoding(tapped=True)
    first, second = at.run(failing, reading)
    assert isinstance(first.error, ValueError)
    assert second.error is None
    assert len(kept) == STEPS - 1
    assert at.kinds == ["eager", "eager", *["tapped"] * 3]


def test_locations_behind_the_forward_need_no_break() -> None:
    """A block that waits for the head alone leaves the forward as it is."""
    seen: list[bool] = []

    def body(at: Decoding) -> None:
        for _ in steps():
            at.root.head.output

    at = Decoding(tapped=True)
    begin = at.interleaver.begin_step

    def watched(*args: Any, **kwargs: Any) -> None:
        begin(*args, **kwargs)
        seen.append(at.interleaver.wants_modules)

    at.interleaver.begin_step = watched  # type: ignore[method-assign]
    at.run(body)
    assert seen == [False, True, False, False, False]
    assert at.interleaver.order.is_behind_forward(Location("head", "output"))


class Calling(torch.nn.Module):
    """Calls one module several times, and reads its argument in two places."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shared, self.between, self.late = (torch.nn.Linear(4, 4) for _ in range(3))
        self.norm, self.head = torch.nn.LayerNorm(4), torch.nn.Linear(4, 6)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[rows, width]`` to the same."""
        found = self.between(self.shared(hidden))
        found = self.late(self.shared(found)) + self.norm(hidden)
        return self.shared(found) + hidden


def test_a_module_that_is_called_again_is_recorded_again() -> None:
    """A cache has every call of a module, also where a wrong guess comes between two of them."""

    def caching(kept: list[Any]) -> Body:
        def body(at: Decoding) -> None:
            sides = {"sides": frozenset({"output"})}
            cache = open_cache(current_run("a cache"), at.tree, ["shared"], sides)
            for step in steps():
                at.root.between.input
                if step == 3:
                    kept.append(at.root.between.output)
            kept.extend(cache.visits["shared"]["output"])
            assert len(kept) == 1 + 3 * STEPS

        return body

    assert "again" in compared(caching, model=Calling).kinds


def test_an_edited_argument_of_the_forward_begins_as_it_was() -> None:
    """What a block wrote into the forward's own argument is not there when it runs again."""

    def turning(kept: list[Any]) -> Body:
        def body(at: Decoding) -> None:
            for step in steps():
                at.root.norm.input[:] += 1
                if step == 3:
                    kept.append(at.root.norm.output)

        return body

    assert "again" in compared(turning, model=Calling).kinds


def test_only_who_asked_for_more_has_guessed_wrong() -> None:
    """A block that was served as expected does not count as wrong beside one that was not."""

    def wandering(at: Decoding) -> None:
        places = [layer.mlp for layer in at.root.layers]
        for step in steps():
            at.root.layers[0].input
            places[min(step - 1, 2)].output

    def reading(at: Decoding) -> None:
        for _ in steps():
            at.root.layers[2].output

    at = Decoding(tapped=True)
    at.run(wandering, wandering, reading)
    routes = at.interleaver.tapping.routes
    assert routes.of(wandering.__qualname__).wrong == at.kinds.count("again") > 0
    assert routes.of(reading.__qualname__).wrong == 0


class Filling(torch.nn.Module):
    """Writes into its second argument, and returns nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, hidden: torch.Tensor, out: torch.Tensor) -> None:
        """Fill ``out``, ``[rows, width]``."""
        out.copy_(self.linear(hidden))


class Filled(torch.nn.Module):
    """Calls a module that writes into what it is given."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.head = Filling(), torch.nn.Linear(4, 6)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[rows, width]`` to the same."""
        out = torch.zeros_like(hidden)
        self.inner(hidden, out)
        return out + hidden


def test_a_replacement_leaves_the_other_arguments_as_they_are() -> None:
    """Beside a replaced argument, one that the module is to write into is still the caller's."""

    def replacing(kept: list[Any]) -> Body:
        def body(at: Decoding) -> None:
            for step in steps():
                (hidden, out), _ = at.root.inner.inputs
                at.root.inner.input = hidden + step
                if step == 4:
                    at.root.inner.inputs = ((hidden, out + 1), {})
                kept.append(at.root.output)

        return body

    assert compared(replacing, model=Filled).kinds[2:] == ["tapped", "tapped", "again"]


class Tied(Toy):
    """Calls one module at the beginning and at the end, on different values."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = torch.nn.Linear(4, 4)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """As the toy's, between two calls."""
        return self.twice(super().forward(self.twice(hidden)))  # type: ignore[no-any-return]


def test_a_module_that_runs_twice() -> None:
    """A block is given what the first call returned, wherever the forward is by then."""

    def reading(kept: list[Any]) -> Body:
        def body(at: Decoding) -> None:
            for _ in steps():
                kept.append(at.root.twice.output)
                kept.append(at.root.layers[1].mlp.output)

        return body

    found = compared(reading, reading, model=Tied)
    assert found.kinds[2:] == ["tapped"] * (STEPS - 2)
