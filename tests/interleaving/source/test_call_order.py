"""Operations have an order with modules and each other; in loops they are met several times."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from midstream.errors import OutOfOrderError
from tests.interleaving.source.conftest import right
from tests.interleaving.toy import Steps, rows


def refused(steps: Steps, block: Callable[[], None]) -> str:
    """The text of the order error that a block meets."""
    with pytest.raises(OutOfOrderError) as failure:
        steps.step([rows(3, 1)], [block])
    return str(failure.value)


def operations(steps: Steps) -> tuple[Any, Any]:
    return steps.root.layers[0].source, steps.root.layers[1].source


def backwards(steps: Steps) -> None:
    operations(steps)[0].torch_tanh_0.output
    operations(steps)[0].residual_0.output


def input_after_output(steps: Steps) -> None:
    operations(steps)[0].torch_tanh_0.output
    operations(steps)[0].torch_tanh_0.input


def skip_after_it_ran(steps: Steps) -> None:
    operations(steps)[0].torch_tanh_0.output
    operations(steps)[0].torch_tanh_0.skip(0)


def operation_of_an_earlier_layer(steps: Steps) -> None:
    operations(steps)[1].torch_tanh_0.output
    operations(steps)[0].torch_tanh_0.output


def operation_of_an_earlier_module(steps: Steps) -> None:
    steps.root.layers[1].output
    operations(steps)[0].torch_tanh_0.output


def module_before_an_operation(steps: Steps) -> None:
    operations(steps)[0].self_mlp_0.output
    steps.root.layers[0].mlp.output


def untaken_branch_after_its_function(steps: Steps) -> None:
    steps.root.layers[1].output
    operations(steps)[0].residual_add__0.output


@pytest.mark.parametrize(
    ("block", "where"),
    [
        (backwards, "layers.0.source.residual_0.output"),
        (input_after_output, "layers.0.source.torch_tanh_0.input"),
        (skip_after_it_ran, "layers.0.source.torch_tanh_0.input"),
        (operation_of_an_earlier_layer, "layers.0.source.torch_tanh_0.output"),
        (operation_of_an_earlier_module, "layers.0.source.torch_tanh_0.output"),
        (module_before_an_operation, "layers.0.mlp.output"),
        (untaken_branch_after_its_function, "layers.0.source.residual_add__0.output"),
    ],
)
def test_passed(steps: Steps, block: Callable[[Steps], None], where: str) -> None:
    """What the step has passed is refused at once, in a first step as in later ones."""
    for _ in range(2):
        text = refused(steps, lambda: block(steps))
        assert text.startswith(
            f"'model.{where}.i0' was requested but the model already ran past it: the block had"
        )


def test_nested_operation_that_has_passed(steps: Steps) -> None:
    """Inside an operation the order is known too."""

    def block() -> None:
        source = steps.root.layers[0].mlp.source
        source.F_linear_0.output
        steps.root.layers[0].source.self_mlp_0.source.F_linear_0.input

    assert "'model.layers.0.mlp.source.F_linear_0.input.i0' was requested" in refused(steps, block)


def test_operation_that_does_not_run(steps: Steps) -> None:
    """One that the step ends without is an error of that step, and the forward goes on."""
    x, got = rows(3, 1), []

    def block() -> None:
        try:
            steps.root.layers[0].source.residual_add__0.output
        except OutOfOrderError as error:
            got.append(str(error))

    logits = steps.step([x], [block])
    assert torch.allclose(logits, right(x)[0], atol=1e-6)
    assert got == [
        "'model.layers.0.source.residual_add__0.output.i0' did not run in this step. "
        "The block asked for it, and the step ended without it."
    ]


def test_operation_asked_for_too_late() -> None:
    """In a forward that has begun without its operations, the error says what to do."""
    steps = Steps()
    steps.step([rows(2, 1)], [lambda: steps.root.layers[0].output])

    def block() -> None:
        steps.root.layers[0].mlp.output
        steps.root.layers[0].source.self_mlp_0.output

    text = refused(steps, block)
    assert "'layers.0' has begun without its operations" in text
    assert "Write its `.source` on a line of its own at the beginning" in text


@pytest.mark.parametrize("k", [0, 1, 2])
def test_loops(steps: Steps, k: int) -> None:
    """The k-th time the forward gets to an operation is `operation[k]`; plain, it is the first."""
    x, got = rows(4, 1), []

    def block() -> None:
        operation = steps.root.source.layer_0
        got.append((operation[k] if k else operation).output[0])

    for _ in range(2):
        steps.step([x], [block])
    expected = right(x)[1][k]["mlp"]
    assert torch.equal(got[0], expected)
    assert torch.equal(got[1], expected)


def test_loops_go_forwards(steps: Steps) -> None:
    """An earlier time is refused, and one that never comes is an error at the step's end."""

    def back() -> None:
        steps.root.source.layer_0[1].output
        steps.root.source.layer_0.output

    def beyond() -> None:
        steps.root.source.layer_0[3].output

    assert "'model.source.layer_0.output.i0' was requested but" in refused(steps, back)
    assert "'model.source.layer_0[3].output.i0' did not run" in refused(steps, beyond)
