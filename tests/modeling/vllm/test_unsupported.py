"""What blocks on vLLM cannot do is refused with the reason and what to write instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from midstream import VLLM
from midstream.errors import BlockSyntaxError, InterventionError, ServerError, UnsupportedError
from tests.modeling.vllm.conftest import place
from tests.support.checkpoints import A

pytestmark = pytest.mark.usefixtures("serving")

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 1}


def test_a_barrier_around_invokes(llama: Any) -> None:
    """Asked for where the invokes are opened, it is refused there, and no request runs.

    (C72, G38).
    """
    with pytest.raises(UnsupportedError, match=r"barrier.*need not be in the same step.*second"):
        with llama.trace(**GREEDY) as tracer:
            barrier = tracer.barrier(2)
            with tracer.invoke(A):
                logits = llama.logits.save()


def test_a_barrier_inside_a_block(llama: Any) -> None:
    """It is the request's error, at its line, and what was saved before comes back (C72, G38)."""
    with pytest.raises(InterventionError, match=r"^UnsupportedError: `tracer\.barrier") as error:
        with llama.trace(A, **GREEDY) as tracer:
            hidden = llama.model.layers[0].output[0].save()
            tracer.barrier(2)  # here
    assert place(__file__, "here") in str(error.value)
    assert isinstance(error.value.__cause__, NotImplementedError)
    assert hidden.shape == (len(A), 128)


def test_a_scan(llama: Any) -> None:
    """Outside a block and inside one; what the text says to write instead works (C74, G40)."""
    with pytest.raises(UnsupportedError, match=r"scan.*save the shapes"):
        llama.scan(A)
    with pytest.raises(InterventionError, match=r"^UnsupportedError: `model\.scan"):
        with llama.trace(A, **GREEDY):
            llama.scan(A)
    with llama.trace(A, **GREEDY):
        shape = llama.get("model.layers.0").output[0].shape.save()
    assert shape == (len(A), 128)


def test_a_call_that_asks_for_locations(llama: Any) -> None:
    """A module that a block calls is not traced, and `hook=True` is refused at its line (A48)."""
    with pytest.raises(InterventionError, match=r"^UnsupportedError: `hook=True`.*returns"):
        with llama.trace(A, **GREEDY):
            llama.model.norm(llama.model.layers[0].output[0], hook=True)


def test_another_place_to_run(llama: Any) -> None:
    """There is no hosted service; a server of one's own is named with `serve=` (O22, E29)."""
    for ask in (
        lambda **elsewhere: VLLM("no/checkpoint", **elsewhere),
        lambda **elsewhere: llama.trace(A, **elsewhere),
        lambda **elsewhere: llama.generate(A, **elsewhere),
    ):
        with pytest.raises(UnsupportedError, match=r"no hosted service .* `serve=`"):
            ask(remote="http://localhost:8000")


def test_a_server_that_is_not_there(llama: Any) -> None:
    """What names a server goes there and nowhere else (C76, G61)."""
    there = "http://127.0.0.1:9"
    for ask in (
        lambda: VLLM("no/checkpoint", serve=there),
        lambda: llama.trace(A, serve=there, block=lambda model, tracer: None),
        lambda: llama.generate(A, serve=there),
        lambda: llama.edit(serve=there, block=lambda model, tracer: None),
    ):
        with pytest.raises(ServerError, match=r"http://127\.0\.0\.1:9 cannot be reached"):
            ask()


def backward(model: Any, tracer: Any) -> None:
    model.model.layers[1].output[0].sum().backward()


def backward_with(model: Any, tracer: Any) -> None:
    loss = model.logits.sum()
    with loss.backward():
        pass


def grad(model: Any, tracer: Any) -> None:
    hidden = model.model.layers[1].output[0]
    torch.autograd.grad(model.logits.sum(), hidden)


@pytest.mark.parametrize("block", [backward, backward_with, grad])
def test_gradients_through_the_model(llama: Any, block: Callable[..., Any]) -> None:
    """PyTorch's message about tensors becomes the reason, at the user's line (C74, G39)."""
    with pytest.raises(InterventionError, match=r"^UnsupportedError: Gradients .*Transf") as error:
        llama.trace(A, block=block, **GREEDY)
    assert f"in {block.__name__}" in str(error.value)


def test_gradients_in_a_captured_block(llama: Any) -> None:
    """A backward statement of a `with` body is refused alike, before its body runs (C74, G39)."""
    ran: list[int] = []
    with pytest.raises(InterventionError, match=r"^UnsupportedError: Gradients .*Transf") as error:
        with llama.trace(A, **GREEDY):
            hidden = llama.model.layers[1].output[0]
            with llama.logits.sum().backward(retain_graph=True):
                ran.append(1)
                gradient = hidden.grad.save()
    assert "with llama.logits.sum().backward(retain_graph=True):" in str(error.value)
    assert "__midstream" not in str(error.value)
    assert ran == []


def test_gradients_of_own_tensors(llama: Any) -> None:
    """They work, and their own errors stay PyTorch's."""
    with llama.trace(A, **GREEDY):
        with torch.enable_grad():
            weight = torch.ones(128, requires_grad=True)
            (llama.model.layers[1].output[0] @ weight).sum().backward()
        gradient = weight.grad.save()
    assert gradient.shape == (128,)
    with pytest.raises(InterventionError, match=r"^RuntimeError: size mismatch"):
        with llama.trace(A, **GREEDY):
            llama.model.layers[1].output[0] @ torch.ones(3)


@pytest.mark.parametrize("name", ["run", "stats", "dispatch", "close"])
def test_a_block_leaves_the_engine_as_it_is(llama: Any, name: str) -> None:
    """What the model does with its engine is refused beside a request, with what to do instead."""
    with pytest.raises(InterventionError, match=rf"^UnsupportedError: `model\.{name}\(\)` inside"):
        with llama.trace(A, **GREEDY):
            getattr(llama, name)()


def test_what_a_tracer_has_not_says_what_it_has(llama: Any) -> None:
    """A misspelled name is answered by those there are."""
    with pytest.raises(InterventionError, match=r"`tracer\.stpo` is not .* `stop\(\)`"):
        with llama.trace(A, **GREEDY) as tracer:
            tracer.stpo()


def test_old_spellings_are_refused_at_capture(llama: Any) -> None:
    """Each shows the spelling to use, and nothing has run (O24, C61)."""
    with pytest.raises(BlockSyntaxError, match=r"for step in tracer\.iter\[\.\.\.\]"):
        with llama.trace(A, **GREEDY) as tracer:
            with tracer.iter[:2]:
                logits = llama.logits.save()
    with pytest.raises(BlockSyntaxError, match=r"for step in tracer\.iter\[\.\.\.\]"):
        with llama.trace(A, **GREEDY) as tracer:
            for _ in llama.iter[:2]:
                logits = llama.logits.save()
    with pytest.raises(BlockSyntaxError, match=r"tracer\.all\(\)"):
        with llama.trace(A, **GREEDY) as tracer:
            for _ in llama.all():
                logits = llama.logits.save()
    with pytest.raises(BlockSyntaxError, match=r"tracer\.backend"):
        with llama.trace(A, **GREEDY) as tracer:
            out = tracer.backend()
