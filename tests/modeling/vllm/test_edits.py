"""Edits of the engine: what they do, who runs them, and what they leave on outputs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from midstream import VLLM, save
from midstream.errors import (
    InterventionError,
    MidstreamWarning,
    TransportError,
    UnsupportedError,
)
from tests.conftest import TINY
from tests.modeling.vllm.conftest import Neighbour, live, model_of, place, runner_of
from tests.support.changes import add_vector, scale_layer, zero_mlp
from tests.support.checkpoints import LONG, A, B, C
from tests.support.device import DEVICE
from tests.support.oracle import Oracle, assert_close

GREEDY = {"temperature": 0.0, "ignore_eos": True}


@pytest.fixture
def model(serving: Any) -> Iterator[Any]:
    """The engine on T-LLAMA, without an edit before and after."""
    assert serving.edits == ()
    yield serving
    serving.clear_edits()
    assert serving.vllm_entrypoint.collective_rpc("midstream_edits") == [0]


def tokens(output: Any) -> list[int]:
    """The generated ids of an output."""
    return list(output.outputs[0].token_ids)


def generated(model: Any, ids: Any, count: int, **settings: Any) -> list[int]:
    """Tokens of a plain request."""
    (output,) = model.generate(ids, max_tokens=count, **GREEDY, **settings)
    return tokens(output)


def halve(model: Any, **given: Any) -> Any:
    """Install an edit that halves the stream after layer 1 in every step."""
    with model.edit(**given) as (tracer, edit):
        for _ in tracer.all():
            hidden, residual = model.model.layers[1].output
            hidden *= 0.5
            residual *= 0.5
    return edit


HALVED = [scale_layer(1, 0.5)]


def test_edit_runs_for_plain_requests(model: Any, hf: Oracle) -> None:
    """An installed block runs beside every later request, until it is cleared.

    (C75, C78, case 53).
    """
    clean, edited = (hf.generate(A, 6, changes=change).tokens for change in ((), HALVED))
    assert clean != edited
    assert generated(model, A, 6) == clean
    edit = halve(model)
    assert model.edits == (edit,)
    assert generated(model, A, 6) == edited
    edit.clear()
    assert model.edits == ()
    assert generated(model, A, 6) == clean


def test_the_same_edit_twice_acts_twice_until_it_is_cleared(model: Any, hf: Oracle) -> None:
    """Installed twice it acts twice, with one cleared once, and then not at all (C85, case 53)."""
    right = [hf.run(A, [scale_layer(1, factor)]).logits for factor in (0.25, 0.5, 1.0)]
    edits = [halve(model), halve(model)]
    found = []
    for edit in (*edits, None):
        with model.trace(A, max_tokens=1, **GREEDY):
            logits = model.logits.save()
        found.append(logits)
        if edit is not None:
            edit.clear()
    for got, own, other in zip(found, right, [*right[1:], right[0]], strict=True):
        assert_close(got, own, other)


def test_edit_without_a_loop_sees_the_prompt_only(model: Any, hf: Oracle) -> None:
    """As in a trace, what is outside a loop over steps acts in the first one (C80)."""
    once = hf.generate(A, 6, changes=[zero_mlp(0)], when="prefill").tokens
    assert once not in (hf.generate(A, 6).tokens, hf.generate(A, 6, changes=[zero_mlp(0)]).tokens)
    with model.edit():
        model.model.layers[0].mlp.output[:] = 0
    assert generated(model, A, 6) == once


def test_a_trace_reads_what_an_edit_wrote(model: Any, hf: Oracle) -> None:
    """An edit runs before the request's own block at each location (C82)."""
    halve(model)
    with model.trace(A, max_tokens=1, **GREEDY):
        stream = sum(model.model.layers[1].output).save()
        logits = model.logits.save()
    right = hf.reads(A)["residual.1"]
    assert_close(stream, right * 0.5, right)
    assert_close(logits, hf.run(A, HALVED).logits, hf.run(A).logits)


