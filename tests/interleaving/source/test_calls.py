"""Operations of a running forward: reads, writes and skips, beside other requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from midstream.interleaving.source import copies
from tests.interleaving.source.conftest import right
from tests.interleaving.toy import Steps, rows


def test_reads(steps: Steps) -> None:
    """Outputs, inputs and all arguments of calls and assignments, in order (B3)."""
    x, got = rows(5, 1), {}

    def block() -> None:
        source = steps.root.layers[1].source
        got["total"] = source.residual_0.output
        got["input"] = source.torch_tanh_0.input
        got["inputs"] = source.torch_tanh_0.inputs
        got["tanh"] = source.torch_tanh_0.output
        got["mlp"] = source.self_mlp_0.output

    steps.step([x], [block])
    values = right(x)[1][1]
    assert torch.equal(got["total"], values["total"])
    assert torch.equal(got["input"], values["total"])
    assert got["inputs"][1] == {}
    assert torch.equal(got["inputs"][0][0], values["total"])
    assert torch.equal(got["tanh"], values["tanh"])
    assert torch.equal(got["mlp"], values["mlp"])


def test_modules_and_operations_take_turns(steps: Steps) -> None:
    """A block goes from a module to an operation around it and on, in one step."""
    x, got = rows(5, 1), []

    def block() -> None:
        root = steps.root
        root.layers[0].source  # the block will want operations
        got.append(root.layers[0].mlp.input)
        got.append(root.layers[0].source.self_mlp_0.output)
        got.append(root.layers[1].input)
        got.append(root.layers[1].source.torch_tanh_0.output)
        got.append(root.layers[1].mlp.output)
        got.append(root.source.layer_0[1].output[0])
        got.append(root.layers[2].mlp.source.F_linear_0.output)

    steps.step([x], [block])
    values = right(x)[1]
    expected = [
        *(values[0]["tanh"], values[0]["mlp"], torch.arange(5), values[1]["tanh"]),
        *(values[1]["mlp"], values[1]["mlp"], values[2]["mlp"]),
    ]
    assert [torch.equal(a, b) for a, b in zip(got, expected, strict=True)] == [True] * 7


def test_reads_are_private(steps: Steps) -> None:
    """A kept value stays what it was, though the model rewrites its tensor in place."""
    x, kept = rows(5, 1), []
    steps.step([x], [lambda: kept.append(steps.root.layers[0].source.hidden_clone_0.output)])
    assert torch.equal(kept[0], x)
    assert not torch.allclose(right(x)[1][1]["total"], x, atol=1e-3)


def zero_in_place(operation: Any, value: torch.Tensor) -> None:
    operation.output[:] = 0


def zero_by_assignment(operation: Any, value: torch.Tensor) -> None:
    operation.output = torch.zeros_like(operation.output)


def zero_unread(operation: Any, value: torch.Tensor) -> None:
    operation.output = torch.zeros(value.shape)


def zero_by_skip(operation: Any, value: torch.Tensor) -> None:
    operation.skip(torch.zeros(value.shape))


def zero_by_skip_after_its_input(operation: Any, value: torch.Tensor) -> None:
    operation.skip(0 * operation.input)


WRITES = [zero_in_place, zero_by_assignment, zero_unread, zero_by_skip]
WRITES.append(zero_by_skip_after_its_input)


@pytest.mark.parametrize("neighbour", [False, True])
@pytest.mark.parametrize("write", WRITES)
def test_writes(steps: Steps, write: Callable[..., None], neighbour: bool) -> None:
    """A write or skip changes this request's rows only, whatever else is in the step (B3)."""
    parts, back = [rows(3, 1), rows(2, 2)], {}

    def block() -> None:
        operation = steps.root.layers[1].source.torch_tanh_0
        write(operation, parts[0])
        back[0] = operation.output

    def other_block() -> None:
        back[1] = steps.root.layers[1].source.torch_tanh_0.output

    blocks = [block]
    if neighbour:
        blocks.append(other_block)
    got = steps.step(parts, blocks)
    zeroed, clean = right(parts[0], {(1, "tanh"): torch.zeros_like})[0], right(parts[0])[0]
    other, seen = right(parts[1])
    assert not torch.allclose(zeroed, clean, atol=1e-3)
    assert torch.allclose(got[:1], zeroed, atol=1e-6)
    assert torch.allclose(got[1:], other, atol=1e-6)
    assert torch.equal(back[0], torch.zeros(3, 4))
    if neighbour:
        assert torch.allclose(back[1], seen[1]["tanh"], atol=1e-6)


