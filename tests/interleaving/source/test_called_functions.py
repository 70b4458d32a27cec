"""Functions that operations call, and what blocks cannot do to a model from inside a forward."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from midstream.errors import OutOfOrderError, SourceNotAvailableError
from midstream.interleaving.interleaver import Interleaver
from tests.interleaving.toy import Layer, Steps, Toy, rows


def helper(x: torch.Tensor) -> torch.Tensor:
    scaled = x * 2
    return torch.tanh(scaled)


class Special(Layer):
    """A layer whose forward calls functions known and unknown before it runs."""

    def method(self, x: torch.Tensor) -> torch.Tensor:
        return helper(x) + 1

    def forward(self, positions: Any, hidden: Any, residual: Any) -> Any:
        local = helper
        chosen = local(hidden)
        best = torch.max(hidden, dim=1)
        rank = positions + 0
        mask = positions > 0
        hidden = self.method(chosen) + best.values[:, None] + hidden.new_ones(6)[rank][:, None]
        return hidden, residual


@pytest.fixture
def special() -> Steps:
    model = Toy()
    model.layers[1] = Special(4)
    return Steps(model)


def test_operations_of_a_called_function(special: Steps) -> None:
    """Functions that an operation calls have operations too, at any depth."""
    x, got = rows(3, 1), {}

    def block() -> None:
        layer = special.root.layers[1]
        got["hidden"] = layer.inputs[1]["hidden"]
        source = layer.source
        got["local"] = source.local_1.source.torch_tanh_0.output
        got["chosen"] = source.chosen_0.output
        got["deep"] = source.self_method_0.source.helper_0.source.scaled_0.output
        got["method"] = source.self_method_0.output

    for _ in range(2):
        special.step([x], [block])
        chosen = torch.tanh(2 * got["hidden"])
        assert torch.equal(got["local"], chosen)
        assert torch.equal(got["chosen"], chosen)
        assert torch.equal(got["deep"], 2 * chosen)
        assert torch.equal(got["method"], torch.tanh(2 * chosen) + 1)


@pytest.mark.parametrize(
    ("access", "error", "text"),
    [
        (lambda s: s.local_1.source.nothing_0.output, AttributeError, "scaled_0, torch_tanh_0"),
        (lambda s: s.self_method_0.source.nothing_0, AttributeError, "operations: helper_0"),
        (lambda s: s.torch_max_0.source, SourceNotAvailableError, "no Python source"),
        (lambda s: s.hidden_new_ones_0.source.a_0.output, SourceNotAvailableError, "no Python"),
    ],
)
def test_unknown_operations_of_a_called_function(
    special: Steps, access: Any, error: type[Exception], text: str
) -> None:
    """Where the function is known only when it runs, so is that it lacks an operation."""
    with pytest.raises(error, match=text):
        special.step([rows(3, 1)], [lambda: access(special.root.layers[1].source)])


def test_operation_that_calls_a_module(steps: Steps) -> None:
    """Where a variable turns out to be a module, the error names the module to look into."""
    for k in (0, 2):
        with pytest.raises(SourceNotAvailableError, match=f"calls the module 'layers.{k}'"):
            block = lambda k=k: steps.root.source.layer_0[k].source.torch_tanh_0.output  # noqa: E731
            steps.step([rows(3, 1)], [block])


class Splits(Layer):
    """A layer that calls a method of a tensor, and notes the tensor."""

    def forward(self, positions: Any, hidden: Any, residual: Any) -> Any:
        sums = hidden + 1
        self.__dict__["seen"] = weakref.ref(sums)
        return sums.split(2, dim=1)[0].repeat(1, 2), residual


def test_tensors_of_a_step_are_not_kept() -> None:
    """A method whose inside was looked at does not keep its tensor alive."""
    model, got = Toy(), []
    model.layers[1] = Splits(4)
    steps = Steps(model)

    def block() -> None:
        split = steps.root.layers[1].source.sums_split_0
        got.append(split.source.isinstance_0.output)

    steps.step([rows(3, 1)], [block])
    assert len(got) == 1
    gc.collect()
    assert model.layers[1].seen() is None


def test_nested_order(special: Steps) -> None:
    """A called function's operations that have passed are refused at once."""

    def block() -> None:
        source = special.root.layers[1].source
        source.self_method_0.output
        source.self_method_0.source.helper_0.output

    with pytest.raises(OutOfOrderError) as failure:
        special.step([rows(3, 1)], [block])
    text = str(failure.value)
    where = "model.layers.1.source.self_method_0.source.helper_0.output.i0"
    assert text.startswith(f"'{where}' was requested but the model already ran past it")


def test_named_results_keep_their_type(special: Steps) -> None:
    """A replaced part of `torch.max`'s result reaches the forward under its name."""
    x, values = rows(3, 1), []

    def block(factor: float) -> None:
        best = special.root.layers[1].source.torch_max_0
        best.output = (best.output[0] * factor, best.output[1])
        values.append(special.root.layers[1].output[0])

    special.step([x], [lambda: block(1.0)])
    special.step([x], [lambda: block(3.0)])
    assert not torch.allclose(values[0], values[1], atol=1e-3)


