"""One trace in the caller's process: contexts, generators, caches, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from midstream import Model, save
from midstream.errors import InterventionError, UnsupportedError
from tests.support.local_modules import MLP, Residual, Twice, assert_untouched, drawn, rows

X = rows(2)


def test_contexts_around_a_trace() -> None:
    """Gradient modes, autocast and a default device around a trace hold for module and block."""
    module = drawn(MLP)
    model = Model(module)
    with torch.no_grad(), model.trace(X):
        hidden = model.first.output.save()
        enabled = torch.is_grad_enabled().save()
    assert not hidden.requires_grad
    assert not enabled
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = module(X)
        with model.trace(X):
            hidden = model.first.output.save()
            out = model.output.save()
    assert hidden.dtype == torch.bfloat16
    assert torch.equal(out, expected)
    with torch.device("meta"), model.trace(X):
        made = torch.zeros(2).save()
        hidden = model.first.output.save()
    assert made.is_meta
    assert hidden.device.type == "cpu"
    with torch.inference_mode(), model.trace(X):
        hidden = model.first.output.save()
        out = model.output.save()
    assert torch.equal(out, module(X))


@pytest.mark.parametrize(
    "context",
    [
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        lambda: torch.device("meta"),
    ],
)
def test_a_context_left_open_stays_in_its_block(context: Any) -> None:
    """A context that a block enters, and waits in, does not reach the forward or the caller."""
    module = drawn(MLP)
    model = Model(module)
    with model.trace(X) as tracer:
        opened = context()
        opened.__enter__()
        model.first.output
        model.second.output
        opened.__exit__(None, None, None)
    inside = tracer.result
    with model.trace(X) as tracer:
        context().__enter__()
        model.first.output
        model.second.output
    for result in (inside, tracer.result):
        assert torch.equal(result, module(X))
        assert result.requires_grad
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()
    assert not torch.is_autocast_enabled("cpu")
    assert not torch.zeros(1).is_meta


def test_generators_are_the_processes_own() -> None:
    """Dropout beside a block is as in the plain call, and a block draws as the caller would."""
    module = drawn(MLP, 0.5).train()
    model = Model(module)
    torch.manual_seed(3)
    expected, drawn_after = module(X), torch.randn(2)
    torch.manual_seed(4)
    assert not torch.equal(module(X), expected)
    torch.manual_seed(3)
    with model.trace(X):
        model.first.output
        out = model.output.save()
        mine = torch.randn(2).save()
    assert torch.equal(out, expected)
    assert torch.equal(mine, drawn_after)


def test_a_trace_in_a_trace_is_refused() -> None:
    """Of the same model and of another; calling another module, or model, works (O13)."""
    module, other = drawn(MLP), Model(drawn(MLP, seed=1))
    model, plain = Model(module), drawn(MLP, seed=1)
    for inner in (model, other):
        with pytest.raises(InterventionError, match="A trace inside a trace is not supported"):
            with model.trace(X):
                inner.trace(X)
    with model.trace(X):
        model.first.output
        called = plain(X).save()
        itself = module(X).save()
        out = model.output.save()
    with model.trace(X):
        through = other(X).save()
        model.first.output
    assert torch.equal(called, plain(X))
    assert torch.equal(itself, module(X))
    assert torch.equal(out, module(X))
    assert torch.equal(through, plain(X))
    for each in (module, plain, other.module):
        assert_untouched(each)


def test_modules_are_called_on_a_blocks_own_values() -> None:
    """Calling a node runs its module untraced, and leaves the value it was given alone (H20)."""
    module = drawn(Residual)
    model = Model(module)
    with model.trace(X):
        hidden = model.up.output.save()
        active = model.act(hidden).save()
        whole = model(X).save()
        out = model.output.save()
    assert torch.equal(hidden, module.up(X))
    assert torch.equal(active, module.up(X).relu())
    assert torch.equal(whole, module(X))
    assert torch.equal(out, module(X))


def test_a_cache_holds_every_call() -> None:
    """Outputs and inputs after all edits; a module called twice has a list (H20)."""
    module = drawn(Twice)
    model = Model(module)
    with model.trace(X) as tracer:
        cache = tracer.cache(include_inputs=True)
        model.act.output[:, 0] = 3.0
    first = module.shared(X)
    act = torch.tanh(first).detach()
    act[:, 0] = 3.0
    assert torch.equal(cache["act"].output, act)
    assert torch.equal(cache["shared"].output[0], first)
    assert torch.equal(cache["shared"].output[1], module.shared(act))
    assert torch.equal(cache["act"].input, first)
    assert not cache["act"].output.requires_grad
    with model.trace(X) as tracer:
        chosen = tracer.cache(modules=[model.act], dtype=torch.float64, detach=False)
    assert list(chosen) == ["act"]
    assert chosen["act"].output.dtype == torch.float64
    assert chosen["act"].output.requires_grad
    with pytest.raises(InterventionError, match="has to be opened before the block reads"):
        with model.trace(X) as tracer:
            model.act.output
            late = tracer.cache()


def test_a_trace_runs_once() -> None:
    """A tracer that has its block is refused a second one, and an invoke beside its input."""
    model = Model(drawn(MLP))
    tracer = model.trace(X)
    with tracer:
        out = model.output.save()
    with pytest.raises(UnsupportedError, match="a trace runs once"):
        with tracer:
            pass
    with pytest.raises(InterventionError, match="belongs into the body of a trace"):
        with model.trace(X) as tracer:
            tracer.invoke(X)


def test_saves_are_bound_in_functions_and_modules() -> None:
    """Numbers, lists and tensors saved in a block are the caller's variables (O1)."""
    model = Model(drawn(MLP))
    number, values = 0, None
    with model.trace(X) as tracer:
        number = len(model.first.output).save()
        values = [1, 2].save()
        given = save({"a": 1})
        unsaved = 5
    assert (number, values, given) == (2, [1, 2], {"a": 1})
    assert tracer.saves == {"number": 2, "values": [1, 2], "given": {"a": 1}}
    with pytest.raises(NameError):
        unsaved


def test_what_a_tracer_does_not_have() -> None:
    """Words of engines are refused with what they are; other names are not there (O24)."""
    tracer = Model(drawn(MLP)).trace(X)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        tracer.nothing
    with pytest.raises(ValueError, match="belongs to asynchronous engines"):
        tracer.backend
