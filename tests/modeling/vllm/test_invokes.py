"""Several requests in one trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from midstream.errors import InterventionError, PromptError, UnsupportedError
from midstream.modeling.merging import merge
from tests.conftest import TINY
from tests.soak.engines import Counts
from tests.support.checkpoints import LONG, A, B, C
from tests.support.oracle import Oracle, assert_close, zero_mlp

GREEDY = {"temperature": 0.0, "ignore_eos": True}
PROMPTS = [A, B, C]


pytestmark = pytest.mark.usefixtures("nothing_left")


def test_each_invoke_sees_its_own_rows(llama: Any, hf: Oracle) -> None:
    """A name saved in several invokes comes back as a list in the order of submission.

    (O16, B10, C40, C41, C44).
    """
    with llama.trace(max_tokens=1, **GREEDY) as tracer:
        for prompt in PROMPTS:
            with tracer.invoke(prompt):
                stream = sum(llama.model.layers[2].output).save()
    assert [len(rows) for rows in stream] == [len(prompt) for prompt in PROMPTS]
    for rows, prompt in zip(stream, PROMPTS, strict=True):
        reads = hf.reads(prompt)
        assert_close(rows, reads["residual.2"], reads["residual.1"])
    assert [out.prompt_token_ids for out in tracer.result] == PROMPTS


@pytest.mark.parametrize("edited", [0, 1, 2])
def test_an_edit_in_one_invoke_leaves_the_others_alone(llama: Any, hf: Oracle, edited: int) -> None:
    """Each request continues as it would alone, one edited and one replaced, the last one plain.

    Whichever it is: their rows stand in the batch by their length, not by their order here.

    (C41).
    """
    right = [hf.generate(prompt, 4).tokens for prompt in PROMPTS]
    clean, changes = right[edited], [zero_mlp(0)]
    right[edited] = hf.generate(PROMPTS[edited], 4, changes=changes, when="prefill").tokens
    assert right[edited] != clean
    with llama.trace(max_tokens=4, **GREEDY) as tracer:
        for index, prompt in enumerate(PROMPTS):
            with tracer.invoke(prompt):
                if index == edited:
                    llama.model.layers[0].mlp.output[:] = 0
                elif index == (edited + 1) % 3:
                    hidden, residual = llama.model.layers[1].output
                    llama.model.layers[1].output = (hidden.clone(), residual)
    assert [out.outputs[0].token_ids for out in tracer.result] == right


def test_settings_of_an_invoke_win_over_the_traces(llama: Any) -> None:
    """An invoke's own settings count, also where they equal vLLM's default or use the alias.

    (C31, C32, C34, case 26).
    """
    with llama.trace(max_tokens=5, **GREEDY) as tracer:
        with tracer.invoke(A):
            pass
        with tracer.invoke(A, max_new_tokens=2):
            pass
        with tracer.invoke(A, temperature=1.0, seed=7, max_tokens=3):
            pass
    lengths = [len(out.outputs[0].token_ids) for out in tracer.result]
    assert lengths == [5, 2, 3]
    with llama.trace(A, max_tokens=3, temperature=1.0, seed=7, ignore_eos=True) as sampled:
        pass
    greedy, _, drawn = (out.outputs[0].token_ids for out in tracer.result)
    assert drawn == sampled.result.outputs[0].token_ids != greedy[:3]


def test_a_name_saved_once_stays_a_plain_value(llama: Any) -> None:
    """A value that one invoke alone saves is that value (C44)."""
    with llama.trace(max_tokens=1, **GREEDY) as tracer:
        with tracer.invoke(A):
            first = llama.logits.save()
        with tracer.invoke(B):
            second = llama.logits.save()
    assert first.shape == second.shape == (1, 128)


def test_containers_saved_above_the_invokes_are_filled_by_all(llama: Any) -> None:
    """Lists are filled slot by slot, appends come in order, dictionaries by key (O16, C45)."""
    with llama.trace(max_tokens=1, **GREEDY) as tracer:
        slots = [None, None, [0, None]].save()
        rows = [].save()
        table = {"kept": 1, "first": 0}.save()
        with tracer.invoke(A):
            slots[0] = "a"
            slots[2][0] = 5
            rows.append(len(llama.model.layers[0].output[0]))
            table["a"] = int(llama.samples)
            table["first"] = 2
        with tracer.invoke(B):
            slots[1] = "b"
            slots[2][1] = 6
            rows.append(len(llama.model.layers[0].output[0]))
            table["b"] = int(llama.samples)
    tokens = [out.outputs[0].token_ids[0] for out in tracer.result]
    assert slots == ["a", "b", [5, 6]]
    assert rows == [len(A), len(B)]
    assert table == {"kept": 1, "first": 2, "a": tokens[0], "b": tokens[1]}


def test_loop_variables_have_the_value_of_their_pass(llama: Any) -> None:
    """A name of the trace's body has in an invoke the value it had when the invoke was opened.

    (C10).
    """
    with llama.trace(max_tokens=1, **GREEDY) as tracer:
        for layer in range(3):
            scale = layer * 10
            with tracer.invoke(A):
                seen = (layer, scale, llama.model.layers[layer].output[1]).save()
    assert [s[:2] for s in seen] == [(0, 0), (1, 10), (2, 20)]
    assert not torch.equal(seen[0][2], seen[1][2])


def test_loops_of_different_lengths_run_side_by_side(llama: Any, hf: Oracle) -> None:
    """Requests with loops of their own finish out of order, each as alone (C48)."""
    lengths = [6, 2, 4]
    with llama.trace(**GREEDY) as tracer:
        for prompt, length in zip(PROMPTS, lengths, strict=True):
            with tracer.invoke(prompt, max_tokens=length):
                ids = []
                for _ in tracer.all():
                    ids.append(int(llama.samples))
                ids.save()
    for prompt, length, got in zip(PROMPTS, lengths, ids, strict=True):
        assert got == hf.generate(prompt, length).tokens


def test_every_failure_is_listed_and_the_others_are_bound(llama: Any) -> None:
    """Failed invokes are all in the error, and the values of those that finished come back.

    (O10, C47, C96).
    """
    tracer = llama.trace(max_tokens=2, **GREEDY)
    with pytest.raises(InterventionError) as raised, tracer:
        for index, prompt in enumerate(PROMPTS):
            with tracer.invoke(prompt):
                logits = llama.logits
                if index == 0:
                    raise KeyError("zero")
                if index == 2:
                    model = 1 / 0
                logits.save()
    text = str(raised.value)
    assert text.startswith("KeyError: 'zero'")
    assert "2 blocks of this trace failed" in text
    assert "ZeroDivisionError: division by zero" in text
    assert isinstance(raised.value.__cause__, KeyError)
    assert logits.shape == (1, 128)


def test_a_siblings_name_is_not_visible(llama: Any) -> None:
    """A name that one invoke binds is a NameError in another, of that request (C46, G43)."""
    with (
        pytest.raises(InterventionError, match="NameError: name 'only_here'"),
        llama.trace(max_tokens=1, **GREEDY) as tracer,
    ):
        with tracer.invoke(A):
            only_here = llama.logits
        with tracer.invoke(B):
            there = only_here.save()


@pytest.mark.parametrize("form", ["none", "idle", "working"])
def test_an_invoke_needs_a_prompt(llama: Any, form: str) -> None:
    """A trace without any request is refused, and so is an invoke whose work would vanish.

    (C42, C43, G25, G26).
    """
    match = "would vanish" if form == "working" else "nothing to run"
    with pytest.raises(PromptError, match=match), llama.trace() as tracer:
        if form == "idle":
            with tracer.invoke():
                """Nothing."""
        elif form == "working":
            with tracer.invoke():
                logits = llama.logits.save()


def test_an_idle_invoke_without_a_prompt_is_dropped(llama: Any) -> None:
    """Beside other invokes it is no request (C43)."""
    with llama.trace(max_tokens=1, **GREEDY) as tracer:
        with tracer.invoke():
            pass
        with tracer.invoke(B):
            rows = len(llama.model.layers[0].output[0]).save()
    assert rows == len(B)
    assert tracer.result.prompt_token_ids == B


def test_wrong_invokes_are_refused(llama: Any) -> None:
    """Two prompts, an unknown setting, and an invoke in a trace with a prompt say what to write.

    (C33, C42, G22, G27, G28).
    """
    with pytest.raises(PromptError, match="loop"), llama.trace() as tracer:
        with tracer.invoke([A, B]):
            logits = llama.logits.save()
    with pytest.raises(TypeError, match="temperature"), llama.trace() as tracer:
        with tracer.invoke(A, temperatur=0.0):
            logits = llama.logits.save()
    with pytest.raises(InterventionError, match="UnsupportedError: `tracer.invoke"):
        with llama.trace(A, max_tokens=1) as tracer:
            with tracer.invoke(B):
                logits = llama.logits.save()
    with pytest.raises(UnsupportedError, match="without a prompt"):
        llama.trace(A).invoke(B)


def test_an_error_in_the_body_submits_nothing(llama: Any) -> None:
    """An exception between the invokes is raised as it is, and no request runs."""
    tracer = llama.trace(max_tokens=1)
    with pytest.raises(ZeroDivisionError), tracer:
        with tracer.invoke(A):
            logits = llama.logits.save()
        1 / 0
    assert tracer.result is None


def test_several_sequences_each_have_a_block(llama: Any) -> None:
    """With n=2 the block runs for each sequence, and saved names come back as lists.

    (C50, case 26).
    """
    with llama.trace(C, n=2, seed=5, temperature=1.0, max_tokens=4, ignore_eos=True) as tracer:
        ids, rows = [], len(llama.model.layers[1].output[0])
        for _ in tracer.all():
            ids.append(int(llama.samples))
        ids.save()
        rows.save()
    completions = sorted(tracer.result.outputs, key=lambda one: one.index)
    assert ids == [one.token_ids for one in completions]
    assert ids[0] != ids[1]
    assert rows == [len(C), len(C)]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_prompts_that_do_not_fit_one_step_wait_whole(engine: Any, policy: str) -> None:
    """Traced prompts beyond a step's budget are run in later steps, never split; plain ones are.

    (O4, A25, C99, case 17).
    """
    from vllm import SamplingParams

    small = type(engine("T-LLAMA"))(
        engine("T-LLAMA").repo,
        dispatch=True,
        scheduling_policy=policy,
        **{**TINY, "max_num_batched_tokens": 64},
    )
    try:
        core = small.vllm_entrypoint.llm_engine
        settings = SamplingParams(temperature=0.0, max_tokens=2)
        for name, length in (("plain", 200), ("short", 48)):
            prompt = {"prompt_token_ids": LONG[:length]}
            core.add_request(name, prompt, settings, priority=-1 if policy == "priority" else 0)
        prompts, counts = [LONG[i : i + 40] for i in range(6)], Counts(small)
        with small.trace(max_tokens=2, **GREEDY) as tracer:
            for prompt in prompts:
                with tracer.invoke(prompt):
                    stream = sum(small.model.layers[1].output).save()
        while core.has_unfinished_requests():
            core.step()
        assert counts.pieces == 1  # the plain prompt was begun in a part of it
        assert [len(rows) for rows in stream] == [40] * 6
        with small.trace(prompts[3], max_tokens=1, **GREEDY):
            alone = sum(small.model.layers[1].output).save()
        assert_close(stream[3], alone, stream[2])
    finally:
        small.close()


def test_a_trace_of_several_requests_travels(llama: Any, hf: Oracle) -> None:
    """`to_bytes` and `run` carry all requests of a trace (O23)."""
    with llama.trace(max_tokens=1, run=False, **GREEDY) as tracer:
        for prompt in PROMPTS:
            with tracer.invoke(prompt):
                ids = int(llama.samples).save()
    again = llama.run(tracer.to_bytes())
    assert again.saves["ids"] == [hf.generate(prompt, 1).tokens[0] for prompt in PROMPTS]


@pytest.mark.parametrize("value", [5, "text", {"a": 1}])
def test_a_shared_name_that_a_block_binds_anew_has_the_new_value(value: Any) -> None:
    """A container of the trace is filled; what a block puts in its place replaces it."""
    assert merge([{"found": [1]}, {"found": value}], {"found": []}) == {"found": value}


def test_a_prompt_beyond_what_a_step_schedules_is_refused(engine: Any) -> None:
    """The budget of a step is what the scheduler gives it, where that is less than fits a batch.

    (O4, G50).
    """
    llama = engine("T-LLAMA")
    with type(llama)(llama.repo, **TINY, max_num_scheduled_tokens=32) as small:
        with pytest.raises(PromptError, match="40 tokens.*at most 32"):
            small.trace(LONG[:40], block=lambda model, tracer: None, **GREEDY)
        got = small.trace(LONG[:32], block=lambda model, tracer: model.logits, **GREEDY)
    assert got.saves["return"].shape[0] == 1
