"""Values that cannot travel between client and engine are named."""

from __future__ import annotations

import threading
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch

from midstream.errors import CaptureError, InterventionError, TransportError
from midstream.modeling.vllm.wire import KEY
from tests.support.checkpoints import A

SETTINGS: dict[str, Any] = {"temperature": 0.0, "max_tokens": 4}
HERE = Path(__file__)


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
    """It is refused before anything is sent, with the name of the variable and what to do (G52)."""
    resource = make()
    with pytest.raises(TransportError, match=r"variable `resource`.*before the `with`") as failure:
        with serving.trace(A, **SETTINGS) as tracer:
            serving.model.layers[1].output
            resource.foo()
    assert tracer.result is None
    assert "_BodySkipped" not in "".join(traceback.format_exception(failure.value))


def test_a_trace_that_is_not_entered_does_nothing(serving: Any) -> None:
    """Without its `with` a trace captures nothing and submits nothing (C9)."""
    tracer = serving.trace(A, **SETTINGS)
    assert tracer.result is None
    assert tracer.saves == {}
    assert not serving.vllm_entrypoint.llm_engine.has_unfinished_requests()
    with pytest.raises(CaptureError, match="Nothing has been captured yet"):
        tracer.to_bytes()


def test_what_travels_with_a_block(serving: Any) -> None:
    """A tensor that is mentioned, or a row of it; the model goes by name (C12, C16, C17)."""
    table = torch.randn(1000, 128)
    row = table[7]
    with serving.trace(A, run=False, **SETTINGS) as whole:
        serving.model.layers[1].output[0][:] += table[7]
    with serving.trace(A, run=False, **SETTINGS) as one:
        serving.model.layers[1].output[0][:] += row
    with serving.trace(A, run=False, **SETTINGS) as none:
        serving.model.layers[1].output[0][:] += 1.0
    sizes = [len(tracer.to_bytes()) for tracer in (none, one, whole)]
    assert sizes[0] < 2000  # the tree alone would be many times that
    assert row.nbytes <= sizes[1] - sizes[0] < 4 * row.nbytes
    assert sizes[2] > table.nbytes


def test_an_edit_is_sent_once(serving: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that run an installed edit carry its number, not its code and tensors (C91)."""
    table, sent = torch.zeros(1000, 128), []
    core = serving.vllm_entrypoint.llm_engine
    submit = core.add_request

    def add_request(name: str, prompt: Any, params: Any, **others: Any) -> Any:
        sent.append(len(params.extra_args[KEY]))
        return submit(name, prompt, params, **others)

    with serving.edit() as (_, edit):
        row = serving.model.layers[1].output[0][0] + table[7]
        row.save()
    monkeypatch.setattr(core, "add_request", add_request)
    outputs = serving.generate([A, A], **SETTINGS)
    edit.clear()
    assert [output.saves["row"].shape for output in outputs] == [(128,), (128,)]
    assert len(sent) == 2
    assert max(sent) < 100 < table.nbytes


def test_value_that_fails_to_rebuild_in_the_engine(serving: Any) -> None:
    """A value whose own unpickling raises is that request's error, with the variable's name.

    (C95, G51).
    """
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
