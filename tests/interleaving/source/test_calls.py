"""Operations of a running forward: reads, writes, skips, their order, loops, other requests."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from midstream.errors import OutOfOrderError, SourceNotAvailableError
from midstream.interleaving.interleaver import Interleaver
from midstream.interleaving.source import copies
from tests.interleaving.toy import Layer, Steps, Toy, rows


@pytest.fixture(params=["first step", "later step"])
def steps(request: Any) -> Steps:
    """Steps of a toy, before or after the order of its modules is known."""
    steps = Steps()
    if request.param == "later step":
        steps.step([rows(2, 7)], [lambda: steps.root.layers[0].output])
    return steps


def inside(layer: Layer, hidden: torch.Tensor, residual: torch.Tensor | None) -> dict[str, Any]:
    """What a layer of the toy computes, by name."""
    total = hidden if residual is None else residual + hidden
    return {"total": total, "tanh": torch.tanh(total), "mlp": layer.mlp(torch.tanh(total))}


def right(x: torch.Tensor, edits: dict[tuple[int, str], Any] | None = None) -> Any:
    """The toy's logits and the values inside its layers, computed without instruments."""
    model, edits, seen = Toy().requires_grad_(False), edits or {}, []
    hidden, residual = x, None
    for index, layer in enumerate(model.layers):
        total = hidden if residual is None else residual + hidden
        total = edits.get((index, "total"), lambda v: v)(total)
        tanh = edits.get((index, "tanh"), lambda v: v)(torch.tanh(total))
        mlp = edits.get((index, "mlp"), lambda v: v)(layer.mlp(tanh))
        seen.append({"total": total, "tanh": tanh, "mlp": mlp})
        hidden, residual = mlp, total
    return model.head((hidden + residual)[-1:]), seen


def test_reads(steps: Steps) -> None:
    """Outputs, inputs and all arguments of calls and assignments, in order."""
    x, got = rows(5, 1), {}

    def block() -> None:
        source = steps.root.layers[1].source
        got["total"] = source.residual_0.output
        got["input"] = source.torch_tanh_0.input
        got["inputs"] = source.torch_tanh_0.inputs
        got["tanh"] = source.torch_tanh_0.output
        got["mlp"] = source.self_mlp_0.output

    steps.step([x], [block])
    values = right(x)[1][1]
    assert torch.equal(got["total"], values["total"])
    assert torch.equal(got["input"], values["total"])
    assert got["inputs"][1] == {}
    assert torch.equal(got["inputs"][0][0], values["total"])
    assert torch.equal(got["tanh"], values["tanh"])
    assert torch.equal(got["mlp"], values["mlp"])


def test_modules_and_operations_take_turns(steps: Steps) -> None:
    """A block goes from a module to an operation around it and on, in one step."""
    x, got = rows(5, 1), []

    def block() -> None:
        root = steps.root
        root.layers[0].source  # the block will want operations
        got.append(root.layers[0].mlp.input)
        got.append(root.layers[0].source.self_mlp_0.output)
        got.append(root.layers[1].input)
        got.append(root.layers[1].source.torch_tanh_0.output)
        got.append(root.layers[1].mlp.output)
        got.append(root.source.layer_0[1].output[0])
        got.append(root.layers[2].mlp.source.F_linear_0.output)

    steps.step([x], [block])
    values = right(x)[1]
    expected = [
        *(values[0]["tanh"], values[0]["mlp"], torch.arange(5), values[1]["tanh"]),
        *(values[1]["mlp"], values[1]["mlp"], values[2]["mlp"]),
    ]
    assert [torch.equal(a, b) for a, b in zip(got, expected, strict=True)] == [True] * 7


def test_reads_are_private(steps: Steps) -> None:
    """A kept value stays what it was, though the model rewrites its tensor in place."""
    x, kept = rows(5, 1), []
    steps.step([x], [lambda: kept.append(steps.root.layers[0].source.hidden_clone_0.output)])
    assert torch.equal(kept[0], x)
    assert not torch.allclose(right(x)[1][1]["total"], x, atol=1e-3)


def zero_in_place(operation: Any, value: torch.Tensor) -> None:
    operation.output[:] = 0


def zero_by_assignment(operation: Any, value: torch.Tensor) -> None:
    operation.output = torch.zeros_like(operation.output)


def zero_unread(operation: Any, value: torch.Tensor) -> None:
    operation.output = torch.zeros(value.shape)


def zero_by_skip(operation: Any, value: torch.Tensor) -> None:
    operation.skip(torch.zeros(value.shape))


def zero_by_skip_after_its_input(operation: Any, value: torch.Tensor) -> None:
    operation.skip(0 * operation.input)


WRITES = [zero_in_place, zero_by_assignment, zero_unread, zero_by_skip]
WRITES.append(zero_by_skip_after_its_input)


