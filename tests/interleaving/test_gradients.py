"""Gradients in blocks, beside plain autograd."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.autograd import grad

from midstream.errors import OutOfOrderError
from midstream.interleaving.gradients import backward

from .graphs import Trace, attention, mlp, rows, same, weights


def hooked(index: int, change: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Gradients of an MLP's weights by autograd: with a tensor hook at a state, and without."""
    x, layers = rows(3, 6), weights(4)
    clean = grad(mlp(x, layers)[-1].square().sum(), layers)
    states = mlp(x, layers)
    states[index].register_hook(change)
    return list(grad(states[-1].square().sum(), layers)), list(clean)


def test_gradients_of_an_mlp() -> None:
    """In reverse order all are autograd's, bit for bit, and weights accumulate as usual (H22)."""
    x, layers = rows(3, 6), weights(4)
    states = mlp(x, layers)
    loss = states[-1].square().sum()
    expected = grad(loss, [*states, *layers], retain_graph=True)
    assert all(gradient.abs().max() > 1e-4 for gradient in expected)
    with Trace():
        with loss.backward():
            got = [state.grad for state in reversed(states)].save()
    assert same(got[::-1], expected[:4])
    assert same([layer.grad for layer in layers], expected[4:])


def test_gradients_inside_attention() -> None:
    """Branches that meet again: every value has the whole of its gradient (H22)."""
    x, qkvo = rows(2, 5, 6).requires_grad_(True), weights(4)
    values = attention(x, qkvo)
    loss = values["out"].square().mean()
    names = ["out", "mixed", "pattern", "scores"]
    expected = grad(loss, [values[n] for n in [*names, "v", "q", "k"]] + [x], retain_graph=True)
    with Trace():
        with loss.backward(retain_graph=True):
            got = [values[name].grad for name in names].save()
            v = values["v"].grad.save()
    assert same([*got, v], expected[:5])
    with Trace():
        with loss.backward():
            leaf = x.grad.save()
    assert torch.equal(leaf, expected[-1])


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_each_branch(name: str) -> None:
    """One value of parallel branches at a time is there whatever the order of the branches."""
    values = attention(rows(2, 5, 6), weights(4))
    loss = values["out"].square().mean()
    (expected,) = grad(loss, [values[name]], retain_graph=True)
    tensor = values[name]
    with Trace():
        with loss.backward():
            got = tensor.grad.save()
    assert torch.equal(got, expected)


def zero_rows(gradient: torch.Tensor) -> torch.Tensor:
    gradient = gradient.clone()
    gradient[1:] = 0
    return gradient


def test_edits_in_place_land() -> None:
    """What is written into a gradient is what the pass goes on with, and nothing else (H22)."""
    expected, clean = hooked(2, zero_rows)
    assert (expected[0] - clean[0]).abs().max() > 1e-3  # the edit has an effect
    x, layers = rows(3, 6), weights(4)
    states = mlp(x, layers)
    h, loss = states[2], states[-1].square().sum()
    with Trace():
        with loss.backward():
            before = h.grad.clone().save()
            h.grad[1:] = 0
            after = h.grad.save()
    assert same([layer.grad for layer in layers], expected)
    assert torch.equal(after, zero_rows(before))


@pytest.mark.parametrize("how", ["number", "numpy", "augmented", "data"])
def test_every_way_of_writing(how: str) -> None:
    """Augmented, through numpy or `.data`: each lands as a hook that doubles the gradient (H22)."""
    expected, clean = hooked(1, lambda gradient: gradient * 2)
    assert (expected[0] - clean[0]).abs().max() > 1e-3
    x, layers = rows(3, 6), weights(4)
    states = mlp(x, layers)
    h, loss = states[1], states[-1].square().sum()
    with Trace():
        with loss.backward():
            if how == "number":
                h.grad *= 2
            elif how == "augmented":
                h.grad += h.grad
            elif how == "numpy":
                h.grad.numpy()[:] *= 2
            else:
                h.grad.data.mul_(2)
    assert same([layer.grad for layer in layers], expected)


def test_replacement() -> None:
    """An assigned tensor is what the pass goes on with, and later writes to it are not (H22)."""
    expected, clean = hooked(2, torch.ones_like)
    assert (expected[1] - clean[1]).abs().max() > 1e-3
    x, layers = rows(3, 6), weights(4)
    states = mlp(x, layers)
    h0, h, loss = states[0], states[2], states[-1].square().sum()
    with Trace():
        with loss.backward():
            ones = torch.ones_like(h, dtype=torch.float64)
            h.grad = ones
            is_it = (h.grad is ones).save()
            g = h0.grad
            ones[:] = 7
            g[:] = g
    assert is_it
    assert same([layer.grad for layer in layers], expected)