def test_edits_take_turns_in_the_order_of_installation(model: Any, hf: Oracle) -> None:
    """At one location each edit sees what the one before wrote, and the block sees all.

    Also where an earlier one is late to ask, and where it keeps what it saw.

    (C82).
    """
    with model.edit():
        model.model.layers[0].mlp.output
        first = model.model.layers[1].mlp.output
        first[:] = 2.0
        first.save()
    with model.edit():
        second = model.model.layers[1].mlp.output.save()
        kept = second.clone().save()
        second *= 3
    with model.trace(A, max_tokens=1, **GREEDY) as tracer:
        seen = model.model.layers[1].mlp.output.save()
        before = seen.clone().save()
        model.model.layers[1].mlp.output = seen + 1
        after = model.model.layers[1].output[0].save()
    saves = tracer.result.saves
    assert saves["first"].unique().tolist() == [2.0]
    assert saves["kept"].unique().tolist() == [2.0]
    assert saves["second"].unique().tolist() == [6.0]
    assert before.unique().tolist() == [6.0]
    assert after.unique().tolist() == [7.0]
    assert seen.data_ptr() != saves["second"].data_ptr()


def test_turns_hold_for_logits_and_samples(model: Any) -> None:
    """The engine's own hand-overs are taken in turns too."""
    with model.edit():
        model.logits[:] = 0
        model.logits[:, 7] = 9
        model.samples
    with model.trace(A, max_tokens=2, **GREEDY) as tracer:
        model.logits[:, 8] = 10
        token = int(model.samples)
        model.samples = torch.tensor([[5]])
        save(token)
    assert token == 8
    assert tokens(tracer.result)[0] == 5


def test_neighbours_of_an_edited_request_share_no_rows(model: Any, hf: Oracle) -> None:
    """Requests with and without edits run in one step, each with its own result (case 13)."""
    vector = torch.linspace(-3, 3, 128)
    with model.edit(name="steer") as (tracer, _):
        for _ in tracer.all():
            model.model.layers[1].output[0][:] += vector.to(DEVICE)
    halve(model, name="halve")
    steered = [add_vector(1, vector)]
    wanted = [
        (A, [], ()),
        (B, ["steer"], steered),
        (C, ["halve"], HALVED),
        (A, ["steer", "halve"], [*steered, *HALVED]),
        (C, None, [*steered, *HALVED]),
    ]
    with model.trace(max_tokens=5, **GREEDY) as tracer:
        shapes = [].save()
        for prompt, names, _ in wanted:
            with tracer.invoke(prompt, edits=names):
                rows = model.model.layers[2].output[0]
                shapes.append(len(rows))
    right = [hf.generate(prompt, 5, changes=change).tokens for prompt, _, change in wanted]
    assert len({tuple(each) for each in right}) == 5
    assert [tokens(output) for output in tracer.result] == right
    assert shapes == [5, 3, 9, 5, 9]
    saves = [hasattr(output, "saves") for output in tracer.result]
    assert saves == [False, True, True, True, True]


def test_edit_changes_nothing_for_requests_of_others(model: Any, hf: Oracle) -> None:
    """A request that another part of the program gives vLLM itself is left alone."""
    halve(model)
    neighbour = Neighbour(model, B, max_tokens=8, ignore_eos=True)
    assert generated(model, A, 4) == hf.generate(A, 4, changes=HALVED).tokens
    assert max(neighbour.widths) == len(A) + len(B)
    assert neighbour.tokens() == hf.generate(B, 8).tokens


# Values and errors.