@pytest.mark.parametrize("neighbour", [False, True])
@pytest.mark.parametrize("write", WRITES)
def test_writes(steps: Steps, write: Callable[..., None], neighbour: bool) -> None:
    """A write or skip changes this request's rows only, whatever else is in the step."""
    parts, back = [rows(3, 1), rows(2, 2)], {}

    def block() -> None:
        operation = steps.root.layers[1].source.torch_tanh_0
        write(operation, parts[0])
        back[0] = operation.output

    def other_block() -> None:
        back[1] = steps.root.layers[1].source.torch_tanh_0.output

    blocks = [block]
    if neighbour:
        blocks.append(other_block)
    got = steps.step(parts, blocks)
    zeroed, clean = right(parts[0], {(1, "tanh"): torch.zeros_like})[0], right(parts[0])[0]
    other, seen = right(parts[1])
    assert not torch.allclose(zeroed, clean, atol=1e-3)
    assert torch.allclose(got[:1], zeroed, atol=1e-6)
    assert torch.allclose(got[1:], other, atol=1e-6)
    assert torch.equal(back[0], torch.zeros(3, 4))
    if neighbour:
        assert torch.allclose(back[1], seen[1]["tanh"], atol=1e-6)


@pytest.mark.parametrize("way", ["input", "inputs", "in place"])
def test_inputs_are_written(steps: Steps, way: str) -> None:
    """What an operation is called with can be replaced, and edited in place."""
    x = rows(3, 1)

    def block() -> None:
        operation = steps.root.layers[1].source.self_mlp_0
        if way == "input":
            operation.input = operation.input * 2
        elif way == "inputs":
            operation.inputs = ((operation.input * 2,), {})
        else:
            operation.input.mul_(2)

    got = steps.step([x], [block])
    doubled, clean = right(x, {(1, "tanh"): lambda v: 2 * v})[0], right(x)[0]
    assert not torch.allclose(doubled, clean, atol=1e-3)
    assert torch.allclose(got, doubled, atol=1e-6)


def test_writes_of_several_requests(steps: Steps) -> None:
    """Two requests skip the same operation, each with its own value."""
    parts = [rows(3, 1), rows(2, 2)]
    values = [rows(3, 8), rows(2, 9)]

    def block(index: int) -> None:
        steps.root.layers[0].source.self_mlp_0.skip(values[index])

    got = steps.step(parts, [lambda: block(0), lambda: block(1)])
    for index in range(2):
        expected = right(parts[index], {(0, "mlp"): lambda _, i=index: values[i]})[0]
        assert torch.allclose(got[index : index + 1], expected, atol=1e-6)


def test_wrong_shape_is_the_blocks_error(steps: Steps) -> None:
    """A value of another shape is refused by assignment and skip; other requests go on."""
    parts = [rows(3, 1), rows(2, 2), rows(2, 3)]

    def assign() -> None:
        steps.root.layers[0].source.torch_tanh_0.output = torch.zeros(2, 4)

    def skip() -> None:
        steps.root.layers[0].source.torch_tanh_0.skip(torch.zeros(1, 4))

    logits, runs = steps.try_step(parts, [assign, skip])
    where = "model.layers.0.source.torch_tanh_0.output.i0"
    assert [str(run.error).partition(":")[0] for run in runs] == [
        f"{where} was assigned [2, 4], but the model goes on with [3, 4]",
        f"{where} was assigned [1, 4], but the model goes on with [2, 4]",
    ]
    for index in range(3):
        assert torch.allclose(logits[index : index + 1], right(parts[index])[0], atol=1e-6)


def refused(steps: Steps, block: Callable[[], None]) -> str:
    """The text of the order error that a block meets."""
    with pytest.raises(OutOfOrderError) as failure:
        steps.step([rows(3, 1)], [block])
    return str(failure.value)


def operations(steps: Steps) -> tuple[Any, Any]:
    return steps.root.layers[0].source, steps.root.layers[1].source


def backwards(steps: Steps) -> None:
    operations(steps)[0].torch_tanh_0.output
    operations(steps)[0].residual_0.output


def input_after_output(steps: Steps) -> None:
    operations(steps)[0].torch_tanh_0.output
    operations(steps)[0].torch_tanh_0.input


def skip_after_it_ran(steps: Steps) -> None:
    operations(steps)[0].torch_tanh_0.output
    operations(steps)[0].torch_tanh_0.skip(0)


def operation_of_an_earlier_layer(steps: Steps) -> None:
    operations(steps)[1].torch_tanh_0.output
    operations(steps)[0].torch_tanh_0.output


def operation_of_an_earlier_module(steps: Steps) -> None:
    steps.root.layers[1].output
    operations(steps)[0].torch_tanh_0.output


def module_before_an_operation(steps: Steps) -> None:
    operations(steps)[0].self_mlp_0.output
    steps.root.layers[0].mlp.output


def untaken_branch_after_its_function(steps: Steps) -> None:
    steps.root.layers[1].output
    operations(steps)[0].residual_add__0.output


