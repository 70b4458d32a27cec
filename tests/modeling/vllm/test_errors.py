"""What goes wrong in a block reaches its caller, with the user's line, and nobody else."""

from __future__ import annotations

import traceback
from typing import Any

import pytest
import torch

from midstream.errors import InterventionError, MidstreamError
from tests.modeling.vllm.conftest import live, place
from tests.support.checkpoints import A

SETTINGS: dict[str, Any] = {"temperature": 0.0, "max_tokens": 4}


class ProbeError(Exception):
    """An exception of the user's own, with arguments that its constructor does not take back."""

    def __init__(self, layer: int, *, score: float):
        super().__init__(layer, score)
        self.layer = layer

    def __str__(self) -> str:
        return f"layer {self.layer} scores {self.args[1]}"


class Stop(BaseException):
    """Not even an Exception."""


def test_exception_arrives_with_its_type_message_and_line(serving: Any) -> None:
    """It is a RuntimeError that begins with the original and has it as its cause.

    (O10, C13, C93, G49).
    """
    with pytest.raises(RuntimeError) as failure, serving.trace(A, **SETTINGS):
        hidden = serving.model.layers[1].output[0]
        raise ValueError("no such direction", 7)  # raise
    error = failure.value
    assert type(error) is InterventionError
    assert isinstance(error, MidstreamError)
    text = str(error)
    assert text.startswith("ValueError: ('no such direction', 7)\n")
    assert (
        place(__file__, "raise") + ", in test_exception_arrives_with_its_type_message_and_line"
        in text
    )
    assert 'raise ValueError("no such direction", 7)' in text
    assert type(error.__cause__) is ValueError
    assert error.__cause__.args == ("no such direction", 7)


def test_traceback_shows_the_users_code_only(serving: Any) -> None:
    """Neither midstream's files nor how a body is skipped show in the text or in the chain.

    (C98).
    """
    with pytest.raises(InterventionError) as failure, serving.trace(A, **SETTINGS):
        serving.samples[:] = 4711
        serving.model.layers[0].output
    shown = "".join(traceback.format_exception(failure.value))
    text = str(failure.value)
    assert "src/midstream" not in text
    assert "_BodySkipped" not in shown


RAISED = {
    "KeyError": lambda: KeyError("mlp"),
    "ZeroDivisionError": lambda: ZeroDivisionError("division by zero"),
    "FileNotFoundError": lambda: FileNotFoundError(2, "No such file or directory", "v.pt"),
    "UnicodeDecodeError": lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
    "StopIteration": lambda: StopIteration(3),
    "AssertionError": lambda: AssertionError(),
    "ProbeError": lambda: ProbeError(3, score=0.5),
    "SystemExit": lambda: SystemExit(3),
    "Stop": lambda: Stop("at once"),
}


@pytest.mark.parametrize("name", RAISED)
def test_every_kind_of_exception_arrives(serving: Any, name: str) -> None:
    """Built-in, the user's own, SystemExit or no Exception at all: type and arguments come back.

    (O10, C94, G49).
    """
    make = RAISED[name]
    with pytest.raises(InterventionError) as failure, serving.trace(A, **SETTINGS):
        serving.model.layers[1].output
        raise make()
    cause, right = failure.value.__cause__, make()
    assert type(cause) is type(right)
    assert cause.args == right.args
    assert str(failure.value).startswith(f"{name}: {right}")


def test_keyboard_interrupt_stays_one(serving: Any) -> None:
    """Ctrl-C that meets a block in this process is Ctrl-C for the caller."""
    with pytest.raises(KeyboardInterrupt), serving.trace(A, **SETTINGS):
        serving.model.layers[1].output
        raise KeyboardInterrupt


def test_exception_of_a_type_that_cannot_be_imported(serving: Any) -> None:
    """A type made in a function has no import path: the text says all, and there is no cause.

    (O10).
    """

    class LocalError(Exception):
        pass

    with pytest.raises(InterventionError, match=r"LocalError: here") as failure:
        with serving.trace(A, **SETTINGS):
            raise LocalError("here")  # local
    assert failure.value.__cause__ is None
    assert place(__file__, "local") in str(failure.value)


def test_chained_exceptions_show_both(serving: Any) -> None:
    """The text has the whole chain; it begins with the last one."""
    with pytest.raises(InterventionError) as failure, serving.trace(A, **SETTINGS):
        pass
        try:
            {}["layer"]  # first
        except KeyError as error:
            raise LookupError("no such layer") from error  # second
    text = str(failure.value)
    assert text.startswith("LookupError: no such layer")
    assert "KeyError: 'layer'" in text
    assert place(__file__, "first") in text
    assert place(__file__, "second") in text


def check_direction(vector: torch.Tensor) -> None:
    """A helper that a block takes along."""
    if not vector.isfinite().all():
        raise ArithmeticError("the direction is not finite")  # helper


