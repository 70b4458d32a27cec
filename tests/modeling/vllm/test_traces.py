"""A trace from its prompt to its saved values, and what it must leave alone."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import midstream
from midstream.errors import InterventionError, NotInTraceError, UnboundSaveWarning
from midstream.modeling.vllm.payloads.segments import remaining
from tests.modeling.vllm.conftest import Neighbour, live, plain_tokens
from tests.support.checkpoints import A, B, C
from tests.support.compare import assert_close
from tests.support.oracle import Oracle, zero_mlp

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 1}


# --- the two forms -------------------------------------------------------------------------------


def stream_of(model: Any, ids: list[int], layer: int) -> torch.Tensor:
    """A trace in a function, whose local variable it binds."""
    with model.trace(ids, **GREEDY):
        stream = sum(model.model.layers[layer].output).save()
    return stream


class Reader:
    """A trace in a method."""

    def __init__(self, model: Any):
        self.model = model

    def read(self, ids: list[int]) -> torch.Tensor:
        layer = 2
        with self.model.trace(ids, **GREEDY):
            stream = sum(self.model.model.layers[layer].output).save()
        return stream


def test_trace_in_a_function_and_in_a_method(llama: Any, hf: Oracle) -> None:
    """Local variables, arguments and `self` are there, and results are bound where it stands."""
    right = hf.reads(C)
    for got in (stream_of(llama, C, 2), Reader(llama).read(C)):
        assert_close(got, right["residual.2"], right["residual.1"])


def test_trace_in_a_loop(llama: Any, hf: Oracle) -> None:
    """Each pass takes that pass's values along and binds its own result."""
    got = []
    for layer, ids in ((0, A), (3, B), (1, C)):
        with llama.trace(ids, **GREEDY):
            stream = sum(llama.model.layers[layer].output).save()
        got.append((layer, ids, stream))
    for layer, ids, stream in got:
        right = hf.reads(ids)
        assert_close(stream, right[f"residual.{layer}"], right[f"residual.{(layer + 1) % 4}"])


def test_trace_in_a_closure(llama: Any) -> None:
    """A variable of the function around it is bound for both."""
    rows = None

    def run(scale: float) -> None:
        nonlocal rows
        with llama.trace(B, **GREEDY):
            rows = (llama.model.layers[0].output[0] * scale).save()

    run(1.0)
    first = rows
    run(2.0)
    assert torch.equal(rows, 2 * first)


MODULE_LEVEL = None


def test_trace_binds_a_global(llama: Any) -> None:
    """A name declared global is bound there."""
    global MODULE_LEVEL
    with llama.trace(B, **GREEDY):
        MODULE_LEVEL = llama.logits.save()
    assert globals()["MODULE_LEVEL"].shape == (1, 128)


def test_function_form_returns_saves_on_the_tracer(llama: Any) -> None:
    """Variables that were saved and a returned dict are the tracer's saves; no scope is touched."""

    def block(model: Any, tracer: Any) -> dict[str, Any]:
        rows = midstream.save(model.model.layers[1].output[0])
        unsaved = rows * 2
        return {"logits": model.logits, "count": len(rows)}

    tracer = llama.trace(A, block=block, **GREEDY)
    assert tracer.saves.keys() == {"rows", "logits", "count"}
    assert tracer.saves["rows"].shape == (5, 128)
    assert tracer.saves["count"] == 5
    assert tracer.result.outputs[0].token_ids == [int(tracer.saves["logits"].argmax())]


def test_function_form_of_one_value(llama: Any) -> None:
    """What a block returns that is no dict comes back as `return`."""
    tracer = llama.trace(A, block=lambda model, tracer: model.logits, **GREEDY)
    assert tracer.saves["return"].shape == (1, 128)


def test_both_forms_agree(llama: Any) -> None:
    """The same reads give the same bits in either form."""
    with llama.trace(A, **GREEDY):
        stream = sum(llama.model.layers[1].output).save()
    other = llama.trace(A, block=lambda m, t: sum(m.model.layers[1].output), **GREEDY)
    assert torch.equal(stream, other.saves["return"])


def test_empty_block_runs_the_request(llama: Any) -> None:
    """A body of `pass` reads nothing, and the request runs all the same."""
    with llama.trace(B, temperature=0.0, max_tokens=5) as tracer:
        pass
    assert tracer.saves == {}
    assert list(tracer.result.outputs[0].token_ids) == plain_tokens(llama, B, max_tokens=5)


def test_result_is_vllms_own(llama: Any) -> None:
    """The finished request has its text, its ids, its reason, and log probabilities if asked."""
    with llama.trace(B, temperature=0.0, max_tokens=3, logprobs=2) as tracer:
        logits = llama.logits.save()
    output = tracer.result
    (completion,) = output.outputs
    assert output.finished
    assert output.prompt_token_ids == B
    assert completion.finish_reason == "length"
    assert completion.text.strip() == llama.tokenizer.decode(completion.token_ids)
    best, right = completion.token_ids[0], logits.log_softmax(-1)[0]
    assert completion.logprobs[0][best].logprob == pytest.approx(float(right[best]), abs=1e-4)
    assert float(right.topk(2).values.diff().abs()) > 1e-3


