"""Loops over a request's steps, and requests that end early."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch

from midstream.errors import InterventionError, NotInTraceError, StepsCutShortWarning
from tests.support.checkpoints import EOS, A, C
from tests.support.device import DEVICE
from tests.support.oracle import Oracle, add_vector, assert_close, zero_mlp

GREEDY = {"temperature": 0.0, "ignore_eos": True}


pytestmark = pytest.mark.usefixtures("nothing_left")


def test_a_loop_reads_every_step(llama: Any, hf: Oracle) -> None:
    """Logits, sampled ids and a layer's rows of each step are those of HuggingFace's generation.

    (B9, C53, C55).
    """
    right = hf.generate(A, 5)
    with llama.trace(A, max_tokens=5, **GREEDY) as tracer:
        logits, ids, shapes = [], [], []
        for _ in tracer.iter[:5]:
            shapes.append(tuple(llama.model.layers[2].output[0].shape))
            logits.append(llama.logits)
            ids.append(llama.samples)
        logits.save()
        ids.save()
        shapes.save()
    assert shapes == [(len(A), 128), *[(1, 128)] * 4]
    assert [int(i) for i in ids] == right.tokens == tracer.result.outputs[0].token_ids
    assert_close(torch.cat(logits), right.logits, right.logits.roll(1, 0))


def test_an_edit_in_every_step_acts_in_every_step(llama: Any, hf: Oracle) -> None:
    """Steering in a loop acts in each step as on HuggingFace; without a loop, in the first only.

    (C52, C53).
    """
    vector = torch.randn(128, generator=torch.Generator().manual_seed(3)) * 2
    always = hf.generate(A, 6, changes=[add_vector(1, vector)])
    first = hf.generate(A, 6, changes=[add_vector(1, vector)], when="prefill")
    assert always.tokens != first.tokens
    with llama.trace(A, max_tokens=6, **GREEDY) as looped:
        for _ in looped.all():
            llama.model.layers[1].output[0][:] += vector.to(DEVICE)
    with llama.trace(A, max_tokens=6, **GREEDY) as once:
        llama.model.layers[1].output[0][:] += vector.to(DEVICE)
    assert looped.result.outputs[0].token_ids == always.tokens
    assert once.result.outputs[0].token_ids == first.tokens


@pytest.mark.parametrize(
    ("which", "steps"),
    [
        (slice(1, 3), [1, 2]),
        (2, [2]),
        ([0, 3], [0, 3]),
        (slice(2, None), [2, 3]),
        (slice(1, None, 2), [1, 3]),
        (slice(0, 4, 3), [0, 3]),
    ],
    ids=["slice", "number", "list", "open", "every second", "every third"],
)
def test_chosen_steps(llama: Any, hf: Oracle, which: Any, steps: list[int]) -> None:
    """A slice, a number or a list runs the body in those steps only (C53)."""
    right = hf.generate(A, 4)
    with llama.trace(A, max_tokens=4, **GREEDY) as tracer:
        seen = []
        for step in tracer.iter[which]:
            seen.append((step, int(llama.samples)))
        seen.save()
    assert seen == [(step, right.tokens[step]) for step in steps]


def test_an_edit_in_one_step_acts_in_that_step(llama: Any, hf: Oracle) -> None:
    """An edit at step 2 alone equals HuggingFace's with the change in that step alone."""
    right = hf.generate(A, 6, changes=[zero_mlp(1)], when=[2])
    wrong = hf.generate(A, 6, changes=[zero_mlp(1)], when="prefill")
    with llama.trace(A, max_tokens=6, **GREEDY) as tracer:
        logits = []
        for step in tracer.iter[:6]:
            if step == 2:
                llama.model.layers[1].mlp.output[:] = 0
            logits.append(llama.logits)
        logits.save()
    assert_close(torch.cat(logits), right.logits, wrong.logits)


def test_a_state_lives_across_steps_and_statements_after_the_loop_run(llama: Any) -> None:
    """Names of the block persist from step to step, and what follows a loop is executed.

    (O8, C18).
    """
    with llama.trace(A, max_tokens=4, **GREEDY) as tracer:
        total, best = 0, None
        for _ in tracer.iter[:4]:
            token = int(llama.samples)
            total += token
            best = token if best is None else max(best, token)
        result = {"total": total, "best": best}.save()
    ids = tracer.result.outputs[0].token_ids
    assert result == {"total": sum(ids), "best": max(ids)}