def test_error_in_a_helper_function_shows_its_line(serving: Any) -> None:
    """A function of this module travels with the block, and so do its file and line (C12, C13)."""
    with pytest.raises(InterventionError) as failure, serving.trace(A, **SETTINGS):
        check_direction(serving.model.layers[1].output[0] / 0)  # call
    text = str(failure.value)
    assert text.startswith("ArithmeticError: the direction is not finite")
    assert place(__file__, "call") in text
    assert place(__file__, "helper") + ", in check_direction" in text


def test_unknown_name_is_a_name_error(serving: Any) -> None:
    """A name that exists nowhere is the block's NameError, at its line."""
    with pytest.raises(InterventionError, match="NameError: name 'directoin'") as failure:
        with serving.trace(A, **SETTINGS):
            serving.model.layers[1].output[0][:] += directoin  # unknown
    assert isinstance(failure.value.__cause__, NameError)
    assert place(__file__, "unknown") in str(failure.value)


def test_unknown_module_lists_those_there_are(serving: Any) -> None:
    """A misspelled submodule names its siblings."""
    with pytest.raises(InterventionError, match="AttributeError") as failure:
        with serving.trace(A, **SETTINGS):
            serving.model.layers[1].mpl.output
    assert "self_attn, mlp, input_layernorm" in str(failure.value)


def test_endless_recursion_is_the_blocks_error(serving: Any) -> None:
    """Running out of stack in a block ends the block."""

    def descend(depth: int) -> int:
        return descend(depth + 1)

    with pytest.raises(InterventionError, match="RecursionError") as failure:
        with serving.trace(A, **SETTINGS):
            descend(len(serving.model.layers[1].output[0]))
    assert type(failure.value.__cause__) is RecursionError


def test_function_form_fails_alike(serving: Any) -> None:
    """A block given as a function names its own file and line."""

    def block(model: Any, tracer: Any) -> None:
        model.model.layers[1].output
        raise ProbeError(1, score=0.25)  # function

    with pytest.raises(InterventionError, match=r"ProbeError: layer 1 scores 0\.25") as failure:
        serving.trace(A, block=block, **SETTINGS)
    assert place(__file__, "function") + ", in block" in str(failure.value)
    assert isinstance(failure.value.__cause__, ProbeError)


def fail_before_the_forward(model: Any, tracer: Any) -> None:
    raise ProbeError(0, score=0.0)


def fail_inside_the_forward(model: Any, tracer: Any) -> None:
    model.model.layers[2].mlp.output
    raise ProbeError(0, score=0.0)


def fail_after_the_forward(model: Any, tracer: Any) -> None:
    model.output
    raise ProbeError(0, score=0.0)


def fail_at_the_logits(model: Any, tracer: Any) -> None:
    model.logits
    raise ProbeError(0, score=0.0)


def fail_at_the_samples(model: Any, tracer: Any) -> None:
    model.samples
    raise ProbeError(0, score=0.0)


@pytest.mark.parametrize(
    "block",
    [
        fail_before_the_forward,
        fail_inside_the_forward,
        fail_after_the_forward,
        fail_at_the_logits,
        fail_at_the_samples,
    ],
)
def test_block_may_fail_at_any_point(serving: Any, block: Any) -> None:
    """Wherever in the step it fails, the error is the block's and the engine serves on.

    (C93, G49).
    """
    with pytest.raises(InterventionError, match="ProbeError"):
        serving.trace(A, block=block, **SETTINGS)
    assert live(serving) == [0]


def test_failed_request_ends_early(serving: Any) -> None:
    """The request of a failed block does not run on to its last token (C69)."""
    settings = {**SETTINGS, "max_tokens": 50}
    with pytest.raises(InterventionError), serving.trace(A, **settings) as tracer:
        raise ProbeError(0, score=0.0)
    completion = tracer.result.outputs[0]
    assert completion.finish_reason == "error"
    assert len(completion.token_ids) < 5


def test_what_was_saved_before_the_failure_is_bound(serving: Any) -> None:
    """Names that the block saved before it failed have their values; later ones have not (C24)."""
    later = "untouched"
    with pytest.raises(InterventionError), serving.trace(A, **SETTINGS):
        rows = serving.model.layers[1].output[0].save()
        seen = [].save()
        seen.append(len(rows))
        raise ProbeError(0, score=0.0)
        later = serving.logits.save()
    assert rows.shape == (5, 128)
    assert seen == [5]
    assert later == "untouched"


def test_block_may_handle_its_own_errors(serving: Any) -> None:
    """An error that the block catches is no failure."""
    with serving.trace(A, **SETTINGS):
        pass
        try:
            serving.model.layers[1].output[7]
        except IndexError as error:
            caught = str(error).save()
        logits = serving.logits.save()
    assert "index" in caught
    assert logits.shape == (1, 128)
