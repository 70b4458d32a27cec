"""Tensors that a block was given in place of the model's own."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch.autograd import grad

from midstream.errors import OutOfOrderError
from midstream.interleaving.gradients import backward, note_origin

from .graphs import Trace, rows, weights


def forward(
    x: torch.Tensor, layers: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A batch of two prompts: the whole hidden state, each prompt's copy of it, and the logits."""
    whole = torch.tanh(x @ layers[0])
    parts = [whole[index : index + 1].clone() for index in range(len(x))]
    for index, part in enumerate(parts):
        note_origin(part, whole, 0, index, index + 1)
    return whole, parts, torch.tanh(whole @ layers[1])


def test_two_blocks_over_one_batch() -> None:
    """Each has, of its rows, the gradient that two separate runs have (H22, case 58)."""
    x, layers = rows(2, 5, 6), weights(2)
    expected = []
    for index in range(2):
        alone, _, out = forward(x[index : index + 1], layers)
        expected += grad(out.square().sum(), alone)
    _, (a, b), out = forward(x, layers)
    with Trace():
        with torch.enable_grad():
            loss = out[0:1].square().sum()
        with loss.backward(retain_graph=True):
            first = a.grad.save()
    with Trace():
        with torch.enable_grad():
            loss = out[1:2].square().sum()
        with loss.backward():
            second = b.grad.save()
    assert first.shape == second.shape == (1, 5, 6)
    assert (expected[0] - expected[1]).abs().max() > 1e-3
    assert torch.allclose(first, expected[0], atol=1e-6)
    assert torch.allclose(second, expected[1], atol=1e-6)


def test_rows_of_a_part() -> None:
    """The gradient is that of the whole, narrowed, bit for bit; the whole's own is there too."""
    x, layers = rows(2, 5, 6), weights(2)
    whole, (a, b), out = forward(x, layers)
    loss = out.square().sum()
    (expected,) = grad(loss, whole, retain_graph=True)
    with Trace():
        with loss.backward():
            got = [b.grad, whole.grad, a.grad].save()
    assert all(map(torch.equal, got, [expected[1:], expected, expected[:1]]))


