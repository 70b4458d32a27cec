"""What goes wrong in a block reaches its caller, with the user's line, and nobody else."""

from __future__ import annotations

import threading
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch

from midstream.errors import InterventionError, MidstreamError, OutOfOrderError, TransportError
from tests.modeling.vllm.conftest import live, runner_of
from tests.support.checkpoints import A

SETTINGS: dict[str, Any] = {"temperature": 0.0, "max_tokens": 4}
HERE = Path(__file__)


class ProbeError(Exception):
    """An exception of the user's own, with arguments that its constructor does not take back."""

    def __init__(self, layer: int, *, score: float):
        super().__init__(layer, score)
        self.layer = layer

    def __str__(self) -> str:
        return f"layer {self.layer} scores {self.args[1]}"


class Stop(BaseException):
    """Not even an Exception."""


def line_of(mark: str) -> int:
    """Number of the line of this file that ends with a comment."""
    lines = HERE.read_text().splitlines()
    (found,) = [i for i, line in enumerate(lines, 1) if line.endswith(f"  # {mark}")]
    return found


def place(mark: str) -> str:
    """How a traceback names that line."""
    return f'File "{HERE}", line {line_of(mark)}, in '


# --- what arrives --------------------------------------------------------------------------------


def test_exception_arrives_with_its_type_message_and_line(serving: Any) -> None:
    """It is a RuntimeError that begins with the original and has it as its cause."""
    with pytest.raises(RuntimeError) as failure, serving.trace(A, **SETTINGS):
        hidden = serving.model.layers[1].output[0]
        raise ValueError("no such direction", 7)  # raise
    error = failure.value
    assert type(error) is InterventionError
    assert isinstance(error, MidstreamError)
    text = str(error)
    assert text.startswith("ValueError: ('no such direction', 7)\n")
    assert place("raise") + "test_exception_arrives_with_its_type_message_and_line" in text
    assert 'raise ValueError("no such direction", 7)' in text
    assert type(error.__cause__) is ValueError
    assert error.__cause__.args == ("no such direction", 7)


def test_traceback_shows_the_users_code_only(serving: Any) -> None:
    """Neither midstream's files nor how a body is skipped show in the text or in the chain."""
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
    """Built-in, the user's own, SystemExit or no Exception at all: type and arguments come back."""
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
    """A type made in a function has no import path: the text says all, and there is no cause."""

    class LocalError(Exception):
        pass

    with pytest.raises(InterventionError, match=r"LocalError: here") as failure:
        with serving.trace(A, **SETTINGS):
            raise LocalError("here")  # local
    assert failure.value.__cause__ is None
    assert place("local") in str(failure.value)


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
    assert place("first") in text
    assert place("second") in text


def check_direction(vector: torch.Tensor) -> None:
    """A helper that a block takes along."""
    if not vector.isfinite().all():
        raise ArithmeticError("the direction is not finite")  # helper


def test_error_in_a_helper_function_shows_its_line(serving: Any) -> None:
    """A function of this module travels with the block, and so do its file and line."""
    with pytest.raises(InterventionError) as failure, serving.trace(A, **SETTINGS):
        check_direction(serving.model.layers[1].output[0] / 0)  # call
    text = str(failure.value)
    assert text.startswith("ArithmeticError: the direction is not finite")
    assert place("call") in text
    assert place("helper") + "check_direction" in text


def test_unknown_name_is_a_name_error(serving: Any) -> None:
    """A name that exists nowhere is the block's NameError, at its line."""
    with pytest.raises(InterventionError, match="NameError: name 'directoin'") as failure:
        with serving.trace(A, **SETTINGS):
            serving.model.layers[1].output[0][:] += directoin  # unknown
    assert isinstance(failure.value.__cause__, NameError)
    assert place("unknown") in str(failure.value)


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
    assert place("function") + "block" in str(failure.value)
    assert isinstance(failure.value.__cause__, ProbeError)


class ExitingError(Exception):
    """An exception that ends Python when it is shown."""

    def __str__(self) -> str:
        raise SystemExit(1)


class HidingError(Exception):
    """An exception without its arguments."""

    @property
    def args(self) -> Any:  # type: ignore[override]
        raise KeyError("args")


def long_chain() -> Exception:
    error = None
    for number in range(3000):
        link = ValueError(number)
        link.__context__, error = error, link
    assert error is not None
    return error


def odd_notes() -> Exception:
    error = ValueError("noted")
    error.__notes__ = None  # type: ignore[assignment]
    return error


@pytest.mark.parametrize("make", [ExitingError, HidingError, long_chain, odd_notes])
def test_an_exception_that_cannot_be_shown_leaves_the_engine_alone(serving: Any, make: Any) -> None:
    """An exception may misbehave, or have a chain longer than Python's stack."""

    def block(model: Any, tracer: Any) -> None:
        raise make()

    with pytest.raises(InterventionError, match=r"Error"):
        serving.trace(A, block=block, **SETTINGS)


@pytest.mark.parametrize("value", [10**7, -5])
@pytest.mark.parametrize(
    "path", ["", "model", "model.embed_tokens", "model.layers.0.self_attn.rotary_emb"]
)
@pytest.mark.parametrize("assigned", [True, False])
def test_an_index_outside_its_table_is_the_blocks_error(
    serving: Any, path: str, value: int, assigned: bool
) -> None:
    """Token ids and positions that the model cannot look up are refused where they are written."""

    def block(model: Any, tracer: Any) -> None:
        node = model.get(path)
        if assigned:
            node.input = torch.full_like(node.input, value)
        else:
            node.input[:] = value

    with pytest.raises(InterventionError, match=rf"was given {value}; it takes 0 to \d+"):
        serving.trace(A, block=block, **SETTINGS)


