"""Where a written value lands, in which form, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from midstream.errors import InterventionError
from tests.modeling.vllm.conftest import place, plain_tokens
from tests.support.checkpoints import A
from tests.support.compare import assert_close
from tests.support.device import DEVICE
from tests.support.oracle import (
    Oracle,
    replace_layer,
    zero_mlp,
)

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 4}
VECTOR = torch.randn(128, generator=torch.Generator().manual_seed(1)) * 3
ROWS = torch.randn(len(A), 128, generator=torch.Generator().manual_seed(2)) * 3
Block = Callable[[Any, Any], Any]


def test_next_layer_reads_what_was_written(llama: Any, hf: Oracle) -> None:
    """The stream between layers is one value, and a stream that is set arrives bit for bit.

    (B17, case 5).
    """
    layers = llama.model.layers
    with llama.trace(A, **GREEDY):
        leaving, entering = [].save(), [].save()
        for i in range(3):
            leaving.append(sum(layers[i].output))
            entering.append(layers[i + 1].input_layernorm.output[1])
    with llama.trace(A, **GREEDY):
        layers[1].output = (ROWS, torch.zeros_like(ROWS))
        arrived = layers[2].input_layernorm.output[1].save()
        logits = llama.logits.save()
    assert all(map(torch.equal, leaving, entering))
    assert torch.equal(arrived, ROWS)
    assert not torch.equal(arrived, entering[1])
    assert_close(logits, hf.run(A, [replace_layer(1, ROWS)]).logits, hf.run(A).logits)


def test_steering_by_the_norm_of_the_stream(llama: Any) -> None:
    """A vector scaled by the norm of the whole stream moves each row by that share of it.

    (case 8).
    """
    layers = llama.model.layers
    with llama.trace(A, **GREEDY):
        hidden, residual = layers[1].output
        old = (hidden + residual).save()
        half = old.norm(dim=-1, keepdim=True) * 0.5
        hidden += VECTOR.to(DEVICE) / VECTOR.norm() * half
        mlp_half = (hidden.norm(dim=-1) / old.norm(dim=-1)).save()
        new = layers[2].input_layernorm.output[1].save()
    share = (new - old).norm(dim=-1) / old.norm(dim=-1)
    assert_close(share, torch.full((len(A),), 0.5), mlp_half)


def test_value_read_after_a_write_is_what_was_written(llama: Any) -> None:
    """In the same visit a location reads back as it was written, in place and by assignment.

    (C62).
    """
    with llama.trace(A, **GREEDY):
        mlp = llama.model.layers[1].mlp
        mlp.output = ROWS * 2
        mlp.output = ROWS
        assigned = mlp.output.clone().save()
        mlp.output[2] = 5.0
        in_place = mlp.output.clone().save()
        residual = llama.model.layers[1].output[0].save()
    right = ROWS.clone()
    right[2] = 5.0
    assert torch.equal(assigned, ROWS)
    assert torch.equal(in_place, right)
    assert torch.equal(residual, right)


def test_replacement_is_taken_as_it_is_when_assigned(llama: Any) -> None:
    """What happens to the assigned tensor afterwards is not an edit any more."""
    with llama.trace(A, **GREEDY):
        rows = ROWS.clone()
        llama.model.layers[1].mlp.output = rows
        rows.zero_()
        arrived = llama.model.layers[1].output[0].save()
    assert torch.equal(arrived, ROWS)


@pytest.mark.parametrize("convert", [torch.Tensor.double, torch.Tensor.half, torch.Tensor.long])
def test_replacement_is_converted_to_the_models_dtype(llama: Any, convert: Any) -> None:
    """A replacement of another dtype lands, and reads back, as the engine's own (O6, B14)."""
    rows = convert(ROWS)
    with llama.trace(A, **GREEDY):
        llama.model.layers[1].mlp.output = rows
        back = llama.model.layers[1].mlp.output.save()
        arrived = llama.model.layers[1].output[0].save()
    assert back.dtype == arrived.dtype == torch.float32
    assert torch.equal(back, rows.float())
    assert torch.equal(arrived, rows.float())


