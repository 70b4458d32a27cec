"""What goes wrong with gradients in blocks, and where it is said."""

from __future__ import annotations

import traceback
from typing import Any

import pytest
import torch
from torch.autograd import grad

from midstream.errors import OutOfOrderError

from .graphs import Trace, mlp, rows, same, weights


def test_a_second_pass_without_retaining() -> None:
    """It fails where the graph was freed, and the error names `retain_graph` (H22, case 59)."""
    states = mlp(rows(3, 6), weights(3))
    h, loss = states[0], states[-1].square().sum()
    with pytest.raises(RuntimeError, match="retain_graph") as error:
        with Trace():
            with loss.backward():
                first = h.grad.save()
            with loss.backward():
                second = h.grad.save()
    assert "`loss.backward(retain_graph=True)`" in error.value.__notes__[0]
    assert lines(error)[-1] == "second = h.grad.save()"
    assert first.shape == (3, 6)


def lines(error: Any) -> list[str]:
    """The lines of this file that an error passed."""
    frames = traceback.extract_tb(error.value.__traceback__)
    return [frame.line for frame in frames if frame.filename == __file__]


def test_reading_in_the_order_of_the_forward() -> None:
    """The error says so, at the line, with the line that the read has to move above (H22)."""
    states = mlp(rows(3, 6), weights(3))
    h0, h1, loss = states[0], states[1], states[-1].sum()
    with pytest.raises(OutOfOrderError, match="already passed .*above line") as error:
        with Trace():
            with loss.backward():
                early = h0.grad.save()
                late = h1.grad.save()
    number = int(str(error.value).rsplit("line ", 1)[1].rstrip("."))
    with open(__file__, encoding="utf-8") as file:
        assert file.readlines()[number - 1].strip() == "early = h0.grad.save()"
    assert lines(error)[-1] == "late = h1.grad.save()"


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.ones(2), "does not require grad"),
        (torch.ones(2, requires_grad=True), "does not depend"),
        (weights(1)[0] * 2, "does not depend"),
        ("of the loss", "does not depend"),
    ],
)
def test_tensors_without_a_gradient(tensor: Any, reason: str) -> None:
    """Neither None nor a wait: an error at the line, which says why (H22)."""
    states = mlp(rows(3, 6), weights(3))
    loss = states[-1].sum()
    tensor = loss * 2 if tensor == "of the loss" else tensor
    with pytest.raises(OutOfOrderError, match=reason) as error:
        with Trace():
            with loss.backward():
                tensor.grad
    assert lines(error)[-1] == "tensor.grad"


@pytest.mark.parametrize(
    ("value", "kind", "reason"),
    [
        (torch.ones(2, 6), ValueError, r"assigned \[2, 6\], but the gradient is \[3, 6\]"),
        (None, TypeError, "assigned None, expected a tensor"),
        (0.0, TypeError, "assigned float, expected a tensor"),
    ],
)
def test_what_cannot_be_assigned(value: Any, kind: type[Exception], reason: str) -> None:
    """Another shape, or no tensor: an error at the line, and what is there stays (H22)."""
    x, layers = rows(3, 6), weights(2)
    states = mlp(x, layers)
    h, loss = states[0], states[-1].sum()
    expected = grad(loss, layers, retain_graph=True)
    with Trace():
        with loss.backward():
            with pytest.raises(kind, match=reason):
                h.grad = value
            with pytest.raises(TypeError, match="cannot be deleted"):
                del h.grad
    assert same([layer.grad for layer in layers], expected)


def test_assigning_too_late() -> None:
    """After the pass has gone on, an assignment could not land, and says so (H22)."""
    states = mlp(rows(3, 6), weights(3))
    h0, h1, loss = states[0], states[1], states[-1].sum()
    with pytest.raises(OutOfOrderError, match="has gone on from this gradient"):
        with Trace():
            with loss.backward():
                h1.grad
                h0.grad
                h1.grad *= 2


@pytest.mark.parametrize("problem", ["no graph", "no number", "wrong gradient"])
def test_errors_of_the_call_itself(problem: str) -> None:
    """They are PyTorch's, at the `with` line, before the body runs."""
    out = mlp(rows(3, 6), weights(2))[-1]
    subject = {"no graph": out.detach().sum(), "no number": out, "wrong gradient": out}[problem]
    arguments = [torch.ones(2)] if problem == "wrong gradient" else []
    ran: list[int] = []
    match = {"no graph": "not require grad", "no number": "scalar", "wrong gradient": "shape"}
    with pytest.raises(RuntimeError, match=match[problem]) as error:
        with Trace():
            with subject.backward(*arguments):
                ran.append(1)
    assert ran == []
    assert lines(error)[-1] == "with subject.backward(*arguments):"


def test_an_error_inside_the_pass() -> None:
    """What a function of the graph raises comes out where the body waits for it."""

    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, *_: torch.Tensor) -> torch.Tensor:
            raise KeyError("broken")

    h = rows(3, 6) @ weights(1)[0]
    loss = Broken.apply(h).sum()
    with pytest.raises(KeyError, match="broken") as error:
        with Trace():
            with loss.backward():
                h.grad
    assert lines(error)[-2:] == ["h.grad", 'raise KeyError("broken")']
    with Trace():
        with loss.backward():
            for _ in range(2):
                with pytest.raises((KeyError, OutOfOrderError), match="broken"):
                    h.grad
