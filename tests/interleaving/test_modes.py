"""The modes of a thread, which two sides leave as they like and find again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.autograd import grad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from midstream.errors import OutOfOrderError
from midstream.interleaving.gradients import backward

from .graphs import at_rest, mlp, mlp_with_loss, modes, rows, weights


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """After each test no pass stands anywhere, and the thread is as it was."""
    with at_rest():
        yield


class Functions(TorchFunctionMode):
    """Counts what it sees."""

    seen = 0

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.seen += 1
        return function(*args, **(kwargs or {}))


class Dispatches(TorchDispatchMode):
    """Counts what it sees."""

    seen = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.seen += 1
        return function(*args, **(kwargs or {}))


@contextmanager
def doubles() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


MODES = {
    "none": lambda: torch.enable_grad(),
    "no gradients": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "float64": doubles,
    "functions": Functions,
    "dispatches": Dispatches,
    "device": lambda: torch.device("meta"),
    "one device": lambda: torch.autograd.set_multithreading_enabled(False),
}


def watched() -> tuple[list[torch.Tensor], list[torch.Tensor], list[Any]]:
    """An MLP whose states note the modes of the pass that comes through."""
    layers, seen = weights(4), []
    states = mlp(rows(3, 6), layers)
    for state in states:
        state.register_hook(lambda _: seen.append(modes()))
    return layers, states, seen


@pytest.mark.parametrize("name", MODES)
def test_modes_around_the_statement(name: str) -> None:
    """The body is in the modes that the statement stands in, at every turn (H22)."""
    _, states, seen = watched()
    loss = states[-1].sum()
    with MODES[name]():
        before = modes()
        with backward(loss) as gradients:
            turns = [modes()]
            for state in reversed(states[1:]):
                gradients.of(state).grad
                turns.append(modes())
        turns.append(modes())
    assert turns == [before] * 5
    assert [of_pass[0] for of_pass in seen] == [False] * 4


@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize("create_graph", [False, True])
def test_modes_inside_the_body(name: str, create_graph: bool) -> None:
    """What the body enters reaches no step of the pass, and is there again behind each (H22)."""
    layers, states, seen = watched()
    loss = states[-1].square().sum()
    expected = grad(loss, [*states, *layers], retain_graph=True)
    seen.clear()
    with backward(loss, create_graph=create_graph, inputs=layers) as gradients:
        got = [gradients.of(states[3]).grad]
        with MODES[name]():
            before = modes()
            got.append(gradients.of(states[2]).grad)
            turns = [modes()]
            got.append(gradients.of(states[1]).grad)
            turns.append(modes())
        got.append(gradients.of(states[0]).grad)
    assert turns == [before] * 2
    assert not any(gradient.is_inference() for gradient in got)
    assert len(set(seen)) == 1
    assert seen[0][0] is create_graph
    assert not seen[0][2]  # one thread
    assert all(map(torch.equal, got[::-1], expected[:4]))
    assert all(map(torch.equal, [layer.grad for layer in layers], expected[4:]))
    for layer in layers:
        layer.grad = None  # a cycle, with a graph


def test_a_leaf_in_inference_mode() -> None:
    """Where no graph is shown, the place of a leaf's gradient is found all the same."""
    layers, states, _ = watched()
    loss = states[-1].sum()
    (expected,) = grad(loss, layers[1], retain_graph=True)
    with backward(loss) as gradients, torch.inference_mode():
        assert torch.equal(gradients.of(layers[1]).grad, expected)


@pytest.mark.parametrize("name", MODES)
def test_modes_when_the_pass_ends_in_the_body(name: str) -> None:
    """A pass that ends while the body is in a mode of its own leaves that mode alone."""
    _, states, _ = watched()
    with backward(states[1].sum()) as gradients:
        with MODES[name]():
            before = modes()
            with pytest.raises(OutOfOrderError):
                gradients.of(states[-1]).grad
            after = modes()
    assert after == before


def test_modes_that_stay_set() -> None:
    """A mode that the body sets for good is set behind the statement too (H22)."""
    _, states, _ = watched()
    try:
        with backward(states[-1].sum()) as gradients:
            gradients.of(states[2]).grad
            torch.set_grad_enabled(False)
        assert not torch.is_grad_enabled()
    finally:
        torch.set_grad_enabled(True)


@pytest.mark.parametrize("enabled", [False, True])
def test_the_call_itself_is_in_the_modes_of_the_statement(enabled: bool) -> None:
    """A tensor type with a `backward` of its own finds the gradient mode that it was called in."""
    seen: list[bool] = []

    class Loss(torch.Tensor):
        def backward(self, *args: Any, **kwargs: Any) -> None:
            seen.append(torch.is_grad_enabled())
            super().backward(*args, **kwargs)

    _, states, loss = mlp_with_loss()
    (expected,) = grad(loss, states[0], retain_graph=True)
    own = loss.as_subclass(Loss)
    with torch.set_grad_enabled(enabled), backward(own) as gradients:
        got = gradients.of(states[0]).grad
    assert seen == [enabled]
    assert torch.equal(got, expected)