def test_a_value_stays_what_it_was() -> None:
    """A gradient that was read is a copy: a late write and the pass do not meet (H22)."""
    expected, _ = hooked(3, lambda gradient: None)
    x, layers = rows(3, 6), weights(4)
    states = mlp(x, layers)
    h2, h3, loss = states[2], states[3], states[-1].square().sum()
    with Trace():
        with loss.backward():
            late, first = h3.grad, h2.grad
            late[:] = 0
            same_object = (h2.grad is first and h3.grad is late).save()
            kept = first.save()
    assert same_object
    assert same([layer.grad for layer in layers], expected)
    assert kept.abs().max() > 0


def test_what_was_handed_on_is_the_passes_own() -> None:
    """Late writes to an edited or assigned gradient do not reach what it has become (H22)."""
    x, layers = rows(3, 6), weights(2)
    states = mlp(x, layers)
    first = states[-1]
    (expected,) = grad(first, layers[0], torch.full_like(first, 3.0), retain_graph=True)
    second = first + 0  # addition passes on the very tensor that arrives
    third = second + 0
    loss = third.sum()
    with Trace():
        with loss.backward():
            third.grad = assigned = torch.full_like(third, 2.0)
            edited = second.grad
            edited += 1
            first.grad
            assigned[:] = 7
            edited[:] = 8
    assert torch.equal(layers[0].grad, expected)


def test_an_untouched_gradient_is_passed_on_uncopied() -> None:
    """The pass goes on with the very tensor that arrived."""
    x, layers = rows(3, 6), weights(2)
    states = mlp(x, layers)
    places: list[int] = []

    def note(gradient: torch.Tensor) -> None:
        places.append(gradient.data_ptr())

    grown = states[0] + 0  # both gradients are one tensor: addition passes it on
    grown.register_hook(note)
    states[0].register_hook(note)
    loss = grown.sum()
    with Trace():
        with loss.backward():
            own = grown.grad.data_ptr().save()
            states[0].grad
    assert places[0] == places[1] != own


def test_leaves() -> None:
    """A leaf's `.grad` in the body is this pass's, edits of it included; outside it accumulates.

    (H22).
    """
    x, (w, v) = rows(3, 6), weights(2)
    w.grad = torch.full_like(w, 5.0)
    loss = ((x @ w) @ v).sum()
    gw, gv = grad(loss, [w, v], retain_graph=True)
    with Trace():
        with loss.backward():
            got_v = v.grad.save()
            got = w.grad.clone().save()
            w.grad *= 3
    assert torch.equal(got, gw)
    assert torch.equal(got_v, gv)
    assert torch.equal(w.grad, 5 + gw * 3)
    assert torch.equal(v.grad, gv)


def test_a_number_and_the_loss_itself() -> None:
    """The pass begins at the loss, whose gradient may be scaled for all (H22)."""
    x, layers = rows(3, 6), weights(2)
    loss = mlp(x, layers)[-1].sum()
    expected = grad(loss * 0.5, layers, retain_graph=True)
    with Trace():
        with loss.backward():
            one = loss.grad.clone().save()
            loss.grad *= 0.5
    assert one.item() == 1.0
    assert same([layer.grad for layer in layers], expected)


def test_arguments_of_backward() -> None:
    """`gradient` and `inputs` mean what they mean to `Tensor.backward` (H22)."""
    x, layers = rows(3, 6), weights(3)
    states = mlp(x, layers)
    out, h, given = states[-1], states[0], rows(3, 6, seed=9)
    expected = grad(out, [h, layers[0]], given, retain_graph=True)
    first = layers[0]
    with Trace():
        with out.backward(given, inputs=[first]):
            got = h.grad.save()
    assert torch.equal(got, expected[0])
    assert torch.equal(first.grad, expected[1])
    assert layers[1].grad is None


def test_outputs_of_one_operation() -> None:
    """Tensors that one operation gives have their gradients at one place, in any order."""
    layers = weights(1)
    h = rows(3, 6) @ layers[0]
    a, b, unused = h.split(2, dim=1)
    loss = (a * 3).sum() + (b * b).sum()
    with Trace():
        with loss.backward():
            first, second = a.grad.clone().save(), b.grad.clone().save()
            b.grad[:] = 0
            a.grad *= 2
            with pytest.raises(OutOfOrderError, match="does not depend"):
                unused.grad
    assert torch.equal(first, torch.full_like(a, 3.0))
    assert torch.equal(second, 2 * b)
    mask = torch.cat([torch.full_like(a, 6.0), torch.zeros(3, 4)], 1)
    assert torch.equal(layers[0].grad, rows(3, 6).T @ mask)


