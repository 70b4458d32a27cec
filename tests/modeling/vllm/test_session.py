"""`model.session()`: several traces in one `with`."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from midstream.errors import CaptureError, InterventionError, UnsupportedError
from tests.support.changes import replace_layer
from tests.support.checkpoints import A, B
from tests.support.oracle import Oracle, assert_close

GREEDY = {"temperature": 0.0, "ignore_eos": True}
A2 = [16, 17, 18, 19, 20]

pytestmark = pytest.mark.usefixtures("nothing_left")


def test_later_traces_use_what_earlier_ones_saved(llama: Any, hf: Oracle) -> None:
    """Traces run in order, and a saved value of one is at hand in the next (C73)."""
    with llama.session():
        with llama.trace(A, max_tokens=1, **GREEDY):
            stream = sum(llama.model.layers[1].output).save()
        assert stream.shape == (5, 128)
        with llama.trace(A2, max_tokens=1, **GREEDY):
            hidden, residual = llama.model.layers[1].output
            hidden[:] = stream
            residual[:] = 0
            logits = llama.logits.save()
    right = hf.run(A2, [replace_layer(1, hf.reads(A)["residual.1"])]).logits
    assert_close(logits, right, hf.run(A2).logits)


def test_values_that_were_not_saved_are_refused(llama: Any) -> None:
    """A variable that an earlier trace bound and did not save is an error that says where (C73)."""
    with llama.session():
        with llama.trace(A, max_tokens=1, **GREEDY):
            lost = llama.model.layers[1].output
        with pytest.raises(CaptureError, match=r"reads `lost`.*test_session.py, line \d+.*save"):
            with llama.trace(B, max_tokens=1, **GREEDY):
                lost[0][:] = 0
        with llama.trace(B, max_tokens=1, **GREEDY):
            shape = llama.logits.shape
            shape.save()
    assert tuple(shape) == (1, 128)
    with pytest.raises(InterventionError, match=r"^NameError: name 'lost'"):
        with llama.trace(B, max_tokens=1, **GREEDY):  # without a session: Python's own error
            lost[0][:] = 0


def test_only_variables_of_earlier_traces_count(llama: Any) -> None:
    """Attributes, a sibling's variables and the block's own are not what a session refuses."""
    with llama.session():
        with llama.trace(A, max_tokens=1, **GREEDY):
            llama.model.layers[1].output
        with pytest.raises(InterventionError, match="NameError: name 'output'"):
            with llama.trace(A, max_tokens=1, **GREEDY):
                output
        with pytest.raises(InterventionError, match="NameError: name 'sibling'"):
            with llama.trace(max_tokens=1, **GREEDY) as tracer:
                with tracer.invoke(A):
                    sibling = llama.logits
                with tracer.invoke(B):
                    sibling.sum()
        with llama.trace(A, max_tokens=1, **GREEDY):
            sibling = 3
            double = (2 * sibling).save()
    assert double == 6


def test_an_error_leaves_the_session(llama: Any) -> None:
    """A failed trace's error comes out of the session, and the model goes on as before."""
    with pytest.raises(InterventionError, match="ValueError: mine"):
        with llama.session():
            with llama.trace(A, max_tokens=1, **GREEDY):
                raise ValueError("mine")
    with llama.session():
        (output,) = llama.generate(A, max_tokens=1, **GREEDY)
    assert output.finished


def test_other_threads_wait_for_the_end(llama: Any) -> None:
    """Requests of other threads run before or after a session, never in it."""
    order = []

    def other() -> None:
        started.set()
        with pytest.raises(InterventionError, match="NameError"):  # it is in no session
            with llama.trace(B, max_tokens=1, **GREEDY):
                bound
        order.append("other")

    started = threading.Event()
    thread = threading.Thread(target=other)
    with llama.session():
        thread.start()
        started.wait()
        for _ in range(3):
            with llama.trace(A, max_tokens=2, **GREEDY):
                bound = 1
            order.append("session")
    thread.join()
    assert order == ["session"] * 3 + ["other"]


def test_sessions_do_not_nest(llama: Any) -> None:
    """A session inside a session, or inside a block, is refused."""
    with llama.session():
        with pytest.raises(UnsupportedError, match="session inside a session"):
            with llama.session():
                pass
        with llama.trace(A, max_tokens=1, **GREEDY):
            pass
    with pytest.raises(InterventionError) as caught:
        with llama.trace(A, max_tokens=1, **GREEDY):
            llama.session()
    assert isinstance(caught.value.__cause__, UnsupportedError)