@pytest.mark.parametrize("how", ["in place", "assigned", "both", "parts"])
def test_writes_land_in_the_rows(how: str) -> None:
    """An edit of a part's gradient changes its rows of the whole's, and no others (H22)."""
    x, layers = rows(2, 5, 6), weights(2)

    def edited(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        gradient[1:] = 3 if how == "assigned" else gradient[1:] * 2
        if how in ("both", "parts"):
            gradient[:1] = 0
        return gradient

    whole, parts, out = forward(x, layers)
    (clean,) = grad(out.square().sum(), layers[0], retain_graph=True)
    handle = whole.register_hook(edited)
    (expected,) = grad(out.square().sum(), layers[0], retain_graph=True)
    handle.remove()
    assert (expected - clean).abs().max() > 1e-3
    (a, b), loss = parts, out.square().sum()
    with Trace():
        with loss.backward():
            if how == "assigned":
                b.grad = torch.full_like(b, 3.0)
            elif how == "both":
                both = whole.grad
                b.grad *= 2
                seen = whole.grad.clone().save()
                both[:1] = 0
                both[1:] *= 2
            elif how == "parts":
                a.grad[:] = 0
                b.grad *= 2
            else:
                b.grad[:] = b.grad * 2
    assert torch.equal(layers[0].grad, expected)


def test_later_rows_show_earlier_edits() -> None:
    """What was changed through one tensor is seen through another that is asked for after it."""
    x, layers = rows(2, 5, 6), weights(2)
    whole, (a, b), out = forward(x, layers)
    loss = out.square().sum()
    handle = whole.register_hook(lambda given: torch.cat([torch.full_like(a, 4.0), given[1:]]))
    (expected,) = grad(loss, layers[0], retain_graph=True)
    handle.remove()
    (clean,) = grad(loss, layers[0], retain_graph=True)
    assert (expected - clean).abs().max() > 1e-3
    with Trace():
        with loss.backward():
            whole.grad[:1] = 0
            first = a.grad.clone().save()
            a.grad[:] = 4
            b.grad
    assert first.abs().max() == 0
    assert torch.equal(layers[0].grad, expected)


def test_edits_carry_no_graph_along() -> None:
    """What is assigned may require grad; without `create_graph` the pass takes its values (H22)."""
    x, layers = rows(2, 5, 6), weights(2)
    whole, (a, _), out = forward(x, layers)
    tracked, loss = torch.ones_like(a).requires_grad_(True), out.sum()
    with Trace():
        with torch.enable_grad(), loss.backward():
            a.grad = tracked
            seen = whole.grad.save()
    assert not seen.requires_grad
    assert torch.equal(seen[:1], tracked)


def test_uses_of_the_part_itself() -> None:
    """A loss made of the block's own copy reaches it, beside what the model does (H22)."""
    x, layers = rows(2, 5, 6), weights(2)
    whole, (a, _), out = forward(x, layers)
    loss = out.square().sum() + (a * 3).sum()
    (expected,) = grad(loss, whole, retain_graph=True)
    (without,) = grad(out.square().sum(), whole, retain_graph=True)
    assert (expected - without).abs().max() > 1e-1
    with Trace():
        with loss.backward():
            got = a.grad.save()
    assert torch.equal(got, expected[:1])


@pytest.mark.parametrize("recording", [True, False])
def test_a_part_that_is_written_to(recording: bool) -> None:
    """Its gradient is that of what was written, which the model goes on with (H22)."""
    x, layers = rows(2, 5, 6), weights(2)

    def double(part: torch.Tensor) -> None:
        with torch.set_grad_enabled(recording):
            part[:, 1:] *= 2

    part = x[1:] @ layers[0]
    double(part)
    (expected,) = grad(torch.tanh(part @ layers[1]).square().sum(), part)
    whole = x @ layers[0]
    part = whole[1:].clone()
    note_origin(part, whole, 0, 1, 2)
    (unwritten,) = grad(torch.tanh(whole @ layers[1]).square().sum(), whole, retain_graph=True)
    assert (expected - unwritten[1:]).abs().max() > 1e-3
    double(part)
    whole[1:] = part  # as a hand-over writes it back
    loss = torch.tanh(whole @ layers[1]).square().sum()
    with Trace():
        with loss.backward():
            got = part.grad.save()
    assert torch.allclose(got, expected, atol=1e-6)


@pytest.mark.parametrize(("axis", "start", "stop"), [(1, 2, 4), (-1, 0, 3), (None, 0, 0)])
def test_axes(axis: int | None, start: int, stop: int) -> None:
    """Rows lie along any axis, or are all there are."""
    x, layers = rows(2, 5, 6), weights(2)
    whole = torch.tanh(x @ layers[0])
    narrowed = whole if axis is None else whole.narrow(axis, start, stop - start)
    part = narrowed.clone()
    note_origin(part, whole, axis, start, stop)
    loss = torch.tanh(whole @ layers[1]).square().sum()
    (expected,) = grad(loss, whole, retain_graph=True)
    with Trace():
        with loss.backward():
            got = part.grad.clone().save()
            part.grad[:] = 0
    expected_rows = expected if axis is None else expected.narrow(axis, start, stop - start)
    assert torch.equal(got, expected_rows)
    expected_rows.zero_()
    assert torch.equal(layers[0].grad, grad(torch.tanh(x @ layers[0]), layers[0], expected)[0])


def test_views_and_the_version_of_the_whole() -> None:
    """The origin is the whole as it was then: what was written into it later is later (H22)."""
    x, layers = rows(2, 5, 6), weights(2)
    whole = x @ layers[0]
    early = whole.clone()
    note_origin(early, whole, None, 0, 0)
    whole[:1] *= 3
    late = whole[:1]
    note_origin(late, whole, 0, 0, 1)
    loss = (whole @ layers[1]).sum()
    (expected,) = grad(loss, whole, retain_graph=True)
    with Trace():
        with loss.backward():
            got_late = late.grad.save()
            got_early = early.grad.save()
    assert torch.equal(got_late, expected[:1])
    assert torch.equal(got_early, torch.cat([expected[:1] * 3, expected[1:]]))
    assert (got_early[:1] - got_late).abs().max() > 1e-1


def test_a_whole_without_gradients() -> None:
    """It has no edge: the part's gradient is its own, or an error, also where it had an origin."""
    whole, layers = rows(2, 6), weights(1)
    part = whole[:1].clone()
    note_origin(part, whole, 0, 0, 1)
    loss = (whole @ layers[0]).sum()
    with pytest.raises(OutOfOrderError, match="does not require grad"):
        with Trace():
            with loss.backward(retain_graph=True):
                part.grad
    tracked = whole @ layers[0]
    part = tracked[:1].clone()
    note_origin(part, tracked, 0, 0, 1)
    note_origin(part, whole, 0, 0, 1)
    with pytest.raises(OutOfOrderError, match="does not depend"):
        with Trace():
            with loss.backward():
                part.grad


def test_a_leaf_as_the_whole() -> None:
    """The gradient of a leaf that requires grad accumulates with the part's edits in it."""
    x, (w,) = rows(3, 6), weights(1)
    part = w[2:4].clone()
    note_origin(part, w, 0, 2, 4)
    loss = (x @ w).sum()
    (expected,) = grad(loss, w, retain_graph=True)
    with Trace():
        with loss.backward():
            got = part.grad.clone().save()
            part.grad[:] = 0
    assert torch.equal(got, expected[2:4])
    assert torch.equal(w.grad[2:4], torch.zeros(2, 6))
    assert torch.equal(w.grad[:2], expected[:2])


def test_origins_keep_nothing_alive() -> None:
    """Part, whole and graph go when their last users do (H22)."""
    gone: list[Any] = []

    def once() -> None:
        x, layers = rows(2, 5, 6), weights(2)
        whole, parts, out = forward(x, layers)
        with backward(out.square().sum()) as gradients:
            gradients.of(parts[0]).grad[:] = 0
        gone.extend(weakref.ref(each) for each in (whole, *parts, out))

    gc.collect()
    gc.disable()
    try:
        once()
        assert [each() for each in gone] == [None] * 4
    finally:
        gc.enable()


def test_tensors_are_told_apart_by_identity() -> None:
    """A tensor that equals a part is not that part."""
    x, layers = rows(2, 5, 6), weights(2)
    _, (a, _), out = forward(x, layers)
    twin, loss = a.clone(), out.square().sum()
    with pytest.raises(OutOfOrderError, match="does not depend"):
        with Trace():
            with loss.backward():
                twin.grad
