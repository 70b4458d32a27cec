"""Blocks of one trace see each other's variables."""

from __future__ import annotations

import pytest
import torch

from midstream import Model
from midstream.errors import InterventionError
from midstream.modeling.local.names import Names
from tests.support.local_modules import MLP, drawn, rows

X, Y = rows(2, 1), rows(2, 2)


def test_a_name_is_looked_up_in_its_own_block_first() -> None:
    """Then in the others, in order; what those look up in turn is not searched."""
    one, two = Names({"a": 1}, [{"b": 2}]), Names({"b": 3, "a": 4}, [])
    both = Names({}, [one, two])
    assert (both["a"], both["b"]) == (1, 3)
    assert "a" not in both
    with pytest.raises(KeyError):
        both["c"]
    both.part()
    with pytest.raises(KeyError):
        both["a"]


def test_a_later_invoke_sees_an_earlier_ones_variables() -> None:
    """A name that an invoke above has bound is that block's, saved or not (H20)."""
    module = drawn(MLP)
    model = Model(module)
    with model.trace() as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke(X):
            hidden = model.first.output
            barrier()
        with tracer.invoke(Y):
            barrier()
            model.first.output = hidden
            out = model.output.save()
    assert torch.equal(out, module(torch.cat([X, X]))[2:])
    assert not torch.equal(out, module(torch.cat([X, Y]))[2:])


def test_an_earlier_value_of_the_caller_is_not_taken() -> None:
    """A name that another invoke assigns is that one's, though the caller has one too (H20)."""
    model = Model(drawn(MLP))
    value = "the caller's"
    with model.trace() as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke(X):
            model.first.output
            value = "the first invoke's"
            barrier()
        with tracer.invoke(Y):
            barrier()
            seen = [value].save()
    assert seen == ["the first invoke's"]


def test_a_name_that_is_not_bound_yet() -> None:
    """The error says that another invoke assigns it, and to use a barrier; once (H20, C46)."""
    model = Model(drawn(MLP))
    with pytest.raises(InterventionError, match="NameError: name 'late'") as caught:
        with model.trace() as tracer:
            with tracer.invoke(X):
                late = model.second.output
            with tracer.invoke(Y):
                model.first.output = late
    assert str(caught.value).count("Another invoke assigns 'late'") == 1
    with pytest.raises(InterventionError, match="NameError: name 'nowhere'") as caught:
        with model.trace() as tracer:
            with tracer.invoke(X):
                nowhere
            with tracer.invoke(Y):
                model.first.output
    assert "Another invoke" not in str(caught.value)


def test_own_names_stay_ones_own() -> None:
    """Two invokes that assign one name each have their own."""
    model = Model(drawn(MLP))
    with model.trace() as tracer:
        with tracer.invoke(X):
            number = 1
            model.first.output
            one = number.save()
        with tracer.invoke(Y):
            number = 2
            model.first.output
            two = number.save()
    assert (one, two) == (1, 2)


def test_functions_of_a_block_see_the_others_names() -> None:
    """A function defined in one invoke is called in another, and comprehensions look names up."""
    model = Model(drawn(MLP))
    with model.trace() as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke(X):

            def twice(value: int) -> int:
                return factor * value

            factor = 2
            model.first.output
            barrier()
        with tracer.invoke(Y):
            barrier()
            found = [twice(each) + factor for each in range(3)].save()
    assert found == [2, 4, 6]
