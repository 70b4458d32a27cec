"""Calls with blocks beside each forward: steps, stops, errors, and what is left behind: nothing."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from midstream import Model, save
from midstream.errors import InterventionError, StepsCutShortWarning
from midstream.interleaving.copies import Rows
from midstream.modeling.local.hosted import LocalBlock
from midstream.modeling.local.running import Beside, Running
from midstream.modeling.local.tracer import Tracer
from midstream.tracing import Block
from tests.support.local_modules import MLP, Looped, assert_untouched, drawn, far, rows

X = rows(2)


def run_loop(
    model: Model, count: int, *functions: Any, rows_each: int = 2
) -> tuple[Any, list[Any]]:
    """Call a function that runs the module `count` times, with blocks that are functions."""
    tracer = Tracer(model, "trace", None, {})
    blocks = [LocalBlock(Block(function=each), model, tracer, {}) for each in functions]
    beside = [
        Beside(block, Rows(index * rows_each, (index + 1) * rows_each))
        for index, block in enumerate(blocks)
    ]
    running = Running(model._host.interleaver(model.tree), beside, rows_each * len(blocks))

    def loop(x: torch.Tensor) -> torch.Tensor:
        for _ in range(count):
            x = model.module(x)
        return x

    x = torch.cat([rows(rows_each, seed) for seed in range(1, len(blocks) + 1)])
    result = running.call(loop, (x,), {})
    return result, blocks


def states(module: nn.Module, x: torch.Tensor, count: int) -> list[torch.Tensor]:
    """The state after each of so many calls."""
    found = []
    for _ in range(count):
        x = module(x)
        found.append(x)
    return found


def test_every_forward_is_a_step() -> None:
    """`tracer.iter` and `all()` run their body in each forward of the root module (H20, O8)."""
    module = drawn(Looped)
    model = Model(module)
    expected = states(module, X, 5)

    def chosen(model: Any, tracer: Any) -> dict[str, Any]:
        found = []
        for step in tracer.iter[[0, 2, 3]]:
            found.append((step, model.output))
        return {"found": dict(found)}

    def sliced(model: Any, tracer: Any) -> dict[str, Any]:
        found = []
        for step in tracer.iter[1:4]:
            found.append((step, model.output))
        return {"found": dict(found)}

    def every(model: Any, tracer: Any) -> dict[str, Any]:
        found = []
        for step in tracer.all():
            found.append((step, model.output))
        return {"found": dict(found), "after": tracer.result}

    for function, steps in ((chosen, [0, 2, 3]), (sliced, [1, 2, 3]), (every, [0, 1, 2, 3, 4])):
        result, [block] = run_loop(model, 5, function)
        assert block.run.error is None
        found = block.saves()["found"]
        assert list(found) == steps
        assert all(torch.equal(found[step], expected[step]) for step in steps)
        assert torch.equal(result, expected[-1])
    assert torch.equal(block.saves()["after"], expected[-1])


def test_a_write_in_one_step_reaches_the_next() -> None:
    """An edit in one step changes what later steps start from, and no step before (H20, O6)."""
    module = drawn(Looped)
    model = Model(module)

    def block(model: Any, tracer: Any) -> dict[str, Any]:
        found = []
        for step in tracer.iter[:4]:
            if step == 2:
                model.cell.output[:] = 1.0
            found.append(model.output)
        return {"found": found}

    result, [block_] = run_loop(model, 4, block)
    plain = states(module, X, 2)
    third = torch.tanh(torch.ones(2, 4))
    expected = [*plain, third, module(third)]
    found = block_.saves()["found"]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert torch.equal(result, expected[-1])
    assert far(expected[-1], states(module, X, 4)[-1])


def test_a_loop_cut_short_warns_and_goes_on() -> None:
    """A bounded loop over more forwards than there are warns; statements after it run (H26, O8)."""
    model = Model(drawn(MLP))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with model.trace(X) as tracer:
            for _ in tracer.iter[:3]:
                out = model.output.save()
            after = save("reached")
    assert after == "reached"
    [warning] = caught
    assert warning.category is StepsCutShortWarning
    assert "asked for 3 steps and the request ran 1" in str(warning.message)
    assert "A step is one forward" in str(warning.message)
    assert "min_tokens" not in str(warning.message)  # there is no request to hold to a number
    assert warning.filename == __file__
    with pytest.raises(StepsCutShortWarning):
        with model.trace(X) as tracer:
            for _ in tracer.iter[1:3]:
                model.output


def test_a_stop_ends_the_forward() -> None:
    """`tracer.stop()` leaves the forward where it is, unless another block needs it (O9)."""
    module = drawn(MLP)
    model = Model(module)
    ran: list[str] = []
    handles = [
        module.get_submodule(path).register_forward_pre_hook(lambda *_, path=path: ran.append(path))
        for path in ("first", "last")
    ]
    reached = 0
    with model.trace(X) as tracer:
        hidden = model.first.output.save()
        tracer.stop()
        reached = save(1)
    assert ran == ["first"]
    assert reached == 0
    assert tracer.result is None
    assert torch.equal(hidden, module.first(X))
    ran.clear()
    with model.trace() as tracer:
        with tracer.invoke(X):
            hidden = model.first.output.save()
            tracer.stop()
        with tracer.invoke(rows(3)):
            out = model.output.save()
    for handle in handles:
        handle.remove()
    assert ran == ["first", "last"]
    assert torch.allclose(out, module(rows(3)))
    with model.trace(X) as tracer:
        tracer.stop()
    assert_untouched(module)


def test_the_result_is_what_the_call_returned() -> None:
    """`tracer.result` waits for the call's value in the block, and has it after it (H10)."""
    module = drawn(MLP)
    model = Model(module)
    with model.trace(X) as tracer:
        hidden = model.first.output.save()
        inside = tracer.result.save()
        twice = (inside * 2).save()
    assert torch.equal(inside, module(X))
    assert torch.equal(twice, module(X) * 2)
    assert torch.equal(tracer.result, module(X))
    with pytest.raises(InterventionError, match="requested after the forward pass ended"):
        with model.trace(X) as tracer:
            tracer.result
            model.first.output