def test_replacement_need_not_be_contiguous(llama: Any) -> None:
    """A transposed view, an expanded row and the served rows in another order land as they are.

    (O6).
    """
    columns = ROWS.T.contiguous().T
    with llama.trace(A, **GREEDY):
        layers = llama.model.layers
        layers[0].mlp.output = columns
        transposed = layers[0].output[0].save()
        layers[1].mlp.output = ROWS[2].expand(5, 128)
        expanded = layers[1].output[0].save()
        before = layers[2].mlp.output.clone().save()
        layers[2].mlp.output = layers[2].mlp.output.flip(0)
        flipped = layers[2].output[0].save()
    assert torch.equal(transposed, ROWS)
    assert torch.equal(expanded, ROWS[2].repeat(5, 1))
    assert torch.equal(flipped, before.flip(0))
    assert not torch.equal(flipped, before)


def test_writes_that_leave_no_trace_in_pytorch_land(llama: Any, hf: Oracle) -> None:
    """On a CPU, writes through numpy and through `.data` are edits too."""
    with llama.trace(A, **GREEDY):
        llama.model.layers[1].mlp.output.numpy()[:] = 0
        llama.model.layers[2].mlp.output.data.zero_()
        logits = llama.logits.save()
    right, half = hf.run(A, [zero_mlp(1), zero_mlp(2)]), hf.run(A, [zero_mlp(1)])
    assert_close(logits, right.logits, half.logits)


def test_reading_changes_nothing(llama: Any) -> None:
    """A block that reads every layer leaves the logits bit for bit as a block that reads none."""
    with llama.trace(A, **GREEDY):
        logits = llama.logits.save()
    with llama.trace(A, **GREEDY) as tracer:
        for layer in llama.model.layers:
            layer.input, layer.mlp.inputs, layer.output
        after = llama.logits.save()
    assert torch.equal(logits, after)
    assert list(tracer.result.outputs[0].token_ids) == plain_tokens(llama, A, max_tokens=4)


MISFITS: dict[str, tuple[Any, str, str]] = {
    "too few rows": (torch.zeros(3, 128), "[3, 128]", "[5, 128]"),
    "too many rows": (torch.zeros(6, 128), "[6, 128]", "[5, 128]"),
    "other width": (torch.zeros(5, 127), "[5, 127]", "[5, 128]"),
    "one more axis": (torch.zeros(1, 5, 128), "[1, 5, 128]", "[5, 128]"),
    "a pair": ((torch.zeros(5, 128), None), "([5, 128], None)", "[5, 128]"),
    "a number": (0.0, "float", "[5, 128]"),
}


@pytest.mark.parametrize("case", MISFITS)
def test_misfit_is_an_error_at_the_users_line(case: str, serving: Any) -> None:
    """A replacement of another shape is a ValueError on its line, with both shapes.

    (O6, C63, G46, G47).
    """
    value, got, expected = MISFITS[case]
    with pytest.raises(InterventionError) as failure, serving.trace(A, **GREEDY):
        before = serving.model.layers[1].mlp.input.save()
        serving.model.layers[1].mlp.output = value  # this line
    text = str(failure.value)
    where = "model.model.layers.1.mlp.output.i0"
    assert text.startswith(f"ValueError: {where} was assigned {got}")
    assert expected in text.splitlines()[0]
    assert place(__file__, "this line") in text
    assert type(failure.value.__cause__) is ValueError
    assert before.shape == (5, 128)


def test_misfit_of_a_pair_and_of_an_input(serving: Any) -> None:
    """One tensor for a pair, and a first argument of another shape, are refused alike (C64)."""
    pair = pytest.raises(
        InterventionError, match=r"assigned \[5, 128\].*\(\[5, 128\], \[5, 128\]\)"
    )
    with pair, serving.trace(A, **GREEDY):
        serving.model.layers[1].output = ROWS
    rows = pytest.raises(InterventionError, match=r"assigned \[4, 128\].*\[5, 128\]")
    with rows, serving.trace(A, **GREEDY):
        serving.model.layers[1].mlp.input = ROWS[:4]


def test_misfit_can_be_caught_in_the_block(llama: Any, hf: Oracle) -> None:
    """The ValueError is raised at the assignment, so the block can go on from it."""
    with llama.trace(A, **GREEDY):
        text = ""
        try:
            llama.model.layers[1].mlp.output = ROWS[:2]
        except ValueError as error:
            text = str(error).save()
        llama.model.layers[1].mlp.output = ROWS * 0
        logits = llama.logits.save()
    assert "[2, 128]" in text
    assert_close(logits, hf.run(A, [zero_mlp(1)]).logits, hf.run(A).logits)
