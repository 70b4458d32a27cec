"""Traces in a session see each other's variables."""

from __future__ import annotations

import pytest
import torch

from midstream import Model
from midstream.errors import InterventionError, UnsupportedError
from tests.support.local_modules import MLP, drawn, rows

X, Y = rows(2, 1), rows(2, 2)


def test_a_later_trace_sees_what_an_earlier_one_bound() -> None:
    """A variable that was not saved is there in the session's next traces, not behind it (H25)."""
    module = drawn(MLP)
    model = Model(module)
    with model.session():
        with model.trace(X):
            hidden = model.first.output
        with model.trace(Y):
            model.first.output[:] = hidden
            out = model.output.save()
    assert torch.equal(out, module(X))
    assert not torch.equal(out, module(Y))
    with pytest.raises(NameError):
        hidden
    with pytest.raises(InterventionError, match="NameError: name 'hidden'"):
        with model.trace(Y):
            model.first.output[:] = hidden


def test_what_the_caller_binds_anew_wins() -> None:
    """A variable that the caller has bound since is the caller's."""
    model = Model(drawn(MLP))
    with model.session():
        with model.trace(X):
            number = 1
            model.first.output
        number = 2
        with model.trace(X):
            seen = [number].save()
    assert seen == [2]


def test_a_failed_trace_leaves_the_session() -> None:
    """What a block bound before it failed is there, and after an error there is no session."""
    model = Model(drawn(MLP))
    with model.session():
        with pytest.raises(InterventionError):
            with model.trace(X):
                before = 3
                raise ValueError("mine")
        with model.trace(X):
            seen = [before].save()
    assert seen == [3]
    with pytest.raises(ZeroDivisionError):
        with model.session():
            raise ZeroDivisionError
    with model.session():
        pass


def test_a_session_in_a_session_is_refused() -> None:
    """The outer one does what the inner one would."""
    model = Model(drawn(MLP))
    with model.session():
        with pytest.raises(UnsupportedError, match="A session inside a session"):
            with model.session():
                pass
    with model.session():
        pass


def test_an_edited_copy_shares_the_session() -> None:
    """Copies that are made in a session see its variables, and have none when it is over (H25)."""
    module = drawn(MLP)
    model = Model(module)
    with model.session():
        with model.edit() as (_, edited):
            model.second.output[:] = 0.0
        with model.trace(X):
            hidden = model.first.output
        with edited.trace(Y):
            seen = hidden.clone().save()
            out = edited.output.save()
    assert torch.equal(seen, module.first(X))
    assert torch.equal(out, module.last(torch.zeros(2, 8)))
    with edited.session():
        pass
    with pytest.raises(InterventionError, match="NameError: name 'hidden'"):
        with edited.trace(X):
            seen = hidden.clone().save()
