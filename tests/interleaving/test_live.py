"""Hand-overs that carry gradients: what a block is given, and what the model goes on with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from midstream import Model
from midstream.errors import InterventionError
from midstream.interleaving.copies import BatchSizes, Rows
from midstream.interleaving.live import LiveEvent
from midstream.interleaving.locations import Location
from midstream.interleaving.snapshots import Snapshots
from tests.support.local_modules import MLP, Residual, drawn, far, rows

X, Y = rows(2, 1), rows(3, 2)
ALL = Rows(0, 2)


def serve(
    value: Any, *spans: Rows, total: int = 2, **arguments: Any
) -> tuple[LiveEvent, list[Any]]:
    """An event of a value, and it as each of the requests sees it."""
    event = LiveEvent(value, BatchSizes((total,)), spans or (ALL,), total=total, **arguments)
    place = Location("layer", "output")
    return event, [event.serve(span, Snapshots(), place) for span in spans or (ALL,)]


@pytest.mark.parametrize("is_held", [False, True])
def test_a_value_with_gradients_is_the_models_own(is_held: bool) -> None:
    """The block has the graph's own tensor, and the model a copy: an edit of that is not seen."""
    source = X.clone().requires_grad_()
    value = source * 2
    kept = value.pow(2) if is_held else None  # autograd's graph holds the tensor for this
    event, [served] = serve(value)
    mine = served.read()
    assert served.read() is mine
    served.settle(0)
    result = event.result()
    assert (result is value) == (not is_held)
    result.mul_(3.0)
    assert torch.equal(mine, X * 2)
    (gradient,) = torch.autograd.grad(result.sum(), mine, retain_graph=True)
    assert torch.equal(gradient, torch.full((2, 4), 3.0))
    (gradient,) = torch.autograd.grad(result.sum(), source)
    assert torch.equal(gradient, torch.full((2, 4), 6.0))
    if kept is not None:
        (gradient,) = torch.autograd.grad(kept.sum(), mine)
        assert torch.equal(gradient, mine * 2)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_the_model_writes_into_what_a_block_has_read(mode: Any) -> None:
    """What code around a module writes into its tensor reaches the model, never the block (O5)."""

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.drop, self.act = nn.Linear(4, 4), nn.Dropout(0.5), nn.ReLU(inplace=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.up(x)
            same = self.drop(hidden)  # the very tensor, where nothing is dropped
            hidden += 1.0
            self.act(hidden)  # what it returns is not used
            return same * 2.0

    module = drawn(Around).eval()
    model = Model(module)
    with mode():
        before = module.up(X).detach()
        expected = module(X)
        with model.trace(X):
            values = [model.up.output, model.drop.input, model.drop.output].save()
            active = model.act.input.save()
            out = model.output.save()
        with model.trace(X):
            model.drop.output[:, 0] = 2.0
            written = model.output.save()
    assert all(torch.equal(value, before) for value in values)
    assert torch.equal(active, before + 1.0)
    assert torch.equal(out, expected)
    assert (written[:, 0] == 6.0).all()  # 2, and what was added to it, which is positive
    assert torch.equal(written[:, 1:], expected[:, 1:])
    assert far(before.relu() * 2.0, expected)


def test_gradients_at_what_the_model_has_written_into() -> None:
    """The gradient at a value is the whole one, though code around it goes on with a copy (H20)."""

    class Stream(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.norm, self.mlp = nn.Linear(4, 4), nn.Identity(), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.up(x)
            added = self.mlp(self.norm(hidden) * 1.0)
            hidden += added
            return hidden.pow(2).sum()

    module = drawn(Stream)
    model = Model(module)
    hidden = module.up(X)
    (expected,) = torch.autograd.grad((hidden + module.mlp(hidden * 1.0)).pow(2).sum(), hidden)
    for side in ("input", "output"):
        with model.trace(X):
            value = model.get(f"norm.{side}").save()
            loss = model.output.save()
        (gradient,) = torch.autograd.grad(loss, value)
        assert torch.equal(gradient, expected)
        assert torch.equal(value, hidden)


@pytest.mark.parametrize("gradients", [True, False])
def test_a_value_nobody_asked_for_stays(gradients: bool) -> None:
    """An event that no block reads or writes passes the value on, not a copy."""
    value = X.clone().requires_grad_(gradients) * 2
    event, _ = serve(value)
    assert event.result() is value


def test_a_value_without_gradients_is_copied() -> None:
    """The block has a copy, the model its tensor, into which edits are written."""
    value = X.clone()
    event, [served] = serve(value)
    mine = served.read()
    assert mine is not value
    assert torch.equal(mine, X)
    mine[:, 0] = 1.0
    assert torch.equal(value, X)
    served.settle(0)
    assert event.result() is value
    assert (value[:, 0] == 1.0).all()
    value.mul_(0.0)
    assert (mine[:, 0] == 1.0).all()


def test_gradients_may_begin_at_a_value() -> None:
    """`requires_grad_()` on a value without gradients makes the model go on with it."""
    event, [served] = serve(X.clone())
    mine = served.read().requires_grad_()
    served.settle(0)
    (gradient,) = torch.autograd.grad((event.result() * 3).sum(), mine)
    assert torch.equal(gradient, torch.full((2, 4), 3.0))


@pytest.mark.parametrize("kind", ["leaf", "view of a leaf", "parameter"])
def test_what_autograd_refuses_to_write_into(kind: str) -> None:
    """A leaf that requires gradients can be edited; the model goes on with the edited copy."""
    leaf = nn.Parameter(X.clone()) if kind == "parameter" else X.clone().requires_grad_()
    value = leaf.view(2, 4) if kind == "view of a leaf" else leaf
    event, [served] = serve(value)
    mine = served.read()
    with torch.no_grad():
        mine[0] = 5.0
    mine[:, 0] = 1.0
    served.settle(0)
    result = event.result()
    assert torch.equal(leaf, X)
    expected = X.clone()
    expected[0] = 5.0
    expected[:, 0] = 1.0
    assert torch.equal(result, expected)
    (gradient,) = torch.autograd.grad(result.sum(), leaf)
    assert (gradient[:, 0] == 0).all()


@pytest.mark.parametrize("gradients", [True, False])
def test_the_models_and_the_callers_tensors_are_replaced(gradients: bool) -> None:
    """An edit of a tensor that somebody keeps goes into another one."""
    value = X.clone().requires_grad_(gradients) * 1
    kept = value.detach().clone()
    for who in ("is_models", "is_callers"):
        if gradients and who == "is_models":
            continue  # those that require gradients are leaves, see above
        event, [served] = serve(value, **{who: lambda tensor: tensor is value})
        served.read()[:, 0] = 1.0
        served.settle(0)
        result = event.result()
        assert torch.equal(value, kept), who
        assert (result[:, 0] == 1.0).all()
        assert torch.equal(result[:, 1:], kept[:, 1:])


@pytest.mark.parametrize("gradients", [True, False])
def test_each_request_edits_its_rows(gradients: bool) -> None:
    """Rows of several requests are read as copies, and written one after the other."""
    source = torch.cat([X, Y]).requires_grad_(gradients)
    value = source * 2
    event, [one, two] = serve(value, Rows(0, 2), Rows(2, 5), total=5)
    first, second = one.read(), two.read()
    assert torch.equal(first, X * 2)
    assert torch.equal(second, Y * 2)
    first[:, 0] = 1.0
    one.settle(0)
    two.write(second * 3, "here")
    two.settle(0)
    result = event.result()
    expected = torch.cat([X * 2, Y * 6])
    expected[:2, 0] = 1.0
    assert torch.equal(result, expected)
    if gradients:
        (gradient,) = torch.autograd.grad(result.sum(), source)
        assert (gradient[:2, 0] == 0).all()
        assert (gradient[:2, 1:] == 2).all()
        assert (gradient[2:] == 6).all()


def test_a_shared_tensor_is_refused() -> None:
    """A tensor without rows may be edited by the only request, not by one of several."""
    for total, spans in ((2, [ALL]), (5, [Rows(0, 2), Rows(2, 5)])):
        _, served = serve(torch.ones(7), *spans, total=total)
        served[0].read()[0] = 2.0
        if total == 2:
            served[0].settle(0)
        else:
            with pytest.raises(ValueError, match=r"holds a tensor \[7\] whose first axis is not"):
                served[0].settle(0)


def test_gradients_at_values_are_those_of_autograd() -> None:
    """`retain_grad` and `torch.autograd.grad` at what was read are as in the plain module."""
    module = drawn(Residual)
    model = Model(module)
    up = module.up(X)
    act = up.clone().relu_()
    mid = module.mid(act)
    down = module.down(mid + act)
    expected = torch.autograd.grad(down.pow(2).sum(), [up, act, mid])
    with model.trace(X):
        values = [model.up.output, model.act.output, model.mid.output].save()
        values[0].retain_grad()
        loss = model.output.pow(2).sum().save()
    loss.backward(retain_graph=True)
    assert torch.equal(values[0].grad, expected[0])
    gradients = torch.autograd.grad(loss, values)
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))
    assert expected[0].abs().max() > 0


