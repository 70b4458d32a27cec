"""`module.skip(value)` beside a toy model: what runs, what comes out, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from midstream.errors import OutOfOrderError
from midstream.interleaving.interleaver import Interleaver
from tests.interleaving.toy import Steps, rows

Block = Callable[[], Any]


@pytest.fixture
def steps() -> Steps:
    """A driver whose order of modules is known."""
    steps = Steps()
    steps.step([rows(2, 0)], [lambda: steps.root.layers[2].output])
    return steps


@contextmanager
def calls(module: torch.nn.Module) -> Iterator[list[int]]:
    """Rows that a module's own code is run on, call by call."""
    seen: list[int] = []
    before = type(module).forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        seen.append(len(kwargs.get("hidden", args[0])))
        return before(module, *args, **kwargs)

    module.forward = forward  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        del module.__dict__["forward"]


def with_mlp(value: torch.Tensor, parts: list[torch.Tensor], which: int) -> torch.Tensor:
    """The toy's logits when the second layer's MLP returns `value` for one request's rows."""
    steps = Steps()
    start = sum(map(len, parts[:which]))
    layer = steps.model.layers[1]

    def replaced(module: Any, args: Any, out: torch.Tensor) -> torch.Tensor:
        out = out.clone()
        out[start : start + len(value)] = value
        return out

    layer.mlp.register_forward_hook(replaced)
    with torch.no_grad():
        hidden = steps.model(torch.cat(parts))
        ends = torch.tensor([len(part) for part in parts]).cumsum(0) - 1
        return steps.model.head(hidden[ends])


@pytest.mark.parametrize("others", [0, 1])
def test_a_skipped_module_gives_the_value(steps: Steps, others: int) -> None:
    """The model goes on with the value for that request's rows, alone and beside another."""
    parts, value = [rows(3, 1), rows(2, 2)][: 1 + others], rows(3, 9)
    right = with_mlp(value, parts, 0)
    clean = steps.step(parts, [])
    got = steps.step(parts, [lambda: steps.root.layers[1].mlp.skip(value)])
    assert not torch.allclose(right[0], clean[0], atol=1e-2)
    assert torch.equal(got[0], right[0])
    assert torch.equal(got[1:], clean[1:])


def test_a_module_that_all_rows_skip_does_not_run(steps: Steps) -> None:
    """Two requests that are the whole step leave the module out; with a third it runs for all."""
    parts, mlp = [rows(3, 1), rows(2, 2), rows(1, 3)], steps.model.layers[1].mlp
    blocks = [
        lambda: steps.root.layers[1].mlp.skip(rows(3, 9)),
        lambda: steps.root.layers[1].mlp.skip(rows(2, 8)),
    ]
    with calls(mlp) as alone:
        left_out = steps.step(parts[:2], blocks)
    with calls(mlp) as together:
        overwritten = steps.step(parts, blocks)
    assert (alone, together) == ([], [6])
    assert torch.equal(left_out, overwritten[:2])


def test_requests_skip_different_modules(steps: Steps) -> None:
    """Each request has its own module replaced, and the other's as it is."""
    parts, first, second = [rows(3, 1), rows(2, 2)], rows(3, 9), rows(2, 8)
    got = steps.step(
        parts,
        [
            lambda: steps.root.layers[1].mlp.skip(first),
            lambda: steps.root.layers[0].mlp.skip(second),
        ],
    )
    alone = [
        steps.step(parts[:1], [lambda: steps.root.layers[1].mlp.skip(first)]),
        steps.step(parts[1:], [lambda: steps.root.layers[0].mlp.skip(second)]),
    ]
    assert torch.allclose(got, torch.cat(alone), atol=1e-6)
    assert not torch.allclose(got, steps.step(parts, []), atol=1e-2)


def test_a_layer_skipped_by_its_own_input(steps: Steps) -> None:
    """The arguments can be read and then passed on as the output, which leaves the layer out."""
    x = rows(3, 1)

    def block() -> None:
        _, arguments = steps.root.layers[1].inputs
        steps.root.layers[1].skip((arguments["hidden"], arguments["residual"]))

    with calls(steps.model.layers[1]) as seen:
        got = steps.step([x], [block])
    model = Steps().model
    with torch.no_grad():
        positions = torch.arange(3)
        pair = model.layers[2](positions, *model.layers[0](positions, x, None))
        right = model.head(sum(pair)[-1:])
    assert seen == []
    assert torch.allclose(got, right, atol=1e-6)
    assert not torch.allclose(got, steps.step([x], []), atol=1e-3)


