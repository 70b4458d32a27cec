"""Blocks that become a part of a model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from midstream import Model
from midstream.errors import InterventionError
from tests.support.local_modules import MLP, assert_untouched, drawn, far, rows

X, Y = rows(2, 1), rows(3, 2)


def after_first(module: MLP, hidden: torch.Tensor) -> torch.Tensor:
    """What the rest of the module makes of the first layer's output."""
    return module.last(module.act2(module.second(module.act(hidden))))


def test_an_edited_copy() -> None:
    """`edit()` leaves the model as it is, and its edits do not pile up (H23, case 53)."""
    module = drawn(MLP)
    model = Model(module)
    plain = module(X)
    with model.edit() as (_, edited):
        model.first.output[:, 0] = 2.0
    hidden = module.first(X).detach()
    hidden[:, 0] = 2.0
    expected = after_first(module, hidden)
    assert far(expected, plain)
    for _ in range(3):  # an edit does not add up
        assert torch.equal(edited(X), expected)
    assert torch.equal(model(X), plain)
    with edited.trace(X):
        seen = edited.first.output.save()
        out = edited.output.save()
    assert torch.equal(seen, hidden)
    assert torch.equal(out, expected)
    with model.trace(X):
        out = model.output.save()
    assert torch.equal(out, plain)
    assert edited.module is module
    assert_untouched(module)


def test_an_edit_of_an_edit() -> None:
    """Edits run in their order, before the trace's block; copies keep what they had (H23)."""
    module = drawn(MLP)
    model = Model(module)
    with model.edit() as (_, one):
        model.first.output[:] = 1.0
    with one.edit() as (_, two):
        one.first.output[:] *= 3.0
    assert torch.equal(one(X), after_first(module, torch.ones(2, 8)))
    assert torch.equal(two(X), after_first(module, torch.full((2, 8), 3.0)))
    with two.trace(X):
        two.first.output[:] += 1.0
        out = two.output.save()
    assert torch.equal(out, after_first(module, torch.full((2, 8), 4.0)))
    two.clear_edits()
    assert torch.equal(two(X), module(X))
    assert torch.equal(one(X), after_first(module, torch.ones(2, 8)))


def test_an_edit_in_place() -> None:
    """`inplace=True` edits the model itself until `clear_edits()` (H23)."""
    module = drawn(MLP)
    model = Model(module)
    with model.edit(inplace=True):
        model.first.output[:] = 1.0
    assert torch.equal(model(X), after_first(module, torch.ones(2, 8)))
    assert torch.equal(model.trace(X, trace=False), after_first(module, torch.ones(2, 8)))
    model.clear_edits()
    assert torch.equal(model(X), module(X))


def test_an_edit_runs_once_for_each_input() -> None:
    """Of several invokes each has the edit on its own rows (H23)."""
    module = drawn(MLP)
    model = Model(module)
    with model.edit() as (_, edited):
        model.first.output[0] = 1.0
    with edited.trace() as tracer:
        with tracer.invoke(X):
            one = edited.first.output.save()
        with tracer.invoke(Y):
            two = edited.first.output.save()
    hidden = module.first(torch.cat([X, Y])).detach()
    hidden[0] = hidden[2] = 1.0
    assert torch.equal(torch.cat([one, two]), hidden)


def test_values_of_an_edit_are_those_of_its_capture() -> None:
    """What the caller binds anew after the edit does not reach it."""
    module = drawn(MLP)
    model = Model(module)
    factor = 1.0
    with model.edit(inplace=True):
        model.first.output[:] = factor
    factor = 5.0
    assert torch.equal(model(X), after_first(module, torch.ones(2, 8)))


def test_an_edit_that_fails() -> None:
    """Its error is that of the call, whether the call has a block or not (O10)."""
    module = drawn(MLP)
    model = Model(module)
    with model.edit(inplace=True):
        model.first.output
        raise ValueError("of the edit")
    with pytest.raises(InterventionError, match="^ValueError: of the edit"):
        model(X)
    with pytest.raises(InterventionError, match="^ValueError: of the edit"):
        with model.trace(X):
            model.output
    model.clear_edits()
    assert torch.equal(model(X), module(X))
    assert_untouched(module)


def test_an_attached_module() -> None:
    """An attached module joins the tree; called with `hook=True`, other blocks meet it (H24)."""
    module = drawn(MLP)
    model = Model(module)
    model.second.adapter = drawn(nn.Linear, 8, 8, seed=3)
    adapter = module.second.adapter
    with model.edit(inplace=True):
        model.second.output = model.second.adapter(model.second.output, hook=True)
    given = module.second(module.act(module.first(X)))
    with model.trace(X):
        inside = model.second.adapter.input.save()
        made = model.second.adapter.output.save()
        out = model.output.save()
    assert torch.equal(inside, given)
    assert torch.equal(made, adapter(given))
    assert torch.equal(out, module.last(module.act2(adapter(given))))
    with model.trace(X):
        model.second.adapter.output[:] = 0.0
        out = model.output.save()
    assert torch.equal(out, module.last(torch.zeros(2, 8)))
    with pytest.raises(InterventionError, match="cannot be attached inside a block"):
        with model.trace(X):
            model.first.adapter = adapter
    with pytest.raises(AttributeError, match="is taken, and by no module"):
        model.first.weight = adapter