def test_values_of_edits_are_on_outputs(model: Any, hf: Oracle) -> None:
    """What an edit saves arrives on the output of each request (C83, C84, C90)."""
    with model.edit():
        last = sum(model.model.layers[2].output)[-1].save()
        note = "seen".save()
    outputs = model.generate([A, B], max_tokens=2, **GREEDY)
    for output, prompt in zip(outputs, (A, B), strict=True):
        assert set(output.saves) == set(output.outputs[0].saves) == {"last", "note"}
        reads = hf.reads(prompt)
        assert_close(output.saves["last"], reads["residual.2"][-1], reads["residual.1"][-1])
        assert output.saves["note"] == "seen"
        assert output.edit_error is None
    model.clear_edits()
    (output,) = model.generate(A, max_tokens=1)
    assert not hasattr(output, "saves")


def test_values_of_edits_and_of_the_trace_stay_apart(model: Any) -> None:
    """A trace's result has the edits' values only; of one name the later edit's wins (C59, C83)."""
    last = "untouched"
    for value in (1, 2):
        with model.edit():
            last = save(value)
            mine = save(value)
    with model.trace(A, max_tokens=1, **GREEDY) as tracer:
        mine = save("trace")
    assert tracer.result.saves == {"last": 2, "mine": 2}
    assert (last, mine, tracer.saves) == ("untouched", "trace", {"mine": "trace"})


def test_the_later_edit_wins_though_it_is_done_first(model: Any) -> None:
    """An edit that is done sends its values while its request goes on; their order stays (C83)."""
    with model.edit() as (tracer, _):
        looped = -1
        for _ in tracer.all():
            model.logits
            looped += 1
        value = save(f"looped to {looped}")
        looped.save()
    with model.edit():
        value = save("once")
    with model.trace(A, max_tokens=4, **GREEDY) as tracer:
        mine = [].save()
        for step in tracer.iter[:2]:
            model.logits
            mine.append(step)
    assert tracer.result.saves == {"value": "once", "looped": 3}
    assert mine == [0, 1]


def test_values_of_each_sequence(model: Any) -> None:
    """With `n` above 1 each completion has its own values, and the output lists them (C51)."""
    with model.edit():
        token = int(model.samples)
        token.save()
    (output,) = model.generate(A, n=3, temperature=1.0, seed=3, max_tokens=2, ignore_eos=True)
    drawn = [each.token_ids[0] for each in output.outputs]
    assert len(set(drawn)) > 1
    assert [each.saves["token"] for each in output.outputs] == drawn
    assert output.saves["token"] == drawn


def test_values_saved_in_every_step(model: Any) -> None:
    """An open loop of an edit ends with the request, and what it collected comes back (C80)."""
    with model.edit() as (tracer, _):
        steps = save([])
        for step in tracer.all():
            steps.append((step, len(model.model.layers[0].output[0])))
        rest = "ran".save()
    lengths = [len(B), 1, 1]
    (output,) = model.generate(B, max_tokens=3, **GREEDY)
    assert output.saves == {"steps": list(enumerate(lengths)), "rest": "ran"}


def test_error_of_an_edit_is_on_the_output(model: Any, hf: Oracle) -> None:
    """Beside a plain request a failed edit warns and is on the output; the request goes on.

    What it had written before stays written.

    (C69, C87).
    """
    with model.edit(name="bad"):
        model.model.layers[0].mlp.output[:] = 0
        seen = model.model.layers[1].output[0].shape[0]
        seen.save()
        raise LookupError("mine")  # ERROR
    with pytest.warns(MidstreamWarning, match="failed in 2 of 2 requests.*LookupError: mine"):
        outputs = model.generate([A, B], max_tokens=4, **GREEDY)
    for output, prompt in zip(outputs, (A, B), strict=True):
        right = hf.generate(prompt, 4, changes=[zero_mlp(0)], when="prefill").tokens
        assert tokens(output) == right
        assert output.outputs[0].finish_reason == "length"
        assert output.saves == {"seen": len(prompt)}
        assert isinstance(output.edit_error, InterventionError)
        assert isinstance(output.edit_error.__cause__, LookupError)
        assert str(output.edit_error).startswith("LookupError: mine")
        assert place(__file__, "ERROR") in str(output.edit_error)
        assert "in the installed edit 'bad'" in str(output.edit_error)