@pytest.mark.parametrize("way", ["input", "inputs", "in place"])
def test_inputs_are_written(steps: Steps, way: str) -> None:
    """What an operation is called with can be replaced, and edited in place (B3)."""
    x = rows(3, 1)

    def block() -> None:
        operation = steps.root.layers[1].source.self_mlp_0
        if way == "input":
            operation.input = operation.input * 2
        elif way == "inputs":
            operation.inputs = ((operation.input * 2,), {})
        else:
            operation.input.mul_(2)

    got = steps.step([x], [block])
    doubled, clean = right(x, {(1, "tanh"): lambda v: 2 * v})[0], right(x)[0]
    assert not torch.allclose(doubled, clean, atol=1e-3)
    assert torch.allclose(got, doubled, atol=1e-6)


def test_writes_of_several_requests(steps: Steps) -> None:
    """Two requests skip the same operation, each with its own value."""
    parts = [rows(3, 1), rows(2, 2)]
    values = [rows(3, 8), rows(2, 9)]

    def block(index: int) -> None:
        steps.root.layers[0].source.self_mlp_0.skip(values[index])

    got = steps.step(parts, [lambda: block(0), lambda: block(1)])
    for index in range(2):
        expected = right(parts[index], {(0, "mlp"): lambda _, i=index: values[i]})[0]
        assert torch.allclose(got[index : index + 1], expected, atol=1e-6)


def test_wrong_shape_is_the_blocks_error(steps: Steps) -> None:
    """A value of another shape is refused by assignment and skip; other requests go on."""
    parts = [rows(3, 1), rows(2, 2), rows(2, 3)]

    def assign() -> None:
        steps.root.layers[0].source.torch_tanh_0.output = torch.zeros(2, 4)

    def skip() -> None:
        steps.root.layers[0].source.torch_tanh_0.skip(torch.zeros(1, 4))

    logits, runs = steps.try_step(parts, [assign, skip])
    where = "model.layers.0.source.torch_tanh_0.output.i0"
    assert [str(run.error).partition(":")[0] for run in runs] == [
        f"{where} was assigned [2, 4], but the model goes on with [3, 4]",
        f"{where} was assigned [1, 4], but the model goes on with [2, 4]",
    ]
    for index in range(3):
        assert torch.allclose(logits[index : index + 1], right(parts[index])[0], atol=1e-6)


def test_forward_is_itself_again(steps: Steps) -> None:
    """After a step nothing is left on the modules, and steps without operations run none."""
    x = rows(3, 1)
    steps.step([x], [lambda: steps.root.layers[0].source.torch_tanh_0.output])
    assert [path for path, m in steps.tree.modules.items() if "forward" in vars(m)] == []
    clean = right(x)[0]
    assert torch.allclose(steps.step([x], [lambda: steps.root.layers[2].output]), clean, atol=1e-6)


def test_blocks_without_operations_pay_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No function is instrumented for a block that asks for modules only."""
    made: list[str] = []
    make = copies._make
    monkeypatch.setattr(copies, "_templates", {})
    monkeypatch.setattr(copies, "_make", lambda f, w: made.append(f.__qualname__) or make(f, w))
    steps = Steps()
    for _ in range(2):
        steps.step([rows(2, 1)], [lambda: steps.root.layers[1].mlp.output])
    assert made == []
    steps.step([rows(2, 1)], [lambda: steps.root.layers[1].source.torch_tanh_0.output])
    assert "Layer.forward" in made


def test_calls_of_a_block_are_not_traced(steps: Steps) -> None:
    """A module that the block calls itself hands nothing over, though its forward is wanted."""
    x, got = rows(3, 1), []

    def block() -> None:
        steps.root.layers[1].source  # the block will want operations
        hidden = steps.root.layers[0].output[0]
        steps.root.layers[1].mlp(hidden)
        got.append(steps.root.layers[1].mlp.source.F_linear_0.output)

    steps.step([x], [block])
    assert torch.equal(got[0], right(x)[1][1]["mlp"])
