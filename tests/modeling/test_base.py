"""`Model(module)`: what blocks read and write is what plain PyTorch computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from midstream import Model, save
from midstream.errors import InterventionError, NotInTraceError, PromptError, UnsupportedError
from tests.support.local_modules import (
    MLP,
    Keyed,
    Residual,
    Routed,
    Twice,
    WithBuffers,
    assert_untouched,
    changed,
    drawn,
    equal,
    far,
    hooked,
    rows,
)

X = rows(2)
IDS = torch.tensor([[1, 2, 3], [4, 5, 6]])
KINDS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "mlp": (MLP, (X,)),
    "residual": (Residual, (X,)),
    "twice": (Twice, (X,)),
    "buffers": (WithBuffers, (IDS,)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_every_module_is_read(kind: str, mode: Any) -> None:
    """Outputs and inputs of all modules are what plain hooks copy, in every mode (H7, H20, O5)."""
    module = drawn(KINDS[kind][0])
    model, args = Model(module), KINDS[kind][1]
    with mode():
        seen, result = hooked(module, *args)
        for path in [path for path, _ in module.named_modules() if path != "shared"]:
            with model.trace(*args) as tracer:
                inputs = model.get(path).inputs.save()
                output = model.get(path).output.save()
            assert equal(inputs, (seen[path].args, seen[path].kwargs)), path
            assert equal(output, seen[path].output), path
            assert equal(tracer.result, result)
    assert_untouched(module)


def test_all_modules_are_read_at_once() -> None:
    """One block reads all modules in the order of the forward; each value stays as it was (O5)."""
    module = drawn(Residual)
    model = Model(module)
    seen, _ = hooked(module, X)
    with torch.no_grad(), model.trace(X):
        values = {}
        for path in ("up", "act", "mid", "down"):
            values[path, "input"] = model.get(path).input
            values[path, "output"] = model.get(path).output
        values.save()
    for path in ("up", "act", "mid", "down"):
        assert equal(values[path, "input"], seen[path].args[0]), path
        assert equal(values[path, "output"], seen[path].output), path
    assert far(seen["up"].output, seen["act"].output)  # the ReLU has written into its input


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("path", ["up", "act", "mid"])
def test_writes_land(mode: Any, path: str) -> None:
    """Edits in place, replacements and edits of inputs land bit for bit (H20, O6)."""
    module = drawn(Residual)
    model = Model(module)

    def edit(value: torch.Tensor) -> torch.Tensor:
        value = value.clone()
        value[:, 1] += 2.0
        return value

    with mode():
        plain = module(X)
        expected = changed(module, path, edit, lambda: module(X))
        before = changed(module, path, edit, lambda: module(X), "input")
        assert far(expected, plain)
        assert far(before, plain)
        with model.trace(X):
            model.get(path).output[:, 1] += 2.0
            in_place = model.output.save()
        with model.trace(X):
            value = model.get(path).output.clone()
            value[:, 1] += 2.0
            model.get(path).output = value
            replaced = model.output.save()
        with model.trace(X):
            value = model.get(path).input.clone()
            value[:, 1] += 2.0
            model.get(path).input = value
            at_input = model.output.save()
        assert torch.equal(in_place, expected)
        assert torch.equal(replaced, expected)
        assert torch.equal(at_input, before)
        assert torch.equal(module(X), plain)


@pytest.mark.parametrize("kind", ["dict", "nested", "dataclass", "output"])
def test_containers(kind: str) -> None:
    """Tensors in dictionaries, dataclasses and HuggingFace outputs are read and written (H20)."""
    module = drawn(Keyed, kind)
    model = Model(module)
    part = module.part
    hidden = part.linear(X).detach()
    with model.trace(X):
        read = model.part.output.save()
        part.unwrap(read)[:, 0] = 5.0
        written = model.output.save()
    edited = hidden.clone()
    edited[:, 0] = 5.0
    assert torch.equal(part.unwrap(read), edited)
    assert type(read) is type(part.wrap(hidden))
    assert torch.equal(written, module.last(edited))
    with model.trace(X):
        model.part.output = part.wrap(torch.ones(2, 4))
        replaced = model.output.save()
    assert torch.equal(replaced, module.last(torch.ones(2, 4)))
    assert far(replaced, module(X))
    with pytest.raises(InterventionError, match=r"\[3, 4\].*\[2, 4\]"):
        with model.trace(X):
            model.part.output = part.wrap(torch.ones(3, 4))


def test_a_replacement_of_another_shape_is_refused() -> None:
    """The error names both shapes and the line; device and dtype are converted (O6)."""
    module = drawn(MLP)
    model = Model(module)
    with pytest.raises(InterventionError, match=r"assigned \[3, 8\].*goes on with \[2, 8\]"):
        with model.trace(X):
            model.second.output = torch.ones(3, 8)
    with model.trace(X):
        model.second.output = torch.ones(2, 8, dtype=torch.float64)
        out = model.output.save()
    assert torch.equal(out, module.last(torch.ones(2, 8)))


@pytest.mark.parametrize("gradients", [True, False])
def test_the_models_own_tensors_are_not_changed(gradients: bool) -> None:
    """A buffer or parameter that a block edits as an input is unchanged afterwards (O5)."""
    module = drawn(WithBuffers).requires_grad_(gradients)
    model = Model(module)
    state = {name: value.clone() for name, value in module.state_dict().items()}
    hidden = module.product.register_forward_pre_hook(
        lambda _, args: (args[0], torch.full((4,), 3.0), torch.zeros(4))
    )
    expected = module(IDS)
    hidden.remove()
    with model.trace(IDS):
        (_, scale, shift), _ = model.product.inputs
        scale[:] = 3.0
        shift[:] = 0.0
        edited = model.output.save()
    with model.trace(IDS):
        (_, scale, shift), _ = model.product.inputs
        with torch.no_grad():
            scale[:] = 3.0
            shift[:] = 0.0
        without = model.output.save()
    assert torch.equal(edited, expected)
    assert torch.equal(without, expected)
    assert far(expected, module(IDS))
    for name, value in module.state_dict().items():
        assert torch.equal(value, state[name]), name


@pytest.mark.parametrize("gradients", [True, False])
def test_the_callers_inputs_are_not_changed(gradients: bool) -> None:
    """An edit of the model's input is an edit of the forward, not of the caller's tensor (O5)."""
    module = drawn(MLP)
    model = Model(module)
    x = X.clone().requires_grad_(gradients)
    with model.trace(x):
        model.first.input[:, 0] = 9.0
        out = model.output.save()
    edited = X.clone()
    edited[:, 0] = 9.0
    assert torch.equal(out, module(edited))
    assert torch.equal(x, X)
    if gradients:
        (gradient,) = torch.autograd.grad(out.sum(), x)
        assert (gradient[:, 0] == 0).all()
        assert far(gradient[:, 1:], torch.zeros(2, 3)) if gradient[:, 1:].any() else True


def test_parts_of_a_split_are_written() -> None:
    """What `split` gave, which autograd refuses to write into, can be edited (O6)."""

    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pair, self.act, self.last = nn.Linear(4, 8), nn.Tanh(), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            left, right = self.pair(x).split(4, dim=-1)
            return self.last(self.act(left) * right)

    module = drawn(Halves)
    model = Model(module)
    with model.trace(X):
        model.act.input[:, 0] = 2.0
        out = model.output.save()
    left, right = module.pair(X).split(4, dim=-1)
    left = left.clone()
    left[:, 0] = 2.0
    assert torch.equal(out, module.last(torch.tanh(left) * right))


def test_a_skipped_module_does_not_run() -> None:
    """A skipped module is left out, and its output is the block's (H20, O7)."""
    module = drawn(MLP)
    module.second = nn.Sequential(module.second)
    model = Model(module)
    with model.trace(X):  # in the first trace the order, and what modules return, is learned
        model.second.output
    calls: list[int] = []
    handle = module.second[0].register_forward_hook(lambda *_: calls.append(1))
    value = torch.ones(2, 8)
    with model.trace(X):
        model.second.skip(value)
        out = model.output.save()
    handle.remove()
    assert not calls
    assert torch.equal(out, module.last(torch.ones(2, 8)))
    assert torch.equal(value, torch.ones(2, 8))