def test_error_of_an_edit_is_raised_by_a_trace(model: Any) -> None:
    """A trace raises it, after its own values are bound (C87)."""
    with model.edit():
        raise LookupError("mine")
    with pytest.raises(InterventionError, match=r"^LookupError: mine") as caught:
        with model.trace(A, max_tokens=3, **GREEDY) as tracer:
            rows = len(model.model.layers[2].output[0])
            rows.save()
    assert isinstance(caught.value.__cause__, LookupError)
    assert rows == len(A)
    assert len(tokens(tracer.result)) == 3


def test_wrong_shape_in_an_edit_names_its_line(model: Any) -> None:
    """What a trace checks is checked in an edit, and the engine goes on."""
    with model.edit():
        model.model.layers[1].mlp.output = torch.zeros(2, 2)  # SHAPE
    with pytest.warns(MidstreamWarning, match="ValueError"):
        (output,) = model.generate(A, max_tokens=2, **GREEDY)
    assert place(__file__, "SHAPE") in str(output.edit_error)
    assert len(tokens(output)) == 2


def test_a_later_edit_runs_though_an_earlier_failed(model: Any) -> None:
    """A failed edit takes nothing else along."""
    with model.edit():
        raise ValueError("first")
    with model.edit():
        rows = len(model.model.layers[0].output[0])
        rows.save()
    with pytest.warns(MidstreamWarning, match="first"):
        (output,) = model.generate(A, max_tokens=1)
    assert output.saves == {"rows": len(A)}


def test_edit_may_stop_its_request(model: Any) -> None:
    """`tracer.stop()` in an edit ends the request, as in a trace (C68)."""
    with model.edit() as (tracer, _):
        for step in tracer.all():
            model.samples
            if step == 2:
                tracer.stop()
    (output,) = model.generate(A, max_tokens=9, **GREEDY)
    assert len(tokens(output)) == 3
    assert output.outputs[0].stop_reason == "tracer.stop"


def test_warning_of_an_edit_arrives(model: Any) -> None:
    """A loop cut short warns in the caller's process, with the edit's line."""
    with model.edit() as (tracer, _):
        for _ in tracer.iter[:9]:
            model.logits
    with pytest.warns(MidstreamWarning, match="asked for 9 steps and the request ran 2"):
        model.generate(A, max_tokens=2, **GREEDY)


# Choosing and clearing.


def test_requests_choose_edits_by_name(model: Any, hf: Oracle) -> None:
    """Without `edits=` all run; with it those names and every unnamed one (C36, C92)."""
    names = ["a", "b", "a", None]
    edits = []
    for value, name in enumerate(names):
        with model.edit(name=name) as (_, edit):
            model.logits[:, 100 + value] += 1000.0 + value
        edits.append(edit)
    assert [edit.name for edit in edits] == names

    def ran(**settings: Any) -> set[int]:
        with model.trace(A, max_tokens=1, **GREEDY, **settings):
            logits = model.logits.save()
        return {int(i) - 100 for i in (logits[0] > 500).nonzero()}

    assert ran() == ran(edits=None) == {0, 1, 2, 3}
    assert ran(edits=["a"]) == {0, 2, 3}
    assert ran(edits=("b",)) == {1, 3}
    assert ran(edits=["a", "b"]) == {0, 1, 2, 3}
    assert ran(edits=[]) == {3}
    (output,) = model.generate(A, max_tokens=1, edits=[], **GREEDY)
    assert tokens(output) == [103]
    edits[2].clear()
    assert ran(edits=["a"]) == {0, 3}


