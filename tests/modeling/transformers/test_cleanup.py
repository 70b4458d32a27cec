"""Nothing of a trace is left on a model, also if it failed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from midstream import TransformersModel
from midstream.errors import InterventionError
from tests.support.checkpoints import A, B
from tests.support.hooking import leftovers


def plain(model: TransformersModel, ids: list[int]) -> torch.Tensor:
    """The logits of plain transformers, of all positions."""
    found: torch.Tensor = model.module(torch.tensor([ids])).logits
    return found


def hook_counts(module: torch.nn.Module) -> dict[str, list[int]]:
    """How many hooks of each kind a module's parts have."""
    kinds = [name for name in vars(module) if name.endswith("_hooks")]
    return {
        path: [len(vars(each)[kind] or ()) for kind in kinds]
        for path, each in module.named_modules()
    }


def fails_in_a_step(model: TransformersModel) -> None:
    with model.generate(A, max_new_tokens=5) as tracer:
        for step in tracer.iter[:]:
            model.model.layers[0].output[:] *= 2
            if step == 3:
                raise ValueError("in step 3")


def fails_in_the_model(model: TransformersModel) -> None:
    with model.generate(A, max_new_tokens=2):
        model.model.embed_tokens.input = torch.tensor([[5000] * 5])


def fails_in_a_backward_pass(model: TransformersModel) -> None:
    with model.trace(A):
        stream = model.model.layers[1].output
        with model.logits.sum().backward():
            stream.grad[:] = 0
            raise ValueError("in the pass")


def fails_in_an_invoke(model: TransformersModel) -> None:
    with model.generate(max_new_tokens=3) as tracer:
        with tracer.invoke(A):
            model.samples[:] = 5000
        with tracer.invoke(B):
            model.logits.sum()


def is_interrupted(model: TransformersModel) -> None:
    with model.generate(A, max_new_tokens=3):
        model.model.layers[1].output.sum()
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    "run",
    [
        fails_in_a_step,
        fails_in_the_model,
        fails_in_a_backward_pass,
        fails_in_an_invoke,
        is_interrupted,
    ],
)
def test_nothing_is_left_after_an_error(
    llama: TransformersModel, run: Callable[[TransformersModel], None]
) -> None:
    """After a failure no hook and no forward is left, and results are as before (case 51)."""
    right = plain(llama, A)
    before = hook_counts(llama.module)
    with pytest.raises((RuntimeError, IndexError, KeyboardInterrupt)):
        run(llama)
    assert leftovers(llama.module) == []
    assert hook_counts(llama.module) == before
    with llama.trace(A) as tracer:
        llama.model.layers[0].output.sum()
    assert torch.equal(tracer.result.logits, right)


def test_a_step_that_fails_is_told(llama: TransformersModel) -> None:
    """The failure of a block is raised with its line, and what it saved is bound (H20)."""
    with pytest.raises(InterventionError, match=r"(?s)^ValueError: too far.*raise ValueError"):
        with llama.generate(A, max_new_tokens=5) as tracer:
            steps = [].save()
            for step in tracer.iter[:]:
                steps.append(step)
                llama.logits.sum()
                if step == 2:
                    raise ValueError("too far")
    assert steps == [0, 1, 2]


def test_an_unrelated_trace_changes_nothing(llama: TransformersModel) -> None:
    """A trace gives the same before and after one of another prompt with edits (case 51)."""

    def read() -> list[torch.Tensor]:
        with llama.trace(A):
            values = [llama.model.layers[1].output, llama.logits].save()
        return list(values)

    before = read()
    with llama.trace(B) as tracer:
        llama.model.layers[0].output[:] = 1
    assert not torch.allclose(tracer.result.logits, plain(llama, B), atol=1e-2)
    assert all(map(torch.equal, read(), before))


def test_values_on_the_cpu_leave_the_model_where_it_is(llama: TransformersModel) -> None:
    """A cache on the CPU, in another dtype, moves no parameter of the model (case 79)."""
    before = [(each.device, each.dtype, each.data_ptr()) for each in llama.module.parameters()]
    with llama.trace(A) as tracer:
        cache = tracer.cache(
            modules=[llama.model.layers[1]], device="cpu", dtype=torch.float64
        ).save()
    kept = cache["model.model.layers.1"].output
    assert (kept.device.type, kept.dtype) == ("cpu", torch.float64)
    after = [(each.device, each.dtype, each.data_ptr()) for each in llama.module.parameters()]
    assert after == before
    assert torch.equal(llama.trace(A, trace=False).logits, plain(llama, A))