def test_a_read_after_the_skip_gives_the_value(steps: Steps) -> None:
    """The module's output reads as the value, a private copy that can be edited further."""
    value, seen = rows(3, 9), []

    def block() -> None:
        mlp = steps.root.layers[1].mlp
        mlp.skip(value)
        seen.append(mlp.output.clone())
        mlp.output[0] = 0

    got = steps.step([rows(3, 1)], [block])
    edited = torch.cat([torch.zeros(1, 4), value[1:]])
    assert torch.equal(seen[0], value)
    assert value[0].any()
    assert torch.equal(got, with_mlp(edited, [rows(3, 1)], 0))


@pytest.mark.parametrize("others", [0, 1])
@pytest.mark.parametrize("learned", [True, False])
def test_a_wrong_shape_is_refused(learned: bool, others: int) -> None:
    """The error names what was given and what the module returns; the module then has run."""
    steps, seen = Steps(), []
    if learned:
        steps.step([rows(1, 0)], [lambda: steps.root.layers[2].output])

    def block() -> None:
        try:
            steps.root.layers[1].skip(rows(3, 9))
        except ValueError as error:
            seen.append(str(error))
        seen.append(steps.root.layers[1].output)

    parts = [rows(3, 1), rows(2, 2)][: 1 + others]
    right: list[Any] = []
    steps.step(parts, [lambda: right.append(steps.root.layers[1].output)])
    steps.step(parts, [block])
    assert "model.layers.1.skip.i0 was given [3, 4]" in seen[0]
    assert "([3, 4], [3, 4])" in seen[0]
    assert all(map(torch.equal, seen[1], right[0]))


def test_a_module_that_was_entered_cannot_be_skipped(steps: Steps) -> None:
    """A skip is refused at once when the module's call has begun, or is over, or was skipped."""

    def inside() -> None:
        steps.root.layers[1].mlp.input
        steps.root.layers[1].skip((rows(3, 1), rows(3, 1)))

    def behind() -> None:
        steps.root.layers[2].inputs
        steps.root.layers[1].mlp.skip(rows(3, 1))

    def twice() -> None:
        steps.root.layers[1].mlp.skip(rows(3, 1))
        steps.root.layers[1].mlp.skip(rows(3, 1))

    for block in (inside, behind, twice):
        run = steps.try_step([rows(3, 1)], [block])[1][0]
        assert isinstance(run.error, OutOfOrderError)
        assert "already ran past it" in str(run.error)


@pytest.mark.parametrize("others", [0, 1])
@pytest.mark.parametrize("learned", [True, False])
def test_what_is_inside_does_not_run(learned: bool, others: int) -> None:
    """A block that skipped a layer cannot read inside it, though the layer ran for another."""
    steps = Steps()
    if learned:
        steps.step([rows(1, 0)], [lambda: steps.root.layers[2].output])
    seen: list[Any] = []

    def block() -> None:
        layer = steps.root.layers[1]
        layer.skip((rows(3, 1), rows(3, 1)))
        layer.mlp.output

    parts = [rows(3, 1), rows(2, 2)][: 1 + others]
    beside = [lambda: seen.append(steps.root.layers[1].mlp.output)][:others]
    run = steps.try_step(parts, [block, *beside])[1][0]
    assert isinstance(run.error, OutOfOrderError)
    assert "model.layers.1.mlp.output.i0' did not run in this step" in str(run.error)
    assert "skips 'layers.1'" in str(run.error)
    assert len(seen) == others


def test_modules_with_a_state_always_run(steps: Steps) -> None:
    """A module that must run does, and the rows of those who skip it are overwritten."""
    free = steps.step([rows(3, 1)], [lambda: steps.root.layers[1].mlp.skip(rows(3, 9))])
    steps.interleaver = Interleaver(steps.tree.modules, always=["layers.1.mlp"])
    steps.step([rows(2, 0)], [lambda: steps.root.layers[2].output])
    with calls(steps.model.layers[1].mlp) as seen:
        forced = steps.step([rows(3, 1)], [lambda: steps.root.layers[1].mlp.skip(rows(3, 9))])
    assert seen == [3]
    assert torch.equal(free, forced)


def test_a_module_that_is_not_called_did_not_run(steps: Steps) -> None:
    """Skipping a module that the step never calls is an error at its end, not a silent success."""
    run = steps.try_step([rows(3, 1)], [lambda: steps.root.unused.skip(rows(3, 9))])[1][0]
    assert isinstance(run.error, OutOfOrderError)
    assert "model.unused.skip.i0' did not run in this step" in str(run.error)


def test_a_skip_lasts_one_step(steps: Steps) -> None:
    """The next step runs the module again, and nothing of the skip is kept."""
    clean = steps.step([rows(3, 1)], [lambda: steps.root.layers[1].output])
    steps.step([rows(3, 1)], [lambda: steps.root.layers[1].mlp.skip(rows(3, 9))])
    assert steps.interleaver.skips.values == {}
    again = steps.step([rows(3, 1)], [lambda: steps.root.layers[1].output])
    assert torch.equal(again, clean)