def test_indices_stay_in_range() -> None:
    """In an engine, integers of an operation keep the range that the step has, and masks stay."""
    model = Toy()
    model.layers[1] = Special(4)
    steps = Steps(model)
    steps.interleaver = Interleaver(steps.tree.modules, lambda module, name: None)

    def block(value: int) -> None:
        steps.root.layers[1].source.rank_0.output[:] = value

    steps.step([rows(3, 1)], [lambda: block(2)])
    with pytest.raises(ValueError, match=r"Integers 3 to 3 .* whose own are 0 to 2"):
        steps.step([rows(3, 1)], [lambda: block(3)])
    with pytest.raises(ValueError, match="mask"):
        steps.step([rows(3, 1)], [lambda: steps.root.layers[1].source.mask_0.output.fill_(True)])


class Buffered(Layer):
    """A layer that adds rows of a buffer, and whose weight comes by as an argument."""

    def __init__(self, width: int):
        super().__init__(width)
        self.register_buffer("bias_rows", torch.ones(8, width))

    def forward(self, positions: Any, hidden: Any, residual: Any) -> Any:
        bias = self.bias_rows[: len(hidden)]
        return torch.nn.functional.linear(hidden, self.mlp.weight) + bias, residual


@pytest.fixture
def buffered() -> Steps:
    model = Toy()
    model.layers[1] = Buffered(4)
    return Steps(model)


def test_edits_do_not_reach_the_models_own_tensors(buffered: Steps) -> None:
    """An edit in place of a buffer's rows is this request's, in this step."""
    x, got = rows(3, 1), []

    def block(edit: bool) -> None:
        if edit:
            buffered.root.layers[1].source.bias_0.output.mul_(5)
        got.append(buffered.root.layers[1].output[0])

    for edit in (False, True, False):
        buffered.step([x], [lambda edit=edit: block(edit)])
    assert torch.allclose(got[1], got[0] + 4, atol=1e-5)
    assert torch.equal(got[2], got[0])
    assert torch.equal(buffered.model.layers[1].bias_rows, torch.ones(8, 4))


def test_parameters_have_no_rows(buffered: Steps) -> None:
    """A weight with as many rows as the step is given whole, and cannot be written."""
    got = []

    def block(write: bool) -> None:
        linear = buffered.root.layers[1].source.torch_nn_functional_linear_0
        _, weight = linear.inputs[0]
        got.append(weight)
        if write:
            weight.zero_()

    buffered.step([rows(2, 1), rows(2, 2)], [lambda: block(False)])
    assert torch.equal(got[0], buffered.model.layers[1].mlp.weight)
    with pytest.raises(ValueError, match="without a row per token"):
        buffered.step([rows(2, 1), rows(2, 2)], [lambda: block(True)])


class Detached(Layer):
    """A layer that takes its weight and a buffer from under their parameters, as kernels do."""

    def __init__(self, width: int):
        super().__init__(width)
        self.register_buffer("scales", torch.ones(width))

    def forward(self, positions: Any, hidden: Any, residual: Any) -> Any:
        scaled = torch.mul(hidden, self.scales.data)
        return torch.nn.functional.linear(scaled, self.mlp.weight.data), residual


@pytest.mark.parametrize("name", ["torch_mul_0", "torch_nn_functional_linear_0"])
def test_tensors_under_parameters_have_no_rows(name: str) -> None:
    """A weight stays whole, and out of reach, where the forward takes its `.data`."""
    model = Toy()
    model.layers[1] = Detached(4)
    steps, got = Steps(model), []

    def block(write: bool) -> None:
        operation = getattr(steps.root.layers[1].source, name)
        _, weight = operation.inputs[0]
        got.append(weight)
        if write:
            weight.zero_()

    steps.step([rows(2, 1), rows(2, 2)], [lambda: block(False)])
    assert len(got[0]) == 4
    with pytest.raises(ValueError, match="without a row per token"):
        steps.step([rows(2, 1), rows(2, 2)], [lambda: block(True)])


class InPlace(Layer):
    """A layer with an operation that returns nothing."""

    def forward(self, positions: Any, hidden: Any, residual: Any) -> Any:
        self.fill(hidden)
        return hidden, residual

    def fill(self, x: torch.Tensor) -> None:
        x.mul_(2)


def test_skipping_what_returns_nothing_is_refused() -> None:
    """Where an operation works on its arguments, a skip would be without effect."""
    model = Toy()
    model.layers[1] = InPlace(4)
    steps = Steps(model)
    with pytest.raises(ValueError, match="returns no tensor"):
        steps.step([rows(2, 1)], [lambda: steps.root.layers[1].source.self_fill_0.skip(None)])