@pytest.mark.parametrize("first", [True, False])
def test_both_calls_of_a_module(first: bool) -> None:
    """A module called twice in a forward is met twice, in the first trace and later (H20)."""
    module = drawn(Twice)
    model = Model(module)
    if not first:
        with model.trace(X):
            model.act.output
    with model.trace(X):
        one = model.shared.output.save()
        between = model.act.output.save()
        two = model.shared.output.save()
    assert torch.equal(one, module.shared(X))
    assert torch.equal(two, module(X))
    assert far(one, two)
    with model.trace(X):
        model.act.output
        model.shared.output[:, 0] = 7.0
        out = model.output.save()
    assert (out[:, 0] == 7.0).all()
    assert torch.equal(out[:, 1:], module(X)[:, 1:])


def test_an_order_that_changes() -> None:
    """A module that calls its parts in another order each time is read in that order (H20, O8)."""
    module = drawn(Routed)
    model = Model(module)
    for order in ("ab", "ba", "ab", "ba"):
        seen, _ = hooked(module, X, order=order)
        with model.trace(X, order=order):
            values = [(name, model.get(name).output) for name in order]
            values.save()
        assert all(equal(value, seen[name].output) for name, value in values)
    for order in ("ab", "ba"):
        with pytest.raises(InterventionError, match="OutOfOrderError: 'model"):
            with model.trace(X, order=order):
                for name in reversed(order):
                    model.get(name).output
    with pytest.raises(InterventionError, match="'model.b.output.i0' did not run in this step"):
        with model.trace(X, order="a"):
            model.b.output
    assert_untouched(module)


