"""Blocks beside forwards in the caller's own process: order, missed places, calls of blocks."""

from __future__ import annotations

import contextvars
import weakref

import pytest
import torch
from torch import nn

from midstream import Model
from midstream.errors import InterventionError
from midstream.interleaving.beside import LocalOrder
from midstream.interleaving.locations import Location
from tests.support.local_modules import MLP, Routed, drawn, rows

X, Y = rows(2, 1), rows(3, 2)
A, B = Location("a", "output"), Location("b", "output")
USERS = contextvars.ContextVar("USERS", default="unset")


def learned(*path: Location) -> LocalOrder:
    """An order that a first step has shown."""
    order = LocalOrder({"": nn.Identity(), "a": nn.Identity(), "b": nn.Identity()})
    order.begin_step()
    order.learning = True
    for location in path:
        order.reach(location)
    order.finish_step(learned=True)
    return order


def test_what_was_not_seen_has_not_passed() -> None:
    """A step may have another order than the first: only what it reached counts."""
    order = learned(A, B)
    order.begin_step()
    order.reach(B)
    assert not order.has_passed(A)
    assert order.seems_passed(A)
    order.reach(A)
    order.current = A
    assert not order.has_passed(A)
    order.current = None
    assert order.has_passed(A)
    order.begin_step()
    assert not order.has_passed(A)


def test_what_comes_again_has_not_passed() -> None:
    """A module that a forward calls several times can be waited for; in the first, every one."""
    order = learned(A, B, A)
    order.begin_step()
    order.reach(A)
    order.reach(B)
    order.current = None
    assert not order.has_passed(A)
    assert order.has_passed(B)
    first = LocalOrder({"a": nn.Identity()})
    first.begin_step()
    first.learning = True
    first.reach(A)
    assert not first.has_passed(A)


def test_a_missed_place_is_told_as_such() -> None:
    """A block that waited for what lay behind it is told so, and what comes after it goes on."""
    module = drawn(MLP)
    model = Model(module)
    with model.trace(X):
        model.output
    with pytest.raises(InterventionError, match="'model.first.output.i0' was requested but the"):
        with model.trace(X):
            model.second.output
            model.first.output
    with model.trace(X):
        model.second.output
        try:
            model.first.output
        except RuntimeError as error:
            text = str(error).save()
        done = [1].save()
    assert "already ran past it" in text
    assert done == [1]


def test_another_block_goes_on_when_one_misses() -> None:
    """One invoke's order is no concern of another's."""
    module = drawn(MLP)
    model = Model(module)
    with pytest.raises(InterventionError, match=r"^OutOfOrderError"):
        with model.trace() as tracer:
            with tracer.invoke(X):
                model.second.output
                model.first.output
            with tracer.invoke(Y):
                out = model.output.save()
    assert torch.equal(out, module(torch.cat([X, Y]))[2:])


def test_blocks_have_the_callers_context() -> None:
    """A block reads the caller's context variables; what it sets is its own."""
    model = Model(drawn(MLP))
    token = USERS.set("caller's")
    try:
        with model.trace(X):
            before = USERS.get().save()
            USERS.set("block's")
            model.first.output
            after = USERS.get().save()
    finally:
        here = USERS.get()
        USERS.reset(token)
    assert (before, after, here) == ("caller's", "block's", "caller's")


def test_a_module_that_a_block_calls_with_hook() -> None:
    """Its locations are served to the other blocks of the same rows, and to no other rows (H24)."""
    module = drawn(MLP)
    model = Model(module)
    model.extra = drawn(nn.Linear, 8, 8, seed=3)
    with model.edit(inplace=True):
        model.first.output = model.extra(model.first.output, hook=True)
    with model.trace() as tracer:
        with tracer.invoke(X):
            mine = model.extra.output.save()
        with tracer.invoke(Y):
            given = model.extra.input.clone().save()
            model.extra.output[:] = 1.0
            out = model.output.save()
    hidden = module.first(torch.cat([X, Y]))
    torch.testing.assert_close(mine, module.extra(hidden)[:2])
    torch.testing.assert_close(given, hidden[2:])
    ones = module.last(module.act2(module.second(module.act(torch.ones(3, 8)))))
    torch.testing.assert_close(out, ones)


def test_nothing_of_a_call_is_kept() -> None:
    """Neither the caller's inputs nor the blocks are held once the trace is over."""
    model = Model(drawn(Routed))

    def traced() -> weakref.ref[torch.Tensor]:
        x = rows(2, 9)
        with model.trace(x, order="ab"):
            model.a.output[:] = 1.0
        return weakref.ref(x)

    assert traced()() is None