class Twice(torch.autograd.Function):
    """Two outputs, by a function of the user's."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0] * 2 + gradients[1] * 3


def test_functions_of_the_users() -> None:
    """The outputs and inputs of a custom autograd function are places like all others."""
    layers = weights(1)
    h = rows(3, 6) @ layers[0]
    a, b = Twice.apply(h)
    loss = (a * b).sum()
    expected = grad(loss, [b, a, h, *layers], retain_graph=True)
    with Trace():
        with loss.backward():
            got = [b.grad, a.grad, h.grad].save()
    assert same([*got, layers[0].grad], expected)


def test_create_graph() -> None:
    """Gradients then carry a graph, edits included: a second derivative is autograd's (H22)."""
    x, layers = rows(3, 6), weights(3)
    states = mlp(x, layers)
    h, loss = states[0], states[-1].square().sum()
    (first,) = grad(loss, [h], create_graph=True)
    expected = grad((first * 2).square().sum(), layers, retain_graph=True)
    with Trace():
        with torch.enable_grad():
            with warnings.catch_warnings():  # of a cycle, which `grad` does not make
                warnings.simplefilter("ignore", UserWarning)
                with loss.backward(create_graph=True, inputs=layers):
                    got = h.grad
            penalty = (got * 2).square().sum()
            second = torch.autograd.grad(penalty, layers).save()
    assert same(second, expected)
    assert second[0].abs().max() > 1e-4
    for layer in layers:
        layer.grad = None  # its graph leads back to the layer


def test_several_passes() -> None:
    """With `retain_graph` each pass has its own gradients, edits stay in theirs (H22, case 59)."""
    x, layers = rows(3, 6), weights(3)
    states = mlp(x, layers)
    h, one, two = states[0], states[-1].sum(), states[-1].square().sum()
    expected = [grad(loss, [h], retain_graph=True)[0] for loss in (one, two, one)]
    assert (expected[0] - expected[1]).abs().max() > 1e-3
    with Trace():
        with one.backward(retain_graph=True):
            first = h.grad.clone().save()
            h.grad[:] = 0
        with two.backward(retain_graph=True):
            second = h.grad.save()
        with one.backward():
            third = h.grad.save()
    assert same([first, second, third], expected)


def test_a_pass_inside_a_body() -> None:
    """Another pass, stopped or plain, runs in the body of one; then that one goes on (H22)."""
    x, layers = rows(3, 6), weights(4)
    states = mlp(x, layers)
    (a, b, c, d), w = states, layers[0]
    loss, other = d.sum(), c.square().sum()
    expected = grad(loss, [c, a, w], retain_graph=True)
    inner = grad(other, [c, b, w], retain_graph=True)
    with Trace():
        with loss.backward(retain_graph=True):
            got = [c.grad].save()
            with other.backward(retain_graph=True):
                nested = [c.grad, b.grad].save()
                nested[1][:] = nested[1]
            other.backward(retain_graph=True)
            got.append(a.grad)
    assert same(got, expected[:2])
    assert same(nested, inner[:2])
    assert torch.allclose(w.grad, expected[2] + 2 * inner[2])


def test_functions_get_the_same_by_name() -> None:
    """`backward(loss)` gives a function what a captured block reads as `h.grad` (H22)."""
    expected, clean = hooked(2, zero_rows)
    assert (expected[0] - clean[0]).abs().max() > 1e-3
    x, layers = rows(3, 6), weights(4)
    states = mlp(x, layers)
    with backward(states[-1].square().sum()) as gradients:
        assert gradients.of(states[2]).grad is gradients.of(states[2]).grad
        gradients.of(states[2]).grad[1:] = 0
    assert same([layer.grad for layer in layers], expected)
    with pytest.raises(OutOfOrderError, match="has ended"):
        gradients.of(states[1]).grad
    with pytest.raises(TypeError, match="not of int"):
        gradients.of(3)  # type: ignore[arg-type]


def test_after_the_statement_grad_is_plain() -> None:
    """Outside the body a tensor's `.grad` is PyTorch's, also in a function made inside (H22)."""
    x, (w,) = rows(3, 6), weights(1)
    loss = (x @ w).sum()
    with Trace():
        with loss.backward(retain_graph=True):
            inside = w.grad.save()

            def read() -> Any:
                return w.grad

        outside = read().save()
    assert outside is w.grad
    assert inside is not w.grad
    assert torch.equal(inside, w.grad)


def test_a_body_without_gradients_is_a_plain_call() -> None:
    """Nothing is asked for, and the pass runs all the same (H22)."""
    x, layers = rows(3, 6), weights(2)
    loss = mlp(x, layers)[-1].sum()
    expected = grad(loss, layers, retain_graph=True)
    with Trace():
        with loss.backward():
            pass
    assert same([layer.grad for layer in layers], expected)
