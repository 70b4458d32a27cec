"""What a block writes lands whoever writes beside it, and whatever it caught before."""

from __future__ import annotations

import pytest
import torch

from midstream.interleaving.copies import Rows
from midstream.interleaving.events import Event
from midstream.interleaving.node import Node
from tests.interleaving.toy import Steps, Toy, rows


class Twofold(torch.nn.Module):
    """Goes on with its argument beside what a module made of it."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.table, self.twins = torch.nn.Linear(4, 4), Table(), Twins()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum, scaled by a table's."""
        one, other = self.twins(x + self.mlp(x))
        rows, table = self.table(one + 2 * other)
        return rows * table.sum()


class Twins(torch.nn.Module):
    """Returns its argument twice."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both."""
        return x, x


class Table(torch.nn.Module):
    """Returns rows and a table that all requests share."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both."""
        return x + 1, torch.arange(7.0)


@pytest.fixture
def steps() -> Steps:
    """A toy whose first layer has a residual stream of its own."""
    torch.manual_seed(3)
    model = Toy()
    model.layers[0].mlp = Twofold()
    return Steps(model)


def double_in_place(mlp: Node) -> None:
    mlp.input[:] *= 2


def assign_zeros(mlp: Node) -> None:
    mlp.input = torch.zeros_like(mlp.input)


def assign_and_double(mlp: Node) -> None:
    mlp.input = mlp.input + 1
    mlp.input[:] *= 2


BLOCKS = [double_in_place, assign_zeros, assign_and_double]


@pytest.mark.parametrize("other", BLOCKS)
@pytest.mark.parametrize("one", BLOCKS)
def test_writes_of_several_blocks_in_one_tensor(steps: Steps, one: object, other: object) -> None:
    """A block's write reaches the tensor's other holders, or not, whatever its neighbour does."""
    mlp, parts = steps.root.layers[0].mlp.mlp, [rows(3, 1), rows(2, 2)]
    blocks = [lambda: one(mlp), lambda: other(mlp)]
    alone = [steps.step([x], [block]) for x, block in zip(parts, blocks, strict=True)]
    assert not torch.allclose(alone[0], steps.step(parts[:1], [lambda: None]), atol=1e-3)
    torch.testing.assert_close(steps.step(parts, blocks), torch.cat(alone))


def test_a_write_in_shared_memory_beside_a_replacement(steps: Steps) -> None:
    """Tensors that share memory are changed together, also where a neighbour replaces them."""
    twins, parts = steps.root.layers[0].mlp.twins, [rows(3, 1), rows(2, 2)]

    def replace() -> None:
        twins.output = (torch.zeros(3, 4), torch.ones(3, 4))

    blocks = [replace, lambda: twins.output[0].zero_()]
    alone = [steps.step([x], [block]) for x, block in zip(parts, blocks, strict=True)]
    torch.testing.assert_close(steps.step(parts, blocks), torch.cat(alone))


def test_a_write_behind_a_refused_one_lands(steps: Steps) -> None:
    """A block that catches the error of a write is still where it wrote, and may write again."""
    table, caught = steps.root.layers[0].mlp.table, []

    def block() -> None:
        try:
            table.output[1].zero_()
            steps.root.layers[1].output
        except ValueError:
            caught.append(1)
        table.output[0].zero_()
        steps.root.layers[2].output

    def right() -> None:
        table.output[0].zero_()

    got = steps.step([rows(3, 1)], [block])
    assert caught == [1]
    assert torch.equal(got, steps.step([rows(3, 1)], [right]))


@pytest.mark.parametrize("ends", [False, True])
def test_writes_beside_a_refused_one_land(steps: Steps, ends: bool) -> None:
    """Of several writes to a value the refused one is an error, and the others are made."""
    table = steps.root.layers[0].mlp.table

    def block() -> None:
        kept, shared = table.output
        shared.zero_()
        kept.zero_()
        if not ends:
            steps.root.layers[1].output

    got, runs = steps.try_step([rows(3, 1)], [block])
    assert isinstance(runs[0].error, ValueError)
    right = steps.step([rows(3, 1)], [lambda: table.output[0].zero_()])
    assert torch.equal(got, right)


