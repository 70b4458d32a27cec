"""A backward pass in a greenlet of its own: modes, hooks and ends."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import greenlet
import pytest
import torch
from torch.autograd import grad

from midstream.errors import OutOfOrderError, UnsupportedError
from midstream.interleaving.gradients import backward
from midstream.interleaving.passes import _THREAD, current_pass
from midstream.interleaving.run import Run

from .graphs import Trace, at_rest, mlp, mlp_with_loss, modes, rows, weights


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """After each test no pass stands anywhere, and the thread is as it was."""
    with at_rest():
        yield


def hooks(tensors: list[torch.Tensor]) -> int:
    """How many hooks tensors and the nodes behind them have; a weak set sees all that live."""
    of_tensors = sum(len(tensor._backward_hooks or ()) for tensor in tensors)
    return of_tensors + sum(_node_hooks(tensor) for tensor in tensors)


def _node_hooks(tensor: torch.Tensor) -> int:
    """Hooks on the node that a tensor came from: a new handle shares their dictionary."""
    if tensor.grad_fn is None:
        return 0
    handle = tensor.grad_fn.register_prehook(lambda _: None)
    count = len(handle.hooks_dict_ref()) - 1
    handle.remove()
    return count


def test_no_hook_is_left() -> None:
    """Neither on a tensor nor on a node: in the body, after it, after an error (H22)."""
    layers, states, _ = mlp_with_loss()
    tensors = [*states, *layers]
    handle = states[0].grad_fn.register_prehook(lambda _: None)
    assert hooks(tensors) == 1  # a hook would be counted
    handle.remove()
    loss = states[-1].sum()
    with backward(loss, retain_graph=True) as gradients:
        gradients.of(states[1]).grad[:] = 0
        assert hooks(tensors) == 0
    assert hooks(tensors) == 0
    with pytest.raises(KeyError), backward(loss, retain_graph=True) as gradients:
        gradients.of(states[1]).grad
        raise KeyError
    assert hooks(tensors) == 0
    with pytest.raises(OutOfOrderError), backward(loss) as gradients:
        gradients.of(states[1]).grad
        gradients.of(states[2]).grad
    assert hooks(tensors) == 0


def test_a_body_that_raises_ends_the_pass() -> None:
    """What lies behind it is not run, the error is the body's own, and later passes work (H22)."""
    layers, states, loss = mlp_with_loss()
    h = states[1]
    with pytest.raises(KeyError, match="mine"):
        with Trace():
            with loss.backward(retain_graph=True):
                h.grad[:] = 0
                raise KeyError("mine")
    assert layers[3].grad is not None
    assert layers[1].grad is None
    (expected,) = grad(loss, [h], retain_graph=True)
    with Trace():
        with loss.backward():
            got = h.grad.save()
    assert torch.equal(got, expected)


def test_a_block_that_is_killed_in_the_body() -> None:
    """The kill ends its pass, without the rest of it, and later passes work (H22)."""
    layers, states, loss = mlp_with_loss()
    ends: list[str] = []

    def block() -> None:
        with backward(loss, retain_graph=True) as gradients:
            gradients.of(states[2]).grad
            try:
                run._park()
            finally:
                ends.append("unwound")

    before = modes()
    run = Run(block)
    run.resume()
    assert not run.done
    assert len(_THREAD.passes) == 1
    assert modes() == before
    states_beside = mlp(rows(3, 6), layers)  # the forward goes on beside it, with its graph
    assert states_beside[-1].requires_grad
    run.kill()
    assert run.done
    assert run.error is None
    assert ends == ["unwound"]
    assert (layers[3].grad is not None, layers[0].grad) == (True, None)
    assert hooks([*states, *layers]) == 0
    expected = grad(loss, [states[0]], retain_graph=True)
    with backward(loss) as gradients:
        assert torch.equal(gradients.of(states[0]).grad, expected[0])


def test_a_block_that_waits_in_the_body_goes_on() -> None:
    """A pass stands still while the block waits for the model, and gives the rest after it."""
    _, states, loss = mlp_with_loss()
    expected = grad(loss, states, retain_graph=True)
    got = []

    def block() -> None:
        with backward(loss) as gradients:
            for state in reversed(states):
                got.append(gradients.of(state).grad)
                run._park()

    run = Run(block)
    while not run.done:
        run.resume()
    assert run.error is None
    assert all(map(torch.equal, got[::-1], expected))


def test_two_blocks_in_their_bodies_at_once() -> None:
    """Of bodies that wait for each other the first to go on ends the other, which is told (H22)."""
    _, states, loss = mlp_with_loss()
    got: list[torch.Tensor] = []

    def block(index: int) -> None:
        with backward(loss, retain_graph=True) as gradients:
            got.append(gradients.of(states[2]).grad)
            runs[index]._park()
            if index == 1:
                got.append(gradients.of(states[1]).grad)

    runs = [Run(lambda: block(0)), Run(lambda: block(1))]
    for run in runs:
        run.resume()
    assert len(_THREAD.passes) == 2
    for run in runs:
        run.resume()
    assert runs[0].error is None
    assert isinstance(runs[1].error, UnsupportedError)
    assert "wait for nothing" in str(runs[1].error)
    assert torch.equal(got[0], got[1])