@pytest.mark.parametrize("where", ["before", "inside", "last", "after"])
def test_errors_in_blocks(where: str) -> None:
    """An error anywhere in a block arrives with type, text and line; its cause is itself (O10)."""
    module = drawn(MLP)
    model = Model(module)
    hidden = None
    with pytest.raises(InterventionError, match="^KeyError: 'mine'") as caught:
        with model.trace(X) as tracer:
            if where == "before":
                raise KeyError("mine")
            hidden = model.first.output.save()
            if where == "inside":
                raise KeyError("mine")
            model.output
            if where == "last":
                raise KeyError("mine")
            tracer.result
            raise KeyError("mine")
    assert isinstance(caught.value.__cause__, KeyError)
    assert f'File "{__file__}", line' in str(caught.value)
    assert 'raise KeyError("mine")' in str(caught.value)
    assert (hidden is None) == (where == "before")
    assert_untouched(module)
    with model.trace(X):
        out = model.output.save()
    assert torch.equal(out, module(X))


def test_an_error_of_the_module() -> None:
    """An error of the module itself is raised as it is; what was saved before it is there (O10)."""
    module = drawn(MLP)
    model = Model(module)
    with pytest.raises(RuntimeError, match="cannot be multiplied") as caught:
        with model.trace(rows(2, width=5)) as tracer:
            given = model.first.input.save()
            model.first.output
    assert not isinstance(caught.value, InterventionError)
    assert torch.equal(given, rows(2, width=5))
    assert tracer.result is None
    assert_untouched(module)


def test_failures_of_several_invokes() -> None:
    """All failures are in the text, and values of invokes that finished are bound (O10)."""
    module = drawn(MLP)
    model = Model(module)
    with pytest.raises(InterventionError, match="2 blocks of this trace failed") as caught:
        with model.trace() as tracer:
            with tracer.invoke(X):
                raise ValueError("one")
            with tracer.invoke(X):
                model.second.output
                raise KeyError("two")
            with tracer.invoke(rows(3)):
                out = model.output.save()
    assert str(caught.value).startswith("ValueError: one")
    assert "KeyError: 'two'" in str(caught.value)
    assert torch.allclose(out, module(rows(3)))


@pytest.mark.parametrize("kind", ["block", "module"])
def test_an_interrupt_stays_one(kind: str) -> None:
    """Ctrl-C in a block or in the module is a KeyboardInterrupt for the caller, nothing is left."""

    class Interrupted(MLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.first(x)
            if kind == "module":
                raise KeyboardInterrupt
            return super().forward(x)

    module = drawn(Interrupted)
    model = Model(module)
    with pytest.raises(KeyboardInterrupt):
        with model.trace(X):
            hidden = model.first.output.save()
            model.second.output
            raise KeyboardInterrupt
    assert torch.equal(hidden, module.first(X))
    assert_untouched(module)


def test_a_plain_call_between_two_forwards_is_no_step() -> None:
    """A block that calls the module itself, before it asks for anything, begins no step (H20)."""
    module = drawn(Looped)
    model = Model(module)
    expected = states(module, X, 3)

    def block(model: Any, tracer: Any) -> dict[str, Any]:
        found = []
        for step in tracer.iter[:3]:
            called = module(X)
            found.append((step, called, model.output))
        return {"found": found}

    result, [block_] = run_loop(model, 3, block)
    assert block_.run.error is None
    found = block_.saves()["found"]
    assert [step for step, _, _ in found] == [0, 1, 2]
    assert all(torch.equal(called, expected[0]) for _, called, _ in found)
    assert all(torch.equal(out, right) for (_, _, out), right in zip(found, expected, strict=True))
    assert torch.equal(result, expected[-1])


class HidingError(Exception):
    """An exception without its arguments."""

    @property
    def args(self) -> Any:  # type: ignore[override]
        """Refuse to give them."""
        raise KeyError("args")


def test_an_exception_that_hides_its_arguments() -> None:
    """Whatever a block raises is the cause of an `InterventionError`, even if it cannot be read."""
    model = Model(torch.nn.Linear(2, 2))

    def block(model: Any, tracer: Any) -> None:
        raise HidingError

    with pytest.raises(InterventionError, match="HidingError") as raised:
        model.trace(torch.ones(1, 2), block=block)
    assert type(raised.value.__cause__) is HidingError