def test_gradients_flow_through_edits() -> None:
    """An edit, a replacement and a skip are parts of the graph, as in a plain computation."""
    module = drawn(MLP)
    model = Model(module)
    scale, vector = torch.tensor(2.0, requires_grad=True), rows(2, 5, width=8).requires_grad_()

    def rest(hidden: torch.Tensor) -> torch.Tensor:
        return module.last(module.act2(hidden)).pow(2).sum()

    second = module.second(module.act(module.first(X)))
    right = torch.autograd.grad(rest(second * scale + vector), [scale, vector, module.first.bias])
    with model.trace(X):
        out = model.second.output
        out *= scale
        out += vector
        in_place = model.output.pow(2).sum().save()
    with model.trace(X):
        model.second.output = model.second.output * scale + vector
        replaced = model.output.pow(2).sum().save()
    for loss in (in_place, replaced):
        got = torch.autograd.grad(loss, [scale, vector, module.first.bias])
        assert all(torch.equal(a, b) for a, b in zip(got, right, strict=True))
    with model.trace(X):
        model.second.skip(vector * scale)
        skipped = model.output.pow(2).sum().save()
    got = torch.autograd.grad(skipped, [scale, vector])
    expected = torch.autograd.grad(rest(vector * scale), [scale, vector])
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert far(expected[1], right[1])


