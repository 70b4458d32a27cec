"""What a trace must leave alone: other traces, random generators, PyTorch's modes."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import midstream
from midstream.errors import InterventionError, NotInTraceError, UnsupportedError
from tests.modeling.vllm.conftest import Neighbour, live, plain_tokens
from tests.support.checkpoints import A, B, C
from tests.support.compare import assert_close
from tests.support.oracle import Oracle, zero_mlp

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 1}


def test_traces_in_turn_do_not_affect_each_other(llama: Any) -> None:
    """A trace gives the same bits after one with another prompt and edits, also one that failed.

    (case 51).
    """

    def first() -> tuple[torch.Tensor, ...]:
        with llama.trace(A, temperature=0.0, max_tokens=4) as tracer:
            streams = [sum(layer.output) for layer in llama.model.layers].save()
            logits = llama.logits.save()
        return (*streams, logits, torch.tensor(tracer.result.outputs[0].token_ids))

    def other(fail: bool) -> None:
        with llama.trace(C, temperature=0.0, max_tokens=4):
            llama.model.embed_tokens.output[:] = 2.0
            for part in llama.model.layers[1].output:
                part *= -3
            if fail:
                raise ValueError("midway")
            llama.samples[:] = 5

    before = first()
    other(fail=False)
    between = first()
    with pytest.raises(InterventionError, match="midway"):
        other(fail=True)
    after = first()
    assert all(map(torch.equal, before, between))
    assert all(map(torch.equal, before, after))


def idle(model: Any, tracer: Any) -> None:
    model.logits


def draws(model: Any, tracer: Any) -> dict[str, Any]:
    """Seeds every generator, and draws from each before, between and after visits."""
    found = [torch.rand(3), np.random.rand(3), random.random()]
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    model.model.layers[1].output
    found += [torch.rand(3), np.random.rand(3), random.random()]
    model.logits
    found += [torch.rand(3), np.random.rand(3), random.random()]
    model.samples
    return {"found": found}


def drawn(model: Any, block: Callable[..., Any]) -> list[int]:
    """Tokens of unseeded requests beside and after a trace, with numpy's generator reset before."""
    np.random.seed(11)
    other = Neighbour(model, B, temperature=1.0, max_tokens=12)
    model.trace(A, block=block, **GREEDY)
    beside = other.tokens()
    return [*beside, *plain_tokens(model, B, temperature=1.0, max_tokens=12)]


def test_draws_of_a_block_are_its_own(llama: Any) -> None:
    """Seeding and drawing in a block does not change what unseeded requests sample."""
    tokens = drawn(llama, idle)
    assert drawn(llama, draws) == tokens
    np.random.seed(12)
    assert plain_tokens(llama, B, temperature=1.0, max_tokens=12) != tokens[12:]


def test_draws_of_a_block_repeat(llama: Any) -> None:
    """Run again, the same block draws the same numbers, and the caller's generators stand still."""
    states = (random.getstate(), np.random.get_state(), torch.get_rng_state())
    first, second = (llama.trace(A, block=draws, **GREEDY).saves["found"] for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert np.array_equal(np.asarray(one), np.asarray(other))
    assert not torch.equal(first[0], first[3])
    assert torch.equal(first[3], torch.rand(3, generator=torch.Generator().manual_seed(3)))
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[2])


def leave_grad_on(model: Any) -> Any:
    torch.enable_grad().__enter__()
    return lambda: torch.is_grad_enabled()


def leave_autocast_on(model: Any) -> Any:
    torch.autocast("cpu", dtype=torch.bfloat16).__enter__()
    return lambda: torch.is_autocast_enabled("cpu")


def leave_default_dtype(model: Any) -> Any:
    torch.set_default_dtype(torch.float64)
    return lambda: torch.ones(1).dtype == torch.float64


def leave_device_context(model: Any) -> Any:
    torch.device("meta").__enter__()
    return lambda: torch.ones(1).is_meta


def leave_default_device(model: Any) -> Any:
    torch.set_default_device("meta")
    return lambda: torch.ones(1).is_meta


def leave_inference_mode(model: Any) -> Any:
    guard = torch.inference_mode()  # which ends with its last reference
    guard.__enter__()
    return lambda: guard is not None and torch.is_inference_mode_enabled()