def test_a_block_that_catches_every_refusal_does_not_hold_the_step(steps: Steps) -> None:
    """A block that makes a refused write again and again is ended, and the step goes on."""
    table, caught = steps.root.layers[0].mlp.table, []

    def block() -> None:
        while True:
            try:
                table.output[1].zero_()
                steps.root.layers[1].output
            except ValueError:
                caught.append(1)

    got, runs = steps.try_step([rows(3, 1)], [block])
    assert isinstance(runs[0].error, ValueError)
    assert 10 < len(caught) < 1000
    assert torch.equal(got, steps.step([rows(3, 1)], [lambda: None]))


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("change", ["transposed", "resized", "other memory"])
def test_a_copy_of_another_shape_is_its_blocks_error(beside: bool, change: str) -> None:
    """A copy that no longer fits fails its block alone, though all edits are written together."""
    steps, seen = Steps(), []

    def misshapen() -> None:
        value = steps.root.layers[1].mlp.output
        if change == "transposed":
            value.t_()
        elif change == "resized":
            value.resize_(1, 3)
        else:
            value.data = torch.zeros(3, 3)
        steps.root.layers[2].mlp.output

    def doubling() -> None:
        steps.root.layers[1].mlp.output[:] *= 2
        seen.append(steps.root.layers[2].mlp.output)

    inputs = [rows(2, 0), rows(2, 1), rows(2, 2)]
    blocks = [doubling, misshapen, misshapen if beside else doubling]
    _, runs = steps.try_step(inputs, blocks)
    assert [type(run.error) for run in runs[:2]] == [type(None), RuntimeError]
    assert isinstance(runs[2].error, RuntimeError) is beside
    steps.step([rows(2, 0)], [doubling])
    assert torch.equal(seen[0], seen[-1])


@pytest.mark.parametrize("requests", [1, 2, 3])
def test_a_copy_that_was_given_other_memory_is_written(requests: int) -> None:
    """What a block put into its copy with `.data` reaches the model, however many others do so."""
    steps = Steps()

    def replacing() -> None:
        value = steps.root.layers[1].mlp.output
        value.data = torch.full((2, 4), 7.0)
        assert bool((steps.root.layers[2].inputs[1]["hidden"] == 7).all())

    steps.step([rows(2, place) for place in range(requests)], [replacing] * requests)


def test_a_neighbour_does_not_change_the_order_of_writes(steps: Steps) -> None:
    """Of leaves that share memory the later one counts, whichever a neighbour has written."""
    twins, seen = steps.root.layers[0].mlp.twins, []

    def writing_the_second() -> None:
        twins.output[1][:] = 3.0
        steps.root.layers[0].mlp.output

    def writing_both() -> None:
        one, other = twins.output
        one[:], other[:] = 1.0, 2.0
        seen.append(steps.root.layers[0].mlp.output)

    steps.step([rows(2, 1)], [writing_both])
    steps.step([rows(2, 0), rows(2, 1)], [writing_the_second, writing_both])
    assert torch.equal(*seen)


def test_an_edit_that_cannot_be_written_is_its_blocks_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where writing all edits together fails, they are written one by one, and one may fail."""
    steps, seen, write = Steps(), [], Event._write

    def failing(event: Event, index: int, span: Rows, value: torch.Tensor) -> None:
        if span.stop > 4:
            raise MemoryError("none left")
        write(event, index, span, value)

    def doubling() -> None:
        steps.root.layers[1].mlp.output[:] *= 2
        seen.append(steps.root.layers[2].mlp.output)

    steps.step([rows(2, 0)], [doubling])
    monkeypatch.setattr(Event, "_write", failing)
    _, runs = steps.try_step([rows(2, place) for place in range(3)], [doubling] * 3)
    assert [type(run.error) for run in runs] == [type(None), type(None), MemoryError]
    assert len(seen) == 3
    assert torch.equal(seen[0], seen[1])
