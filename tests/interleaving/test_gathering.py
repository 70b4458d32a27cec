"""Values that a loop appends in each step, read in the blocks' place and together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from midstream.errors import LimitExceededError
from midstream.interleaving.snapshots import Snapshots
from midstream.tracing.forms import READ, Gathering
from tests.interleaving.test_standing import STEPS, Decoding
from tests.interleaving.toy import Toy

Read = Callable[[Any], Any]


class Nested(torch.nn.Module):
    """Returns tuples in a tuple, an empty list, and a tensor that is not of the step's rows."""

    def forward(self, hidden: torch.Tensor) -> Any:
        """``[rows, width]`` to a nested value."""
        return (hidden + 1.0, hidden * 2.0), [], {"of all": hidden[:1]}, torch.arange(64.0)


class Odd(Toy):
    """A toy with a module whose value is nested."""

    def __init__(self) -> None:
        super().__init__()
        self.nested = Nested()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """As the toy's."""
        self.nested(hidden)
        return super().forward(hidden)


READS: dict[str, tuple[Read, str]] = {
    "a tensor": (lambda root: root.layers[1].mlp.output, f"{READ}(root.layers[1].mlp, None)"),
    "an item of a tuple": (lambda root: root.layers[1].output[1], f"{READ}(root.layers[1], 1)"),
    "a row of a tensor": (
        lambda root: root.layers[1].mlp.output[-1],
        f"{READ}(root.layers[1].mlp, -1)",
    ),
    "a tuple": (lambda root: root.layers[1].output, f"{READ}(root.layers[1], None)"),
    "a nested value": (lambda root: root.nested.output, f"{READ}(root.nested, None)"),
    "a tuple in a tuple": (lambda root: root.nested.output[0], f"{READ}(root.nested, 0)"),
    "an empty list": (lambda root: root.nested.output[1], f"{READ}(root.nested, 1)"),
    "a tensor of all": (lambda root: root.nested.output[-1], f"{READ}(root.nested, -1)"),
    "several": (
        lambda root: [root.nested.output[0], (root.layers[0].mlp.output[0], root.layers[1].output)],
        f"[{READ}(root.nested, 0), ({READ}(root.layers[0].mlp, 0), {READ}(root.layers[1], None))]",
    ),
}


def added(at: Decoding, read: Read, source: str, which: slice = slice(None)) -> list[Any]:
    """The list that a request of its own appends to."""
    rows: list[Any] = []
    form = Gathering("rows", source)
    at.add(lambda root: rows.append(read(root)), form, which, rows=rows, root=at.tree.root)
    return rows


def run_all(*reads: tuple[Read, str], standing: bool) -> tuple[Decoding, list[list[Any]]]:
    """Requests that each append something else, run to their end."""
    at = Decoding(standing=standing, model=Odd())
    lists = [added(at, *read) for read in reads]
    at.go()
    return at, lists


@pytest.mark.parametrize("name", READS)
def test_the_same_as_the_blocks_themselves(name: str) -> None:
    """Whatever structure a value has, what is appended is what the block would have appended."""
    (mine, found), (its, expected) = (
        run_all(READS[name], READS["a tensor"], READS[name], standing=standing)
        for standing in (True, False)
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert [len(rows) for rows in found] == [STEPS] * 3
    assert mine.turns == [[0, 1]] * 3
    assert its.turns == [list(range(STEPS))] * 3
    assert [_kinds(each) for each in found[0]] == [_kinds(each) for each in expected[0]]


def _kinds(value: Any) -> Any:
    """The types of a nested value."""
    if isinstance(value, tuple | list):
        return type(value), [_kinds(item) for item in value]
    return type(value)


def test_readers_of_one_place_do_not_see_each_others_changes() -> None:
    """Requests that read different parts of one value have rows of their own."""
    names = ["a tuple", "an item of a tuple", "a tuple"]
    _, (first, second, third) = run_all(*(READS[name] for name in names), standing=True)
    _, (_, its, others) = run_all(*(READS[name] for name in names), standing=False)
    for pair in first:
        for part in pair:
            part.fill_(7.0)
    torch.testing.assert_close((second, third), (its, others), rtol=0, atol=0)


def test_a_place_that_is_read_twice_counts_once() -> None:
    """A block holds as much as it would have held, had it read a place and a part of it itself."""
    source = f"({READ}(root.layers[1], None), {READ}(root.layers[1], 1))"
    found = []
    for standing in (True, False):
        at = Decoding(standing=standing, model=Odd())
        added(at, lambda root: (root.layers[1].output, root.layers[1].output[1]), source)
        at.runs[0].snapshots = Snapshots(1 << 20)
        at.go()
        found.append(at.runs[0].snapshots._bytes)
    assert found[0] == found[1] > 0


def test_values_that_all_requests_share_count_too() -> None:
    """A tensor without a row a token is the block's own copy, and counts in what it holds."""
    read, source = READS["a tensor of all"]
    errors: list[tuple[int, str]] = []
    for standing in (True, False):
        at = Decoding(standing=standing, model=Odd())
        rows = added(at, read, source)
        at.runs[0].snapshots = Snapshots(1100)  # four copies of 64 numbers, and little else
        at.go(fails=True)
        assert isinstance(at.runs[0].error, LimitExceededError)
        errors.append((len(rows), "max_snapshot_bytes=1100" in str(at.runs[0].error)))
    assert all(named for _, named in errors)
    assert 2 <= errors[1][0] <= errors[0][0] <= 4


def test_a_part_of_a_nested_value_counts_as_long_as_it_is_kept() -> None:
    """The limit is met by what a list keeps of values whose other parts are dropped at once."""
    read, source = READS["a tuple in a tuple"]
    at = Decoding(standing=True, model=Odd())
    rows = added(at, read, source)
    at.runs[0].snapshots = Snapshots(32 * 4 + 256)  # four steps of two rows, and the other tensor
    at.go(fails=True)
    assert isinstance(at.runs[0].error, LimitExceededError)
    assert 2 <= len(rows) < STEPS