def test_blocks_one_after_the_other() -> None:
    """A block's `.grad` is of its own pass, while another block's stands still (H22)."""
    _, states, loss = mlp_with_loss()
    other = states[-1].sum()
    expected = [grad(each, [states[1]], retain_graph=True)[0] for each in (loss, other)]
    got: dict[int, torch.Tensor] = {}

    def first() -> None:
        with backward(loss, retain_graph=True):
            run._park()
            inner = current_pass()
            assert inner is not None
            got[0] = inner.of(states[1]).grad

    def second() -> None:
        with backward(other, retain_graph=True):
            inner = current_pass()
            assert inner is not None
            got[1] = inner.of(states[1]).grad

    run = Run(first)
    run.resume()
    between = Run(second)
    between.resume()
    run.resume()
    assert run.error is None
    assert between.error is None
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])
    assert not torch.equal(got[0], got[1])


def live() -> tuple[int, int]:
    """Greenlets and tensors that are alive."""
    gc.collect()
    objects = gc.get_objects()
    greenlets = sum(issubclass(type(each), greenlet.greenlet) for each in objects)
    return greenlets, sum(type(each) is torch.Tensor for each in objects)


def test_a_hundred_passes_leave_nothing() -> None:
    """Finished, failed and killed ones alike: no greenlet and no tensor more than before (H22)."""
    _, states, loss = mlp_with_loss()
    h0, h2 = states[0], states[2]

    def waits() -> None:
        with backward(loss, retain_graph=True) as gradients:
            gradients.of(h2).grad
            run._park()

    def once() -> None:
        with Trace():
            with loss.backward(retain_graph=True):
                h2.grad[:] = 0
                h0.grad
        with pytest.raises(OutOfOrderError), Trace():
            with loss.backward(retain_graph=True):
                h0.grad
                h2.grad

    once()
    before = live()
    for _ in range(100):
        once()
        run = Run(waits)
        run.resume()
        run.kill()
        del run
    after = live()
    kept = [mlp_with_loss()]  # more would be seen
    assert live()[1] > after[1] + 4
    assert after == before


def test_nothing_waits_for_the_collector() -> None:
    """Without it, a pass is gone when its statement has ended."""
    _, states, loss = mlp_with_loss()
    gc.collect()
    gc.disable()
    try:
        with backward(loss) as gradients:
            given = weakref.ref(gradients.of(states[1]).grad)
        gone = weakref.ref(gradients)
        del gradients
        assert gone() is None
        assert given() is None
    finally:
        gc.enable()


def test_an_earlier_pass_waits_for_a_later_one() -> None:
    """Asked while a later pass stands still, it refuses; its end ends the later one (H22)."""
    states = mlp(rows(3, 6), weights(3))
    first = backward(states[-1].sum(), retain_graph=True)
    later = backward(states[-1].square().sum(), retain_graph=True)
    first.__enter__()
    later.__enter__()
    with pytest.raises(UnsupportedError, match="Another backward pass has begun"):
        first.of(states[0]).grad
    assert later.of(states[1]).grad.shape == (3, 6)
    first.__exit__(None, None, None)
    with pytest.raises(UnsupportedError, match="was ended"):
        later.of(states[0]).grad
    with pytest.raises(UnsupportedError, match="was ended"):
        later.__exit__(None, None, None)


def test_a_hook_of_the_users_sees_plain_tensors() -> None:
    """Code that the pass itself runs is not its body, and cannot stop it."""
    states = mlp(rows(3, 6), weights(3))
    h, first, loss = states[1], states[0], states[-1].sum()
    refused: list[str] = []
    with backward(loss) as gradients:

        def hook(gradient: torch.Tensor) -> None:
            try:
                gradients.of(first).grad
            except UnsupportedError as error:
                refused.append(str(error))

        h.register_hook(hook)
        gradients.of(first).grad
    assert "A hook that the backward pass runs" in refused[0]


def test_the_pass_keeps_nothing_alive() -> None:
    """Whoever keeps the value of `as` keeps neither graph nor gradients."""
    states = mlp(rows(3, 6), weights(3))
    loss = states[-1].sum()
    with backward(loss) as gradients:
        gone = weakref.ref(gradients.of(states[0]).grad)
    graph = weakref.ref(loss)
    del loss, states
    assert gone() is None
    assert graph() is None


def test_another_pass_that_a_hook_runs() -> None:
    """It goes over the place that the body waits for, and stops for nobody (H22)."""
    _, states, loss = mlp_with_loss()
    other = states[2].sum()
    expected = grad(loss, [states[1]], retain_graph=True)
    assert not torch.equal(expected[0], grad(other, [states[1]], retain_graph=True)[0])
    ran = []

    def hook(_: torch.Tensor) -> None:
        handle.remove()
        other.backward(retain_graph=True)
        ran.append(torch.is_grad_enabled())

    handle = states[3].register_hook(hook)
    with backward(loss, retain_graph=True) as gradients:
        assert ran == []
        assert torch.equal(gradients.of(states[1]).grad, expected[0])
    assert ran == [False]


def test_hooks_of_the_users_are_in_the_blocks_context() -> None:
    """A save in a hook that the pass runs is a save of the block."""
    _, states, loss = mlp_with_loss()
    h, first = states[1], states[0]
    expected = grad(loss, h, retain_graph=True)[0].norm()
    with Trace():
        norms = []

        def hook(gradient: torch.Tensor) -> None:
            norms.append(gradient.norm())
            norms.save()

        h.register_hook(hook)
        with loss.backward(retain_graph=True):
            first.grad
    assert norms == [expected]


def test_contexts_of_another_library() -> None:
    """An object whose `backward` gives a context of its own is left to it."""

    class Engine:
        grad = "its own"

        def backward(self, loss: torch.Tensor) -> Any:
            return torch.enable_grad()

    engine, loss = Engine(), torch.ones(())
    with Trace():
        with engine.backward(loss):
            got = engine.grad.save()
    assert got == "its own"