def test_tokenizer_in_a_block(llama: Any) -> None:
    """A block may use the model's tokenizer, by the model and by a variable."""
    tokenizer = llama.tokenizer
    with llama.trace(B, **GREEDY):
        token = llama.samples.item().save()
        texts = [llama.tokenizer.decode([token]), tokenizer.decode([token])].save()
        padding = llama.tokenizer.pad_token_id.save()
    assert texts == [f"t{token}"] * 2
    assert padding == llama.tokenizer.pad_token_id


# --- what comes back -----------------------------------------------------------------------------


def test_saves_of_plain_values(llama: Any) -> None:
    """Numbers, strings, lists, dicts, None and their kind come back under their names."""
    with llama.trace(A, **GREEDY):
        rows = llama.model.layers[1].output[0]
        count = len(rows).save()
        three = 3
        three.save()
        same_three = 3
        score = float(rows[0, 0]).save()
        name = "layer one".save()
        flag = True.save()
        nothing = None
        nothing.save()
        pair = (count, name).save()
        table = {"rows": rows, 2: [score]}.save()
        array = rows.numpy().save()
        kind = rows.dtype.save()
    assert (count, three, name, flag, nothing) == (5, 3, "layer one", True, None)
    assert "same_three" not in locals()
    assert pair == (5, "layer one")
    assert table["rows"][0, 0].item() == score == table[2][0]
    assert isinstance(array, np.ndarray)
    assert np.array_equal(array, table["rows"].numpy())
    assert kind is torch.float32


def test_containers_may_be_filled_later(llama: Any) -> None:
    """What is appended after the save comes back, without a save of its own."""
    with llama.trace(A, **GREEDY):
        streams, by_layer = [].save(), {}.save()
        for i, layer in enumerate(llama.model.layers):
            streams.append(sum(layer.output))
            by_layer[i] = streams[-1].norm().item()
    assert len(streams) == 4
    assert [s.norm().item() for s in streams] == list(by_layer.values())


def test_save_by_function(llama: Any) -> None:
    """`midstream.save` takes anything, by any name it is imported under."""
    keep = midstream.save
    with llama.trace(A, **GREEDY):
        rows = midstream.save(llama.model.layers[1].output[0])
        count = keep(len(rows))
    assert rows.shape == (5, 128)


def test_save_returns_its_value(llama: Any) -> None:
    """What is computed from a save is not saved by it."""
    with llama.trace(A, **GREEDY):
        doubled = (total := llama.model.layers[1].output[0].sum().save()) * 2
    assert total.shape == ()
    assert "doubled" not in locals()


def test_unbound_save_warns(llama: Any) -> None:
    """A save that no name holds cannot come back, and says so at its line."""
    with pytest.warns(UnboundSaveWarning, match="bound to no name") as caught:
        with llama.trace(A, **GREEDY):
            llama.logits.save()
    assert caught[0].filename == __file__


def test_saved_tensors_are_ordinary(llama: Any) -> None:
    """They are on the CPU, take part in autograd, and can be written to."""
    with llama.trace(A, **GREEDY):
        rows = llama.model.layers[1].output[0].save()
        view = llama.model.layers[2].output[0][1:3, ::2].save()
        graph = torch.nn.Parameter(torch.ones(3)).save()
    for tensor in (rows, view):
        assert tensor.device.type == "cpu"
        assert not tensor.requires_grad
        assert not tensor.is_inference()
        assert tensor.grad_fn is None
        tensor += 1.0
        weight = torch.ones(tensor.shape[1], requires_grad=True)
        (tensor @ weight).sum().backward()
        assert torch.equal(weight.grad, tensor.sum(0))
    assert not graph.requires_grad
    assert view.shape == (2, 64)
    assert view.untyped_storage().nbytes() < rows.untyped_storage().nbytes()


def test_large_save_leaves_no_shared_memory(llama: Any) -> None:
    """Seventy megabytes come back whole, by shared memory that has no name afterwards."""
    with llama.trace(A, **GREEDY):
        row = llama.model.layers[1].output[0][0]
        large = row.repeat(140_000, 1).save()
        row = row.clone().save()
    assert large.nbytes > 64 << 20
    assert torch.equal(large[0], row)
    assert torch.equal(large[-1], row)
    large[3] = 0.0
    assert remaining(llama._engine._owner) == []


# --- what a trace leaves alone -------------------------------------------------------------------


def test_traces_in_turn_do_not_affect_each_other(llama: Any) -> None:
    """A trace gives the same bits after one with another prompt and edits, also one that failed."""

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
    """The block's own trace is an error that says so."""
    with pytest.raises(InterventionError, match="UnsupportedError: A trace inside a trace"):
        with llama.trace(A, **GREEDY):
            llama.trace(B, block=idle)
    assert live(llama) == [0]


def test_threads_take_turns(llama: Any) -> None:
    """Traces of two threads on one engine run one after the other, each with its own values."""
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
    """Locations and saves exist inside a block only; the error says where they belong."""
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
