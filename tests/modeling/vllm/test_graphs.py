"""Decode steps that run as recorded forwards: which are kept, and that blocks see no difference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from midstream.errors import InterventionError
from midstream.interleaving.interleaver import Interleaver
from midstream.interleaving.locations import Location
from midstream.interleaving.routes import Guess, Needs, Routes
from midstream.interleaving.tapped import Tapped
from midstream.modeling.vllm.engine.graphs import Recorded, TappedGraphs
from midstream.modeling.vllm.limits import Limits
from tests.conftest import record_steps
from tests.modeling.vllm.conftest import runner_of
from tests.support.checkpoints import A

GREEDY = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}


def needs(*paths: str, replaced: tuple[str, ...] = ()) -> Needs:
    """Outputs of modules, some of them replaced."""
    places = frozenset(Location(path, "output") for path in paths)
    return Needs(places, frozenset((Location(path, "output"), 0) for path in replaced))


class Recording:
    """Counts what is recorded; every recording holds 10 bytes."""

    def __init__(self) -> None:
        self.made: list[tuple[Any, Needs]] = []
        self.fails = False

    def serves(self, shape: Any) -> bool:
        """Whether there can be one for a shape."""
        return bool(shape != "prefill")

    def __call__(self, shape: Any, tapped: Tapped) -> Recorded:
        """Record nothing."""
        if self.fails:
            raise RuntimeError("no memory")
        self.made.append((shape, tapped.needs))
        return Recorded(lambda forward, inputs: None, 10)


def graphs(record: Recording, most: int = 8, most_bytes: float = 1e9) -> TappedGraphs:
    """Graphs of a model without modules."""
    return TappedGraphs(lambda found: Tapped(Interleaver({}), found), record, most, most_bytes)


def test_what_is_missing_is_captured_after_the_step() -> None:
    """The first step of a shape and its needs finds nothing; the next one finds a graph."""
    record = Recording()
    kept = graphs(record)
    assert kept.find(4, Guess(needs("a"))) is None
    kept.capture()
    found = kept.find(4, Guess(needs("a")))
    assert found is not None
    assert found.tapped.needs == needs("a")
    assert record.made == [(4, needs("a"))]
    kept.capture()
    assert len(record.made) == 1
    assert kept.find(8, Guess(needs("a"))) is None
    assert kept.counts.captures == kept.counts.held == 1


def test_a_graph_with_more_breaks_may_serve() -> None:
    """A graph serves what needs no more than it offers; without a buffer it serves no replacing."""
    kept = graphs(Recording())
    kept.find(4, Guess(needs("a", "b")))
    kept.capture()
    assert kept.find(4, Guess(needs("b"))) is not None
    assert kept.find(4, Guess(needs("b", replaced=("b",)))) is None
    assert kept.find(4, Guess(needs("b", "c"))) is None


def test_a_step_that_did_not_end_captures_nothing() -> None:
    """What a failed step looked for is forgotten."""
    record = Recording()
    kept = graphs(record)
    kept.find(4, Guess(needs("a")))
    kept.forget_wish()
    kept.capture()
    assert record.made == []


@pytest.mark.parametrize("bound", [{"most": 2}, {"most_bytes": 25}])
def test_the_graph_that_ran_longest_ago_goes(bound: dict[str, int]) -> None:
    """Above the number or the bytes allowed, the least recently used graph makes room."""
    kept = graphs(Recording(), **bound)
    for path in "ab":
        kept.find(4, Guess(needs(path)))
        kept.capture()
    kept.find(4, Guess(needs("a")))
    kept.find(4, Guess(needs("c")))
    kept.capture()
    counts = kept.counts
    assert (counts.captures, counts.evictions, counts.held, counts.bytes) == (3, 1, 2, 20)
    assert [kept.find(4, Guess(needs(path))) is not None for path in "abc"] == [True, False, True]


def test_what_cannot_be_captured_is_not_tried_again() -> None:
    """Blocks whose forward cannot be recorded stay eager, and the engine goes on."""
    record = Recording()
    record.fails = True
    kept = graphs(record)
    kept.find(4, Guess(needs("a")))
    kept.capture()
    record.fails = False
    assert kept.find(4, Guess(needs("a"))) is None
    kept.capture()
    assert record.made == []
    assert kept.find("prefill", Guess(needs("b"))) is None
    kept.capture()
    assert record.made == []


def test_what_keeps_changing_is_waited_for() -> None:
    """A guess that has changed often is captured when it has been asked for as often."""
    kept = graphs(Recording())
    for _ in range(3):
        assert kept.find(4, Guess(needs("a"), patience=3)) is None
        assert kept.counts.captures == 0
        kept.capture()
    assert kept.find(4, Guess(needs("a"), patience=3)) is not None
    assert kept.find(4, Guess(needs("b"))) is None
    kept.capture()
    assert kept.counts.captures == 2


def test_limits_of_graphs() -> None:
    """No graphs at all can be asked for, a negative number of them not."""
    assert Limits(max_graphs=0).max_graphs == 0
    with pytest.raises(ValueError, match="max_graphs=-1"):
        Limits(max_graphs=-1)


@pytest.fixture
def recorded(llama: Any) -> Iterator[Any]:
    """The shared engine with recorded steps, and none recorded yet."""
    runner = runner_of(llama)
    before = runner.graphs
    record_steps(llama)
    runner.blocks.interleaver.tapping.routes = Routes()
    yield llama
    runner.graphs = before


def stream(model: Any, token_ids: list[int], **settings: Any) -> Any:
    """The third layer's stream of each step behind the prompt, edited one layer before."""
    with model.trace(token_ids, **{**GREEDY, **settings}) as tracer:
        rows = [].save()
        for _ in tracer.iter[1:]:
            model.model.layers[1].mlp.output[:] *= 2
            rows.append(sum(model.model.layers[2].output))
    return rows, list(tracer.result.outputs[0].token_ids)


