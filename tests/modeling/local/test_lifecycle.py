"""What traces leave behind, which is nothing, and what else calls the module meanwhile."""

from __future__ import annotations

import gc
import threading
import weakref
from contextlib import suppress

import greenlet
import pytest
import torch

from midstream import Model
from midstream.errors import InterventionError
from tests.support.local_modules import MLP, assert_untouched, drawn, far, rows

X = rows(2)


def test_an_unrelated_trace_changes_nothing() -> None:
    """A trace gives the same after another that edits, and after one that fails (case 51)."""
    module = drawn(MLP)
    model = Model(module)

    def once() -> tuple[torch.Tensor, torch.Tensor]:
        with model.trace(X):
            hidden = model.second.output.save()
            out = model.output.save()
        return hidden, out

    before = once()
    with model.trace(rows(5, 3)):
        model.first.output[:] = 0.0
        other = model.output.save()
    assert all(map(torch.equal, once(), before))
    with pytest.raises(InterventionError):
        with model.trace(rows(5, 3)):
            model.first.output[:] = 0.0
            raise ValueError("mine")
    assert all(map(torch.equal, once(), before))
    assert far(other[:2], before[1])


def test_keeping_values_elsewhere_leaves_the_model() -> None:
    """A cache in another form, and on another device, moves values and never weights (case 79)."""
    module = drawn(MLP)
    model = Model(module)
    with model.trace(X) as tracer:
        cache = tracer.cache(dtype=torch.float16, device="meta")
    assert cache["first"].output.is_meta
    assert cache["first"].output.dtype == torch.float16
    forms = {(weight.device.type, weight.dtype) for weight in module.parameters()}
    assert forms == {("cpu", torch.float32)}
    with model.trace(X):
        out = model.output.save()
    assert torch.equal(out, module(X))


def test_nothing_is_left_of_200_traces() -> None:
    """No greenlet, no tensor and no hook stays, even where Python's collector does not run."""
    module = drawn(MLP)
    model = Model(module)

    def one(kind: int) -> None:
        with model.trace() as tracer:
            with tracer.invoke(X):
                hidden = model.first.output.save()
            with tracer.invoke(X):
                hidden = model.first.output.save()
                if kind == 1:
                    tracer.stop()
                if kind == 2:
                    raise ValueError("mine")
                model.output

    def counted() -> tuple[int, int]:
        objects = gc.get_objects()
        kinds = [type(each) for each in objects]
        return sum(issubclass(k, greenlet.greenlet) for k in kinds), kinds.count(torch.Tensor)

    def many(count: int) -> None:
        for index in range(count):
            with suppress(InterventionError):
                one(index % 3)

    many(3)
    gc.collect()
    before = counted()
    gc.disable()
    try:
        many(200)
        after = counted()
    finally:
        gc.enable()
    assert after[0] <= before[0] + 2
    assert after[1] <= before[1] + 4
    assert_untouched(module)


def test_a_value_goes_with_its_last_holder() -> None:
    """A saved tensor is freed when its caller lets it go: the model does not keep it (O5)."""
    model = Model(drawn(MLP))

    def traced() -> weakref.ref[torch.Tensor]:
        with model.trace(X) as tracer:
            hidden = model.first.output.save()
            tracer.stop()
        return weakref.ref(hidden)

    assert traced()() is None


def test_threads_take_turns() -> None:
    """Two threads that trace one model each get their own values (H29)."""
    module = drawn(MLP)
    model = Model(module)
    found: dict[tuple[int, int], torch.Tensor] = {}
    names: list[str] = []

    def work(number: int) -> None:
        for turn in range(10):
            x = torch.full((2, 4), float(number))
            with model.trace(x):
                names.append(threading.current_thread().name)
                model.first.output[:, 0] += number
                out = model.output.save()
            found[number, turn] = out

    threads = [threading.Thread(target=work, args=(i,), name=f"thread-{i}") for i in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in (1, 2):
        hidden = module.first(torch.full((2, 4), float(number))).detach()
        hidden[:, 0] += number
        expected = module.last(module.act2(module.second(module.act(hidden))))
        assert all(torch.equal(found[number, turn], expected) for turn in range(10))
    assert set(names) == {"thread-1", "thread-2"}


def test_threads_with_models_of_their_own() -> None:
    """Two models that hold one module take turns too, and leave it as it was (H29)."""
    module = drawn(MLP)
    wrong: list[str] = []

    def work(number: int) -> None:
        model, x = Model(module), torch.full((2, 4), float(number))
        for _ in range(50):
            with model.trace(x):
                model.first.output[:, 0] += number
                out = model.output.save()
            if not torch.equal(out, expected[number]):
                wrong.append(threading.current_thread().name)

    expected = {}
    for number in (1, 2, 3):
        hidden = module.first(torch.full((2, 4), float(number))).detach()
        hidden[:, 0] += number
        expected[number] = module.last(module.act2(module.second(module.act(hidden))))
    threads = [threading.Thread(target=work, args=(number,)) for number in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert_untouched(module)


def test_plain_calls_of_another_thread() -> None:
    """A thread that calls the module itself, meanwhile, is no part of a trace (H29)."""
    module = drawn(MLP)
    model = Model(module)
    plain = module(X)
    results: list[torch.Tensor] = []

    class Meanwhile(MLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if threading.current_thread() is threading.main_thread():
                thread = threading.Thread(target=lambda: results.append(module(X)))
                thread.start()
                thread.join()
            return super().forward(x)

    module.__class__ = Meanwhile
    with model.trace(torch.zeros(2, 4)):
        model.first.output[:] = 1.0
        out = model.output.save()
    ones = module.last(module.act2(module.second(module.act(torch.ones(2, 8)))))
    assert torch.equal(out, ones)
    assert len(results) == 1
    assert torch.equal(results[0], plain)


def test_plain_calls_in_a_block() -> None:
    """A block that calls the module itself, in the first trace too, does not move its forward."""
    module = drawn(MLP)
    model = Model(module)
    for _ in range(2):
        with model.trace(torch.zeros(2, 4)):
            model.first.output[:] = 1.0
            called = module(X).save()
            second = model.second.output.save()
            out = model.output.save()
        assert torch.equal(called, module(X))
        assert torch.equal(second, module.second(module.act(torch.ones(2, 8))))
        assert torch.equal(out, module.last(module.act2(second)))


def test_recomputation_in_a_backward_pass() -> None:
    """Activation checkpointing runs modules again in a block's backward: no block meets that."""
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(MLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = checkpoint(lambda v: self.act(self.first(v)), x, use_reentrant=False)
            return self.last(self.act2(self.second(hidden)))

    module = drawn(Checkpointed)
    model = Model(module)
    hidden = module.act(module.first(X))
    loss = module.last(module.act2(module.second(hidden))).pow(2).sum()
    (expected,) = torch.autograd.grad(loss, hidden)
    for _ in range(2):
        with model.trace() as tracer:
            with tracer.invoke(X):
                given = model.second.input
                loss = model.output.pow(2).sum()
                with loss.backward():
                    gradient = given.grad.save()
            with tracer.invoke(X):
                model.output
                with pytest.raises(RuntimeError):
                    model.first.output
        torch.testing.assert_close(gradient, expected)
    module.zero_grad()