def test_the_gradient_of_an_edited_value_of_one_of_several() -> None:
    """It is that of the value as the block left it, with one input as with several (H22)."""
    module = drawn(MLP)
    model = Model(module)
    hidden = module.first(X).detach()
    hidden[:, 0] *= 2.0
    hidden.requires_grad_()
    loss = module.last(module.act2(module.second(module.act(hidden)))).pow(2).sum()
    (expected,) = torch.autograd.grad(loss, hidden)
    with model.trace(X):
        mine = model.first.output
        mine[:, 0] *= 2.0
        loss = model.output.pow(2).sum()
        with loss.backward():
            alone = mine.grad.save()
    with model.trace() as tracer:
        with tracer.invoke(X):
            mine = model.first.output
            mine[:, 0] *= 2.0
            loss = model.output.pow(2).sum()
            with loss.backward(retain_graph=True):
                beside = mine.grad.save()
        with tracer.invoke(Y):
            other = model.output.save()
    assert torch.equal(alone, expected)
    torch.testing.assert_close(beside, expected)
    assert (expected[:, 0].abs() > 0).any()
    torch.testing.assert_close(other, module(Y))


def test_a_block_without_gradients_reads_copies() -> None:
    """Inside `torch.no_grad()` a block's values have no gradients, and its edits land."""
    module = drawn(MLP)
    model = Model(module)
    with model.trace(X):
        with torch.no_grad():
            hidden = model.first.output.save()
            hidden[:, 0] = 1.0
        out = model.output.save()
    expected = module.first(X).detach()
    expected[:, 0] = 1.0
    assert not hidden.requires_grad
    assert out.requires_grad
    assert torch.equal(out, module.last(module.act2(module.second(module.act(expected)))))


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_a_shape_changed_in_place_is_refused(mode: Any) -> None:
    """A value that a block gives another shape is its error, not the model's (O6)."""
    model = Model(drawn(MLP))
    with mode():
        with pytest.raises(InterventionError, match="RuntimeError"):
            with model.trace(X):
                model.first.output.unsqueeze_(0)
                model.output
