"""Prints and warnings of blocks reach the caller."""

from __future__ import annotations

import io
import sys
import warnings
from typing import Any

import pytest
import torch

from midstream.errors import InterventionError
from tests.modeling.vllm.conftest import line_of
from tests.support.checkpoints import A, B

SETTINGS: dict[str, Any] = {"temperature": 0.0, "max_tokens": 3}


def test_prints_come_home_in_order(llama: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """What a block prints in its steps is printed by the caller when the trace ends."""
    with llama.trace(A, **SETTINGS) as tracer:
        print("begin")
        for step in tracer.iter[:2]:
            print("step", step, tuple(llama.model.layers[1].output[0].shape))
        sys.stdout.write("end\n")
        print("oops", file=sys.stderr)
    captured = capsys.readouterr()
    assert captured.out == "begin\nstep 0 (5, 128)\nstep 1 (1, 128)\nend\n"
    assert captured.err == "oops\n"


def test_prints_of_invokes_come_in_the_order_of_submission(
    llama: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Requests run side by side, and each one's text stays together."""
    with llama.trace(**SETTINGS) as tracer:
        for ids in (A, B):
            with tracer.invoke(ids):
                for step in tracer.iter[:2]:
                    llama.logits
                    print(len(ids), step)
    assert capsys.readouterr().out == "5 0\n5 1\n3 0\n3 1\n"


def test_a_failed_block_printed_before_it_failed(
    llama: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """What it printed and warned about comes home although the trace raises."""
    with (
        pytest.warns(UserWarning, match="mind the gap"),
        pytest.raises(InterventionError, match="ZeroDivisionError"),
        llama.trace(A, **SETTINGS),
    ):
        print("so far")
        warnings.warn("mind the gap", stacklevel=1)
        1 / 0
    assert capsys.readouterr().out == "so far\n"


def test_what_the_callers_encoding_lacks_is_shown_as_escapes(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream that cannot show a character does not lose the trace's values."""
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    with llama.trace(A, **SETTINGS):
        print("π")
        logits = llama.logits.save()
    sys.stdout.flush()
    assert raw.getvalue() == b"\\u03c0\n"
    assert logits.shape == (1, 128)


def test_a_warning_has_the_users_line(llama: Any) -> None:
    """The caller catches it where the trace ends, at the line of the block that warned."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with llama.trace(A, **SETTINGS):
            warnings.warn("look here", RuntimeWarning, stacklevel=1)  # the line
            logits = llama.logits.save()
    (warning,) = [each for each in caught if "look here" in str(each.message)]
    assert warning.category is RuntimeWarning
    assert (warning.filename, warning.lineno) == (__file__, line_of(__file__, "the line"))
    assert logits.shape == (1, 128)


def test_a_warning_of_torch_comes_home(llama: Any) -> None:
    """Libraries that a block calls warn in the caller's process too."""
    with (
        pytest.warns(UserWarning, match="size .* different to the input size"),
        llama.trace(A, **SETTINGS),
    ):
        torch.nn.functional.mse_loss(torch.zeros(2, 1), torch.zeros(2))


def test_the_callers_filters_decide(llama: Any) -> None:
    """A filter may turn a block's warning into an error, or hide it; values are bound anyway."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        with pytest.raises(ResourceWarning, match="as an error"), llama.trace(A, **SETTINGS):
            logits = llama.logits.save()
            warnings.warn("as an error", ResourceWarning, stacklevel=1)
    assert logits.shape == (1, 128)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        with llama.trace(A, **SETTINGS):
            warnings.warn("not seen", stacklevel=1)
    assert caught == []