@pytest.mark.parametrize(
    ("block", "where"),
    [
        (backwards, "layers.0.source.residual_0.output"),
        (input_after_output, "layers.0.source.torch_tanh_0.input"),
        (skip_after_it_ran, "layers.0.source.torch_tanh_0.input"),
        (operation_of_an_earlier_layer, "layers.0.source.torch_tanh_0.output"),
        (operation_of_an_earlier_module, "layers.0.source.torch_tanh_0.output"),
        (module_before_an_operation, "layers.0.mlp.output"),
        (untaken_branch_after_its_function, "layers.0.source.residual_add__0.output"),
    ],
)
def test_passed(steps: Steps, block: Callable[[Steps], None], where: str) -> None:
    """What the step has passed is refused at once, in a first step as in later ones."""
    for _ in range(2):
        text = refused(steps, lambda: block(steps))
        assert text.startswith(
            f"'model.{where}.i0' was requested but the model already ran past it: the block had"
        )


def test_nested_operation_that_has_passed(steps: Steps) -> None:
    """Inside an operation the order is known too."""

    def block() -> None:
        source = steps.root.layers[0].mlp.source
        source.F_linear_0.output
        steps.root.layers[0].source.self_mlp_0.source.F_linear_0.input

    assert "'model.layers.0.mlp.source.F_linear_0.input.i0' was requested" in refused(steps, block)


def test_operation_that_does_not_run(steps: Steps) -> None:
    """One that the step ends without is an error of that step, and the forward goes on."""
    x, got = rows(3, 1), []

    def block() -> None:
        try:
            steps.root.layers[0].source.residual_add__0.output
        except OutOfOrderError as error:
            got.append(str(error))

    logits = steps.step([x], [block])
    assert torch.allclose(logits, right(x)[0], atol=1e-6)
    assert got == [
        "'model.layers.0.source.residual_add__0.output.i0' did not run in this step. "
        "The block asked for it, and the step ended without it."
    ]


def test_operation_asked_for_too_late() -> None:
    """In a forward that has begun without its operations, the error says what to do."""
    steps = Steps()
    steps.step([rows(2, 1)], [lambda: steps.root.layers[0].output])

    def block() -> None:
        steps.root.layers[0].mlp.output
        steps.root.layers[0].source.self_mlp_0.output

    text = refused(steps, block)
    assert "'layers.0' has begun without its operations" in text
    assert "Write its `.source` on a line of its own at the beginning" in text


@pytest.mark.parametrize("k", [0, 1, 2])
def test_loops(steps: Steps, k: int) -> None:
    """The k-th time the forward gets to an operation is `operation[k]`; plain, it is the first."""
    x, got = rows(4, 1), []

    def block() -> None:
        operation = steps.root.source.layer_0
        got.append((operation[k] if k else operation).output[0])

    for _ in range(2):
        steps.step([x], [block])
    expected = right(x)[1][k]["mlp"]
    assert torch.equal(got[0], expected)
    assert torch.equal(got[1], expected)


def test_loops_go_forwards(steps: Steps) -> None:
    """An earlier time is refused, and one that never comes is an error at the step's end."""

    def back() -> None:
        steps.root.source.layer_0[1].output
        steps.root.source.layer_0.output

    def beyond() -> None:
        steps.root.source.layer_0[3].output

    assert "'model.source.layer_0.output.i0' was requested but" in refused(steps, back)
    assert "'model.source.layer_0[3].output.i0' did not run" in refused(steps, beyond)


def test_forward_is_itself_again(steps: Steps) -> None:
    """After a step nothing is left on the modules, and steps without operations run none."""
    x = rows(3, 1)
    steps.step([x], [lambda: steps.root.layers[0].source.torch_tanh_0.output])
    assert [path for path, m in steps.tree.modules.items() if "forward" in vars(m)] == []
    clean = right(x)[0]
    assert torch.allclose(steps.step([x], [lambda: steps.root.layers[2].output]), clean, atol=1e-6)


def test_blocks_without_operations_pay_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No function is instrumented for a block that asks for modules only."""
    made: list[str] = []
    make = copies._make
    monkeypatch.setattr(copies, "_templates", {})
    monkeypatch.setattr(copies, "_make", lambda f, w: made.append(f.__qualname__) or make(f, w))
    steps = Steps()
    for _ in range(2):
        steps.step([rows(2, 1)], [lambda: steps.root.layers[1].mlp.output])
    assert made == []
    steps.step([rows(2, 1)], [lambda: steps.root.layers[1].source.torch_tanh_0.output])
    assert "Layer.forward" in made


def test_calls_of_a_block_are_not_traced(steps: Steps) -> None:
    """A module that the block calls itself hands nothing over, though its forward is wanted."""
    x, got = rows(3, 1), []

    def block() -> None:
        steps.root.layers[1].source  # the block will want operations
        hidden = steps.root.layers[0].output[0]
        steps.root.layers[1].mlp(hidden)
        got.append(steps.root.layers[1].mlp.source.F_linear_0.output)

    steps.step([x], [block])
    assert torch.equal(got[0], right(x)[1][1]["mlp"])


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

    text = refused(special, block)
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
