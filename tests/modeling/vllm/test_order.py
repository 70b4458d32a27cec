"""Locations have an order: what a step has passed, or ends without, is an error at the line."""

from __future__ import annotations

from typing import Any

import pytest

from midstream.errors import InterventionError, OutOfOrderError
from tests.modeling.vllm.conftest import line_of, place
from tests.support.checkpoints import A

SETTINGS: dict[str, Any] = {"temperature": 0.0, "max_tokens": 4}


def test_earlier_layer_after_a_later_one(serving: Any) -> None:
    """Reading back in the model is refused at once, at the line, saying where to move it.

    (O8, C66, G34, case 49).
    """
    with pytest.raises(InterventionError) as failure, serving.trace(A, **SETTINGS):
        serving.model.layers[3].output  # later
        before = "reached".save()
        serving.model.layers[1].output  # earlier
        after = "reached".save()
    text = str(failure.value)
    where = "'model.model.layers.1.output.i0'"
    assert text.startswith(
        f"OutOfOrderError: {where} was requested but the model already ran past it"
    )
    assert f"above line {line_of(__file__, 'later')}" in text
    assert place(__file__, "earlier") in text
    assert isinstance(failure.value.__cause__, OutOfOrderError)
    assert before == "reached"
    assert "after" not in locals()


def read_input_after_output(model: Any) -> None:
    model.model.layers[1].mlp.output
    model.model.layers[1].mlp.input


def read_again_after_going_on(model: Any) -> None:
    model.model.layers[1].output
    model.model.layers[2].output
    model.model.layers[1].output


def write_after_going_on(model: Any) -> None:
    rows = model.model.layers[1].mlp.output
    model.model.layers[2].output
    model.model.layers[1].mlp.output = rows


def read_a_module_after_the_logits(model: Any) -> None:
    model.logits
    model.model.norm.output


def read_logits_after_samples(model: Any) -> None:
    model.samples
    model.logits


@pytest.mark.parametrize(
    ("block", "where"),
    [
        (read_input_after_output, "model.model.layers.1.mlp.input.i0"),
        (read_again_after_going_on, "model.model.layers.1.output.i0"),
        (write_after_going_on, "model.model.layers.1.mlp.output.i0"),
        (read_a_module_after_the_logits, "model.model.norm.output.i0"),
        (read_logits_after_samples, "model.logits.i0"),
    ],
)
def test_what_the_step_has_passed(serving: Any, block: Any, where: str) -> None:
    """Inputs before outputs, no way back, writes included: the location is named (O8, C66, G34)."""
    with pytest.raises(InterventionError) as failure:
        serving.trace(A, block=lambda model, tracer: block(model), **SETTINGS)
    assert str(failure.value).startswith(f"OutOfOrderError: '{where}' was requested but")


@pytest.mark.parametrize(
    "path", ["lm_head", "model.layers.0.self_attn.rotary_emb.apply_rotary_emb"]
)
def test_module_that_does_not_run(serving: Any, path: str) -> None:
    """A location that the step ends without is an error of that step, at the line that asked.

    (O8).
    """
    with pytest.raises(InterventionError) as failure, serving.trace(A, **SETTINGS):
        serving.get(path).output  # never
    text = str(failure.value)
    assert text.startswith(f"OutOfOrderError: 'model.{path}.output.i0' did not run in this step")
    assert place(__file__, "never") in text