def test_reads_before_a_loop_and_nested_loops(llama: Any, hf: Oracle) -> None:
    """A loop goes on in the step the block is in, and an inner one from where the outer stands.

    (C53).
    """
    tokens = hf.generate(A, 5).tokens
    with llama.trace(A, max_tokens=5, **GREEDY) as tracer:
        early = llama.model.layers[0].output[0]
        seen = []
        for outer in tracer.iter[:2]:
            if outer == 1:
                for inner in tracer.iter[:3]:
                    seen.append((outer, inner, int(llama.samples)))
                for inner in tracer.iter[3:4]:
                    seen.append((outer, inner, int(llama.samples)))
            else:
                seen.append((outer, None, int(llama.samples)))
        seen.save()
        rows = len(early)
        rows.save()
    assert seen == [(0, None, tokens[0]), *((1, step, tokens[step]) for step in (1, 2, 3))]
    assert rows == len(A)


@pytest.mark.parametrize("how", ["length", "eos"])
def test_a_loop_longer_than_the_request_ends_and_warns(llama: Any, how: str) -> None:
    """The steps that ran come back, statements after the loop run, and the caller is warned.

    (O8, O11, C56, G37, case 48).
    """
    settings = {"temperature": 0.0, "max_tokens": 3 if how == "length" else 10}
    with (
        pytest.warns(
            StepsCutShortWarning, match="asked for 10 steps and the request ran 3"
        ) as caught,
        llama.trace(A, **settings) as tracer,
    ):
        seen = []
        for step in tracer.iter[:10]:
            if how == "eos" and step == 2:
                llama.logits[:, EOS] = 1e4
            seen.append(step)
            llama.samples
        seen.save()
        after = "ran".save()
    assert seen == [0, 1, 2]
    assert after == "ran"
    assert caught[0].filename == __file__
    assert tracer.result.outputs[0].finish_reason == ("length" if how == "length" else "stop")


def test_an_open_loop_ends_with_the_request_without_a_warning(llama: Any) -> None:
    """`tracer.all()` runs as many steps as the request does, and nothing is warned about.

    (O8, C56).
    """
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with llama.trace(A, max_tokens=3, **GREEDY) as tracer:
            seen = []
            for step in tracer.all():
                seen.append(step)
                llama.logits
            seen.save()
    assert seen == [0, 1, 2]


@pytest.mark.parametrize("which", [-1, slice(-2, None), [1, -3]])
def test_a_negative_step_is_refused(llama: Any, which: Any) -> None:
    """A negative step is a ValueError in the block (C53, G42)."""
    with (
        pytest.raises(InterventionError, match="ValueError: A step cannot be negative"),
        llama.trace(A, max_tokens=2, **GREEDY) as tracer,
    ):
        for _ in tracer.iter[which]:
            pass


def test_every_0th_step_is_refused(llama: Any) -> None:
    """A loop that would never get on is a ValueError in the block."""
    with (
        pytest.raises(InterventionError, match="ValueError: .* 1 or more, got 0"),
        llama.trace(A, max_tokens=2, **GREEDY) as tracer,
    ):
        for _ in tracer.iter[::0]:
            pass


@pytest.mark.parametrize("which", [1.5, None, "a", True, [0, 1.0], slice(0, 1.5)])
def test_a_step_is_a_whole_number(llama: Any, which: Any) -> None:
    """Anything else is a TypeError that says what a loop takes."""
    with (
        pytest.raises(InterventionError, match=r"^TypeError: A step is a whole .* a slice, or a"),
        llama.trace(A, max_tokens=2, **GREEDY) as tracer,
    ):
        for _ in tracer.iter[which]:
            pass


@pytest.mark.parametrize("one", [np.int64(1), torch.tensor(1)])
def test_numbers_of_other_libraries_are_steps(llama: Any, one: Any) -> None:
    """An integer that came out of an array counts as one."""
    with llama.trace(A, max_tokens=3, **GREEDY) as tracer:
        seen = []
        for which in (slice(0, one), one, [one + 1]):
            seen += list(tracer.iter[which])
        seen.save()
    assert seen == [0, 1, 2]


def test_a_step_that_has_passed_is_refused(llama: Any) -> None:
    """A loop over an earlier step than the block is in says so at once (O8)."""
    with (
        pytest.raises(InterventionError, match="OutOfOrderError: Step 0 has passed"),
        llama.trace(A, max_tokens=4, **GREEDY) as tracer,
    ):
        for _ in tracer.iter[1:3]:
            llama.logits
        for _ in tracer.iter[0:2]:
            pass


def test_reading_backwards_in_a_loop_is_refused_at_once(llama: Any) -> None:
    """A layer read after a later one is an error in that step, not the next step's value.

    (O8, C54).
    """
    with (
        pytest.raises(InterventionError, match=r"layers\.1\.output\.i1' was requested but"),
        llama.trace(A, max_tokens=4, **GREEDY) as tracer,
    ):
        for step in tracer.iter[:4]:
            late = llama.model.layers[2].output[0]
            if step == 1:
                llama.model.layers[1].output[0]