@pytest.mark.parametrize("name", ["tracer", "model"])
def test_blocks_share_no_state_through_the_engines_objects(serving: Any, name: str) -> None:
    """What all blocks of an engine use cannot be changed by one of them."""

    def block(model: Any, tracer: Any) -> None:
        if name == "tracer":
            tracer.stop = None
        else:
            model.get = None

    with pytest.raises(InterventionError, match="cannot be assigned"):
        serving.trace(A, block=block, **SETTINGS)


def test_nan_stays_with_its_request(serving: Any) -> None:
    """A NaN that a block has put into the cache is gone when another request gets the memory."""
    for _ in range(3):
        with serving.trace(A, temperature=0.0, max_tokens=2):
            serving.model.layers[0].mlp.output[:] = float("nan")
            logits = serving.logits.save()
    assert logits.isnan().all()


# --- when it happens -----------------------------------------------------------------------------


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
    """Wherever in the step it fails, the error is the block's and the engine serves on."""
    with pytest.raises(InterventionError, match="ProbeError"):
        serving.trace(A, block=block, **SETTINGS)
    assert live(serving) == [0]


def test_failed_request_ends_early(serving: Any) -> None:
    """The request of a failed block does not run on to its last token."""
    settings = {**SETTINGS, "max_tokens": 50}
    with pytest.raises(InterventionError), serving.trace(A, **settings) as tracer:
        raise ProbeError(0, score=0.0)
    completion = tracer.result.outputs[0]
    assert completion.finish_reason == "error"
    assert len(completion.token_ids) < 5


def test_what_was_saved_before_the_failure_is_bound(serving: Any) -> None:
    """Names that the block saved before it failed have their values; later ones have not."""
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


# --- order ---------------------------------------------------------------------------------------


def test_earlier_layer_after_a_later_one(serving: Any) -> None:
    """Reading back in the model is refused at once, at the line, saying where to move it."""
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
    assert f"above line {line_of('later')}" in text
    assert place("earlier") in text
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
    """Inputs before outputs, no way back, writes included: the location is named."""
    with pytest.raises(InterventionError) as failure:
        serving.trace(A, block=lambda model, tracer: block(model), **SETTINGS)
    assert str(failure.value).startswith(f"OutOfOrderError: '{where}' was requested but")


@pytest.mark.parametrize(
    "path", ["lm_head", "model.layers.0.self_attn.rotary_emb.apply_rotary_emb"]
)
def test_module_that_does_not_run(serving: Any, path: str) -> None:
    """A location that the step ends without is an error of that step, at the line that asked."""
    with pytest.raises(InterventionError) as failure, serving.trace(A, **SETTINGS):
        serving.get(path).output  # never
    text = str(failure.value)
    assert text.startswith(f"OutOfOrderError: 'model.{path}.output.i0' did not run in this step")
    assert place("never") in text


# --- values that cannot travel -------------------------------------------------------------------


def _lock() -> Any:
    return threading.Lock()


def _generator() -> Any:
    return (i for i in range(3))


def _nested() -> Any:
    return {"layers": [1, threading.Lock()]}


@pytest.mark.parametrize(
    ("make", "where"),
    [(_lock, "saves['bad']"), (_generator, "saves['bad']"), (_nested, "saves['bad']['layers'][1]")],
)
def test_save_that_cannot_travel(serving: Any, make: Any, where: str) -> None:
    """It is an error that names the variable; the other saves are bound."""
    with pytest.raises(InterventionError, match="TransportError") as failure:
        with serving.trace(A, **SETTINGS):
            rows = serving.model.layers[1].output[0].save()
            bad = make().save()
            logits = serving.logits.save()
    assert where in str(failure.value)
    assert isinstance(failure.value.__cause__, TransportError)
    assert rows.shape == (5, 128)
    assert logits.shape == (1, 128)


@pytest.mark.parametrize("make", [_lock, _generator])
def test_captured_value_that_cannot_travel(serving: Any, make: Any) -> None:
    """It is refused before anything is sent, with the name of the variable and what to do."""
    resource = make()
    with pytest.raises(TransportError, match=r"variable `resource`.*before the `with`") as failure:
        with serving.trace(A, **SETTINGS) as tracer:
            serving.model.layers[1].output
            resource.foo()
    assert tracer.result is None
    assert "_BodySkipped" not in "".join(traceback.format_exception(failure.value))


def test_value_that_fails_to_rebuild_in_the_engine(serving: Any) -> None:
    """A value whose own unpickling raises is that request's error, with the variable's name."""
    with pytest.raises(InterventionError, match=r"TransportError: the variable `bomb`") as failure:
        with serving.trace(A, **SETTINGS):
            bomb.x
    assert "on arrival" in str(failure.value)


def _explode() -> None:
    raise RuntimeError("on arrival")


class Bomb:
    """Travels well, and fails when it is unpacked."""

    def __reduce__(self) -> Any:
        return _explode, ()


bomb = Bomb()


def test_module_after_logits_is_refused_at_once_by_a_new_engine(llama: Any) -> None:
    """Before the engine has seen the order of modules it knows that all come before the logits."""
    interleaver = runner_of(llama).blocks.interleaver
    known = interleaver._order, interleaver._learned
    interleaver._order, interleaver._learned = {}, False
    try:
        with (
            pytest.raises(InterventionError, match="already ran past it.*logits.i0"),
            llama.trace(A, **SETTINGS),
        ):
            llama.logits
            llama.model.layers[0].output
    finally:
        interleaver._order, interleaver._learned = known