def test_choice_of_an_invoke_wins(model: Any) -> None:
    """An invoke's own choice beats the trace's (C92)."""
    for value, name in enumerate(["a", "b"]):
        with model.edit(name=name):
            model.logits[:, 100 + value] += 1000.0
    with model.trace(max_tokens=1, edits=["a"], **GREEDY) as tracer:
        with tracer.invoke(A):
            pass
        with tracer.invoke(A, edits=["b"]):
            pass
        with tracer.invoke(A, edits=[]):
            pass
    assert [tokens(output)[0] for output in tracer.result][:2] == [100, 101]
    assert not hasattr(tracer.result[2], "saves")


def test_wrong_choices_are_refused_at_the_call(model: Any) -> None:
    """A text, entries that are none, and names nobody installed (G31, G32)."""
    with model.edit(name="calm"):
        pass
    for call in (model.trace, model.generate):
        with pytest.raises(TypeError, match="edits='calm': expected a list"):
            call(A, edits="calm")
        with pytest.raises(TypeError, match="expected a list"):
            call(A, edits=[1])
        with pytest.raises(ValueError, match="no edit is called 'clam'.*by name: 'calm'"):
            call(A, edits=["calm", "clam"])
    with pytest.raises(ValueError, match="no edit is called 'clam'"):
        with model.trace(max_tokens=1) as tracer:
            with tracer.invoke(A, edits=["clam"]):
                pass


def test_names_are_checked_where_the_trace_runs(model: Any) -> None:
    """A trace that is only captured needs no edit of that name until it runs."""
    with model.trace(A, max_tokens=1, edits=["later"], run=False, **GREEDY) as tracer:
        pass
    data = tracer.to_bytes()
    with pytest.raises(ValueError, match="no edit is called 'later'"):
        model.run(data)
    with model.edit(name="later"):
        model.logits[:, 100] += 1000
    assert tokens(model.run(data).result) == [100]


def test_handle_says_what_it_is(model: Any) -> None:
    """An edit has a number, a name and a state; clearing it twice is no error (C85)."""
    with model.edit(name="calm") as (_, edit):
        pass
    assert (edit.name, edit.cleared) == ("calm", False)
    assert repr(edit) == f"Edit(id={edit.id}, name='calm', installed)"
    with model.edit() as (_, other):
        pass
    assert other.id > edit.id
    edit.clear()
    edit.clear()
    assert edit.cleared
    assert "cleared" in repr(edit)
    assert model.edits == (other,)
    model.clear_edits()
    assert other.cleared
    assert not model.edit().cleared


def test_function_form(model: Any, hf: Oracle) -> None:
    """`block=` installs a function."""

    def zero(model: Any, tracer: Any) -> None:
        for _ in tracer.all():
            model.model.layers[0].mlp.output[:] = 0

    edit = model.edit(name="zero", block=zero)
    assert model.edits == (edit,)
    assert generated(model, A, 4) == hf.generate(A, 4, changes=[zero_mlp(0)]).tokens


def test_captured_values_are_fresh_for_each_request(model: Any) -> None:
    """A list that the block captured and fills starts anew with each request (C81)."""
    found: list[int] = []
    offset = torch.zeros(1)
    with model.edit():
        offset += 1
        found.append(int(offset))
        mine = found.save()
    outputs = [*model.generate([A, B], max_tokens=1), *model.generate(A, max_tokens=1)]
    assert [output.saves["mine"] for output in outputs] == [[1], [1], [1]]
    assert found == []


def test_random_numbers_of_a_block_do_not_depend_on_edits(model: Any) -> None:
    """An installed edit leaves a block's random numbers what they are without it."""

    def drawn() -> float:
        with model.trace(A, max_tokens=1, **GREEDY):
            number = torch.rand(1).item()
            number.save()
        return number

    alone = drawn()
    with model.edit():
        other = torch.rand(1).item()
        other.save()
    (output,) = model.generate(A, max_tokens=1)
    assert drawn() == alone != output.saves["other"]


# What an edit may not do to others.