def test_recorded_steps_give_what_eager_ones_do(llama: Any, recorded: Any) -> None:
    """Reads, edits and tokens are equal, bit for bit; the steps are counted as tapped."""
    runner = runner_of(llama)
    kept, runner.graphs = runner.graphs, None
    right, tokens = stream(llama, A)
    with llama.trace(A, **GREEDY) as clean:
        pass
    runner.graphs = kept
    before = recorded.stats().steps["tapped"]
    for _ in range(2):
        rows, found = stream(recorded, A)
        assert found == tokens
        assert [torch.equal(a, b) for a, b in zip(rows, right, strict=True)] == [True] * 7
    assert tokens != list(clean.result.outputs[0].token_ids)
    stats = recorded.stats()
    assert stats.steps["tapped"] - before == 6 + 7  # the first step looks for a graph in vain
    assert stats.graphs["captures"] == 1
    assert stats.graphs["wrong_guesses"] == 0


def test_a_block_that_chooses_by_the_token(recorded: Any) -> None:
    """A location that depends on the data is served right, whatever was guessed."""

    def chosen() -> list[Any]:
        with recorded.trace(A, **GREEDY) as tracer:
            found = [].save()
            token = 0
            for _ in tracer.iter[1:]:
                found.append((token % 2, sum(recorded.model.layers[token % 2].output)))
                token = int(recorded.samples)
        return found

    runner = runner_of(recorded)
    kept, runner.graphs = runner.graphs, None
    right = chosen()
    runner.graphs = kept
    assert {side for side, _ in right} == {0, 1}
    for _ in range(2):
        for (side, row), (its, other) in zip(chosen(), right, strict=True):
            assert side == its
            assert torch.equal(row, other)
    assert recorded.stats().steps["tapped"] > 0


def test_plain_requests_beside_a_recorded_step(recorded: Any) -> None:
    """A request without a block that shares recorded steps has its own tokens."""
    plain = recorded.generate([A, A[:3]], **GREEDY)
    alone = [list(output.outputs[0].token_ids) for output in plain]
    for _ in range(2):
        with recorded.trace() as tracer:
            with tracer.invoke(A, **GREEDY):
                for _ in tracer.iter[1:]:
                    recorded.model.layers[0].output[0][:] = 0
            with tracer.invoke(A[:3], **GREEDY):
                pass
        found = [list(output.outputs[0].token_ids) for output in tracer.result]
        assert found[1] == alone[1]
        assert found[0] != alone[0]
    after = recorded.generate([A], **GREEDY)
    assert list(after[0].outputs[0].token_ids) == alone[0]


def test_a_block_that_fails_in_a_recorded_step(recorded: Any) -> None:
    """Its request ends with its error; the next one is served by the same recording."""

    def failing(late: int) -> list[Any]:
        with recorded.trace(A, **GREEDY) as tracer:
            rows = [].save()
            for step in tracer.iter[1:]:
                rows.append(recorded.model.layers[1].output[0])
                if step == late:
                    raise KeyError("mine")
        return rows

    failing(99)
    with pytest.raises(InterventionError, match="mine"):
        failing(4)
    captures = recorded.stats().graphs["captures"]
    assert len(failing(99)) == 7
    assert recorded.stats().graphs["captures"] == captures


def test_an_edited_position_beside_a_wrong_guess(recorded: Any) -> None:
    """Where a step runs again, the layers before an edit of the positions see them unedited."""

    def shifting() -> tuple[list[Any], list[int]]:
        with recorded.trace(A, **GREEDY) as tracer:
            rows = [].save()
            for step in tracer.iter[1:]:
                recorded.model.layers[1].inputs[0][0][:] += 3
                if step == 4:
                    rows.append(recorded.model.layers[2].mlp.input)
                rows.append(recorded.model.layers[2].output[0])
        return rows, list(tracer.result.outputs[0].token_ids)

    runner = runner_of(recorded)
    kept, runner.graphs = runner.graphs, None
    right, tokens = shifting()
    runner.graphs = kept
    runner.blocks.interleaver.tapping.routes = Routes()
    rows, found = shifting()
    assert runner.graphs.counts.wrong_guesses == 1
    assert found == tokens
    assert all(torch.equal(a, b) for a, b in zip(rows, right, strict=True))