def test_steps_without_a_waiting_block_are_vanilla(llama: Any) -> None:
    """While a block waits for a later step, the steps between run without it."""
    runner = llama.vllm_entrypoint.llm_engine.model_executor.driver_worker.worker.model_runner
    active, gather = [], runner.blocks.enter_step

    def counted(batch: Any) -> Any:
        found = gather(batch)
        active.append(len(found[0]))
        return found

    runner.blocks.enter_step = counted
    try:
        with llama.trace(A, max_tokens=6, **GREEDY) as tracer:
            for _ in tracer.iter[3]:
                logits = llama.logits.save()
    finally:
        del runner.blocks.enter_step
    assert active == [1, 0, 0, 1, 0, 0]  # the block starts in step 0, and works in step 3


@pytest.mark.parametrize("wanted", ["nothing", "logits", "module"])
def test_only_a_block_that_waits_for_a_module_changes_the_forward(llama: Any, wanted: str) -> None:
    """Blocks that touch nothing, or logits only, leave the model's forward as it is."""
    runner = llama.vllm_entrypoint.llm_engine.model_executor.driver_worker.worker.model_runner
    accompanied, with_blocks = [], runner._with_blocks
    runner._with_blocks = lambda forward: accompanied.append(1) or with_blocks(forward)
    try:
        with llama.trace(A, max_tokens=3, **GREEDY) as tracer:
            for step in tracer.iter[:3]:
                if wanted == "module" and step < 2:
                    llama.model.layers[0].output
                elif wanted == "logits":
                    llama.logits[:, 7] = 1e4
    finally:
        del runner._with_blocks
    assert len(accompanied) == (2 if wanted == "module" else 0)
    assert (tracer.result.outputs[0].token_ids == [7, 7, 7]) == (wanted == "logits")


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("step", [0, 2])
def test_stop_ends_the_request_there(llama: Any, hf: Oracle, step: int, sampled: bool) -> None:
    """`tracer.stop()` keeps the step's token only if the block had reached its samples.

    (O9, C68).
    """
    tokens = hf.generate(A, 8).tokens
    with llama.trace(A, max_tokens=8, min_tokens=8, **GREEDY) as tracer:
        kept = "before".save()
        for now in tracer.iter[:8]:
            if sampled:
                llama.samples
            if now == step:
                tracer.stop()
        kept = "after".save()
    completion = tracer.result.outputs[0]
    assert completion.token_ids == tokens[: step + sampled]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "tracer.stop")
    assert kept == "before"


def test_a_stop_that_the_block_catches_ends_the_request(llama: Any) -> None:
    """A bare `except` holds it up no further than to the next value that is asked for (O9)."""
    with llama.trace(A, max_tokens=5, **GREEDY) as tracer:
        after = [].save()
        hidden = llama.model.layers[0].output[0]
        try:
            tracer.stop()
        except BaseException:  # noqa: BLE001 - as users write it
            after.append("caught")
        later = llama.model.layers[1].output[0].save()
        after.append("read")
    assert after == ["caught"]
    assert tracer.result.outputs[0].stop_reason == "tracer.stop"
    assert tracer.result.outputs[0].token_ids == []


def test_stop_before_any_token_keeps_prompt_logprobs(llama: Any) -> None:
    """A request stopped in its first step ends with no token, and with its prompt's scores.

    (O9, C68, case 45).
    """
    with llama.trace(C, max_tokens=4, prompt_logprobs=1, **GREEDY) as tracer:
        stream = sum(llama.model.layers[1].output).save()
        tracer.stop()
    assert tracer.result.outputs[0].token_ids == []
    assert len(tracer.result.prompt_logprobs) == len(C)
    assert stream.shape == (len(C), 128)
    following = llama.generate([A, C, A], max_tokens=2, **GREEDY)
    assert [len(output.outputs[0].token_ids) for output in following] == [2, 2, 2]


def test_a_failed_block_ends_its_request(llama: Any) -> None:
    """A block that raises in step 1 ends the request there, with the finish reason "error".

    (C69).
    """
    tracer = llama.trace(A, max_tokens=8, **GREEDY)
    with pytest.raises(InterventionError, match="ZeroDivisionError"), tracer:
        for step in tracer.iter[:8]:
            llama.samples
            if step == 1:
                1 / 0
    assert tracer.result.outputs[0].finish_reason == "error"
    assert len(tracer.result.outputs[0].token_ids) == 2


def test_steps_exist_inside_a_block_only(llama: Any) -> None:
    """`tracer.iter`, `all` and `stop` outside a block say where they belong."""
    tracer = llama.trace(A, max_tokens=1)
    for use in (lambda: tracer.iter, tracer.all, tracer.stop):
        with pytest.raises(NotInTraceError, match="only inside the block"):
            use()