def test_edited_requests_stay_out_of_the_prefix_cache(model: Any, hf: Oracle) -> None:
    """No request reads KV that an edit wrote, nor an edited one a plain one's.

    In either order, with the edit installed, left out and cleared in between.

    (C88, G57, case 16, case 53).
    """
    prompt = [9, *LONG[:64], 3]
    clean, edited = (hf.generate(prompt, 5, changes=change).tokens for change in ((), HALVED))
    assert clean != edited

    def ran(**settings: Any) -> tuple[list[int], int]:
        (output,) = model.generate(prompt, max_tokens=5, **GREEDY, **settings)
        return tokens(output), output.num_cached_tokens

    edit = halve(model, name="halve")
    assert ran() == (edited, 0)
    assert ran() == (edited, 0)
    assert ran(edits=[]) == (clean, 0)  # the edited ones have left nothing
    assert ran(edits=[]) == (clean, 64)
    assert ran() == (edited, 0)
    edit.clear()
    assert ran() == (clean, 64)
    halve(model)
    assert ran() == (edited, 0)


def test_prompt_with_an_edit_is_whole(model: Any) -> None:
    """An edit sees all rows of a prompt while plain prompts wait; a longer one is refused.

    (O4, C88, G57).
    """
    with model.edit():
        rows = len(model.model.layers[1].output[0])
        rows.save()
    outputs = model.generate([LONG, A, LONG], max_tokens=1)
    assert [output.saves["rows"] for output in outputs] == [300, 5, 300]
    budget = model._engine.budget
    with pytest.raises(ValueError, match=f"at most {budget}"):
        model.generate([7] * (budget + 1), max_tokens=1)


def test_cleared_edit_stays_until_its_request_ends(model: Any, hf: Oracle) -> None:
    """A request runs the edits it was admitted with to its end, whatever is cleared meanwhile."""
    edit = halve(model)
    steps = 0

    def clear_in_the_middle(*_: Any) -> None:
        nonlocal steps
        steps += 1
        if steps == 3:
            edit.clear()
            assert model.edits == ()

    embedding = model_of(model).get_submodule("model.embed_tokens")
    hook = embedding.register_forward_pre_hook(clear_in_the_middle)
    try:
        found = generated(model, A, 8)
    finally:
        hook.remove()
    assert steps == 8
    assert found == hf.generate(A, 8, changes=HALVED).tokens
    assert model.vllm_entrypoint.collective_rpc("midstream_edits") == [0]
    assert generated(model, A, 8) == hf.generate(A, 8).tokens


def test_a_step_without_work_for_an_edit_is_plain(model: Any) -> None:
    """After its last access an edit's request runs as without one."""
    with model.edit():
        model.model.layers[0].output
    eager: list[bool] = []
    runner = runner_of(model)
    prepare = runner.prepare_inputs

    def noting(*args: Any, **kwargs: Any) -> Any:
        eager.append(runner._eager)
        return prepare(*args, **kwargs)

    runner.prepare_inputs = noting
    try:
        model.generate(A, max_tokens=4, **GREEDY)
    finally:
        del runner.prepare_inputs
    assert eager == [True, False, False, False]


# Installing.


def test_edit_that_cannot_be_installed_says_so(model: Any) -> None:
    """A value that cannot travel, or not be rebuilt in the engine, fails where it is installed."""
    lock = threading.Lock()
    with pytest.raises(TransportError, match=r"the variable `lock` \(a _thread.lock\) cannot"):
        with model.edit():
            lock.locked()

    class Breaks:
        def __reduce__(self) -> Any:
            return int, ("no number",)

    value = Breaks()
    with pytest.raises(TransportError, match="the variable `value` cannot be rebuilt"):
        with model.edit():
            value
    assert model.edits == ()
    assert live(model) == [0]