def modes() -> tuple[Any, ...]:
    """What PyTorch keeps for the thread."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.ones(1).device,
    )


LEFT_OPEN = [
    leave_grad_on,
    leave_autocast_on,
    leave_default_dtype,
    leave_device_context,
    leave_default_device,
    leave_inference_mode,
]


@pytest.mark.parametrize("leave", LEFT_OPEN)
def test_modes_left_open_stay_in_the_block(leave: Any, llama: Any) -> None:
    """What a block leaves switched on holds for it between its visits, and for nobody else."""
    before, clean = modes(), plain_tokens(llama, A, max_tokens=4)
    alone = plain_tokens(llama, B, max_tokens=8)
    beside = Neighbour(llama, B, max_tokens=8)

    def block(model: Any, tracer: Any) -> dict[str, Any]:
        holds = leave(model)
        now = [holds()]
        for layer in model.model.layers:
            layer.output
            now.append(holds())
        return {"now": now}

    tracer = llama.trace(A, block=block, temperature=0.0, max_tokens=4)
    assert tracer.saves["now"] == [True] * 5
    assert list(tracer.result.outputs[0].token_ids) == clean
    assert beside.tokens() == alone
    assert modes() == before
    assert plain_tokens(llama, A, max_tokens=4) == clean


def test_block_runs_without_gradients(llama: Any) -> None:
    """Blocks run outside inference mode and without gradients, unless they switch them on."""
    with llama.trace(A, **GREEDY):
        rows = llama.model.layers[1].output[0]
        state = (torch.is_grad_enabled(), torch.is_inference_mode_enabled()).save()
        with torch.enable_grad():
            weight = torch.ones(128, requires_grad=True)
            (rows @ weight).sum().backward()
        gradient, total = weight.grad.save(), rows.sum(0).save()
    assert state == (False, False)
    assert torch.allclose(gradient, total)


def test_block_may_work_in_inference_mode(llama: Any, hf: Oracle) -> None:
    """In inference mode, as with gradients on, reads and both kinds of write land as elsewhere."""
    right = hf.run(A, [zero_mlp(1), zero_mlp(2)]).logits
    for mode in (torch.inference_mode, torch.enable_grad):
        with llama.trace(A, **GREEDY):
            with mode():
                weight = torch.zeros(128, requires_grad=mode is torch.enable_grad)
                llama.model.layers[1].mlp.output[:] *= weight
                llama.model.layers[2].mlp.output = llama.model.layers[2].mlp.output * weight
                rows = llama.model.layers[2].output[0].save()
                logits = llama.logits
            logits = logits.save()
        assert_close(logits, right, hf.run(A, [zero_mlp(1)]).logits)
        assert not rows.any()
        assert not rows.requires_grad


def test_trace_inside_a_trace_is_refused(llama: Any) -> None:
    """The block's own trace is an error that says so (O13)."""
    with pytest.raises(InterventionError, match="UnsupportedError: A trace inside a trace"):
        with llama.trace(A, **GREEDY):
            llama.trace(B, block=idle)
    assert live(llama) == [0]


def test_a_tracer_runs_once(llama: Any) -> None:
    """A second body for the same trace is refused, and the values of the first stay."""
    tracer = llama.trace(A, **GREEDY)
    with tracer:
        rows = len(llama.model.layers[1].output[0]).save()
    with pytest.raises(UnsupportedError, match=r"Call `model\.trace\(\.\.\.\)` again"):
        with tracer:
            rows = llama.logits.save()
    assert rows == len(A)
    assert tracer.saves == {"rows": len(A)}


def test_a_trace_inside_itself_is_refused(llama: Any) -> None:
    """A trace that opens its invokes cannot be entered by its own body."""
    with pytest.raises(UnsupportedError, match=r"has its block already"):
        with llama.trace(**GREEDY) as tracer:
            with tracer:
                llama.logits


def test_threads_take_turns(llama: Any) -> None:
    """Traces of two threads on one engine run one after the other, each with its own values.

    (O13).
    """
    found: dict[int, Any] = {}

    def run(index: int, ids: list[int]) -> None:
        found[index] = [
            llama.trace(ids, block=lambda m, t: m.model.embed_tokens.input, **GREEDY)
            for _ in range(3)
        ]

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate((A, B, C))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, ids in enumerate((A, B, C)):
        assert [t.saves["return"].tolist() for t in found[index]] == [ids] * 3


def test_values_outside_a_trace(llama: Any) -> None:
    """Locations and saves exist inside a block only; the error says where they belong.

    (G20, G21).
    """
    for read in (
        lambda: llama.model.layers[0].output,
        lambda: llama.model.layers[0].inputs,
        lambda: llama.model.layers[0].input,
        lambda: llama.get("model.layers.0.output"),
        lambda: llama.model.norm(torch.zeros(1, 128)),
        lambda: llama.logits,
        lambda: llama.samples,
        lambda: midstream.save(3),
    ):
        with pytest.raises(NotInTraceError, match="inside"):
            read()
    with pytest.raises(NotInTraceError):
        llama.model.layers[0].output = torch.zeros(1)
    with pytest.raises(NotInTraceError):
        llama.logits = torch.zeros(1)