def test_what_has_passed_is_refused() -> None:
    """A location that the forward has passed is an error at its line, with the fix (O8)."""
    module = drawn(MLP)
    model = Model(module)
    for _ in range(2):  # while the order is learned, and once it is known
        with pytest.raises(InterventionError, match="already ran past it.*Move this access above"):
            with model.trace(X):
                late = model.last.output.save()
                model.first.output
        assert torch.equal(late, module(X))
        with model.trace(X):
            model.output


def test_inputs_of_any_kind() -> None:
    """Integers, keywords, none at all: what a module is called with is what a block reads (H7)."""

    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.linear = nn.Parameter(torch.randn(2, 4)), nn.Linear(4, 4)

        def forward(self, times: int = 1, *, note: str = "") -> torch.Tensor:
            return self.linear(self.weight) * times

    module = drawn(Constant)
    model = Model(module)
    with model.trace(3):
        inputs = model.inputs.save()
        hidden = model.linear.output.save()
        model.linear.output = torch.ones(2, 4)
        out = model.output.save()
    assert inputs == ((3,), {})
    assert torch.equal(hidden, module.linear(module.weight))
    assert torch.equal(out, torch.full((2, 4), 3.0))
    with model.trace(note="x"):
        assert_input = model.input.save()
    assert assert_input == "x"
    assert torch.equal(model(), module())
    assert torch.equal(model.trace(trace=False), module())


def test_the_plain_call() -> None:
    """`trace=False`, and calling the model, is the plain call (H28)."""
    module = drawn(MLP)
    model = Model(module)
    assert torch.equal(model(X), module(X))
    assert torch.equal(model.trace(X, trace=False), module(X))


def test_a_function_as_block() -> None:
    """`block=function` runs it beside the call; saved locals and the returned dict come back."""
    module = drawn(MLP)
    model = Model(module)

    def block(model: Any, tracer: Any) -> dict[str, Any]:
        hidden = save(model.first.output)
        return {"out": model.output}

    tracer = model.trace(X, block=block)
    assert torch.equal(tracer.saves["hidden"], module.first(X))
    assert torch.equal(tracer.saves["out"], module(X))
    assert torch.equal(tracer.result, module(X))


def test_what_is_refused() -> None:
    """No module, no input, no block around an access: each is an error that says what to do."""
    model = Model(drawn(MLP))
    with pytest.raises(TypeError, match=r"takes a torch.nn.Module; got str"):
        Model("gpt2")
    with pytest.raises(PromptError, match="neither an input nor an invoke"):
        with model.trace():
            pass
    with pytest.raises(NotInTraceError):
        model.first.output
    with pytest.raises(UnsupportedError, match="Here each edited copy has its own"):
        model.edit(name="x")


def test_weights_may_become_others() -> None:
    """After `half()`, `to()` or other weights a trace sees the module as it is then."""
    module = drawn(MLP)
    model = Model(module)
    with model.trace(X):
        model.first.output
    module.double()
    with model.trace(X.double()):
        model.first.output[:, 0] = 1.0
        out = model.output.save()
    hidden = module.first(X.double()).detach()
    hidden[:, 0] = 1.0
    assert torch.equal(out, module.last(module.act(module.second(module.act(hidden)))))
    module.load_state_dict(drawn(MLP, seed=5).state_dict())
    with model.trace(X.double()):
        out = model.output.save()
    assert torch.equal(out, module(X.double()))


def test_parameters_by_name() -> None:
    """`param` gives a parameter or buffer itself, in a block and outside; a wrong name is told."""
    module = drawn(MLP)
    model = Model(module)
    path, name = next(iter(module.named_parameters()))[0].rsplit(".", 1)
    parameter = module.get_submodule(path).get_parameter(name)
    assert model.get(path).param(name) is parameter
    with model.trace(X):
        inside = model.get(path).param(name).clone().save()
    assert torch.equal(inside, parameter)
    with pytest.raises(AttributeError, match=f"'{path}' has no parameter 'wait'. It has: .*{name}"):
        model.get(path).param("wait")