def test_refused_forms(model: Any) -> None:
    """`inplace=False`, a name that is no text, and edits in a block (C79, C80, G54, G55)."""
    with pytest.raises(ValueError, match="no copy"):
        model.edit(inplace=False)
    with pytest.raises(TypeError, match="name is text; got int"):
        model.edit(name=3)
    with pytest.raises(InterventionError) as caught:
        with model.trace(A, max_tokens=1):
            with model.edit():
                pass
    assert isinstance(caught.value.__cause__, UnsupportedError)
    with model.edit() as (tracer, edit):
        pass
    with pytest.raises(TransportError, match="cannot be used inside a block"):
        with model.trace(A, max_tokens=1):
            edit.clear()
    with pytest.raises(UnsupportedError, match="belongs into the body of a trace"):
        tracer.invoke(A)


def test_an_edit_is_installed_once(model: Any) -> None:
    """A second body for the same edit is refused, and the first stays as it is."""
    chosen = model.edit(name="once")
    with chosen:
        model.logits[:, 5] = 1e4
    with pytest.raises(UnsupportedError, match=r"Call `model\.edit\(\.\.\.\)` again"):
        with chosen:
            model.logits[:, 6] = 1e4
    assert model.edits == (chosen,)
    assert generated(model, A, 1) == [5]
    chosen.clear()
    assert model.vllm_entrypoint.collective_rpc("midstream_edits") == [0]


def test_edit_of_another_model_is_refused(model: Any) -> None:
    """A block that uses another model's modules cannot be installed."""
    layer = VLLM(model.repo, dtype="float32").model.layers[0]
    with pytest.raises(TransportError, match="of another model"):
        with model.edit():
            layer.output


def test_edits_end_with_their_engine(model: Any, hf: Oracle) -> None:
    """The first edit builds the engine; `close()` clears all, and the next starts without (A10)."""
    halved, clean = (hf.generate(A, 4, changes=change).tokens for change in (HALVED, ()))
    with VLLM(model.repo, **TINY) as fresh:
        edit = halve(fresh, name="halve")
        assert fresh.dispatched
        assert generated(fresh, A, 4) == halved
        fresh.close()
        assert edit.cleared
        assert fresh.edits == ()
        edit.clear()
        with pytest.raises(ValueError, match="no edit is called 'halve'. Installed by name: none"):
            fresh.generate(A, edits=["halve"])
        assert not fresh.dispatched
        assert generated(fresh, A, 4) == clean
        halve(fresh)
        assert generated(fresh, A, 4) == halved
    assert generated(model, A, 4) == clean


def test_preempted_requests_keep_their_edits(model: Any) -> None:
    """A request that loses its place for lack of memory returns to its edits, each step once.

    (O4, C60).
    """
    prompts = [[10 + i] * (20 + i) for i in range(6)]
    few = {**TINY, "max_model_len": 128, "num_gpu_blocks_override": 11}
    with VLLM(model.repo, **few) as crowded:
        with crowded.edit() as (tracer, _):
            rows = [].save()
            for _ in tracer.all():
                rows.append(len(crowded.model.layers[2].output[0]))
                crowded.logits[:, 5] += 0.5
        scheduler = crowded.vllm_entrypoint.llm_engine.engine_core.engine_core.scheduler
        preempted, preempt = [], scheduler._preempt_request

        def noting(request: Any, *more: Any, **keywords: Any) -> Any:
            preempted.append(request.request_id)
            return preempt(request, *more, **keywords)

        scheduler._preempt_request = noting
        together = crowded.generate(prompts, max_tokens=50, **GREEDY)
        assert len(preempted) > 1
        count = len(preempted)
        for output, prompt in zip(together, prompts, strict=True):
            (alone,) = crowded.generate(prompt, max_tokens=50, **GREEDY)
            assert tokens(output) == tokens(alone)
            assert output.saves == alone.saves == {"rows": [len(prompt), *[1] * 49]}
        assert len(preempted) == count
