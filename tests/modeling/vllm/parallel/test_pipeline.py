"""A block on a pipeline of two stages does what it does on one."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from midstream.errors import InterventionError
from tests.modeling.vllm.parallel.blocks import carrying
from tests.modeling.vllm.test_reads import _assert_location, _keys, _reading
from tests.modeling.vllm.test_writes import EDITS, VECTOR
from tests.support.checkpoints import A, C
from tests.support.compare import assert_close
from tests.support.device import TOLERANCE
from tests.support.oracle import Oracle, add_vector, edit_layer, zero_mlp

pytest_plugins = ["tests.modeling.vllm.parallel.pipelines"]
pytestmark = pytest.mark.usefixtures("pipe_as_before")

ONE = {"temperature": 0.0, "max_tokens": 1}
MANY = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True}


def test_every_location_equals_huggingface(pipe: Any, hf: Oracle) -> None:
    """At layers of both stages and around them, inputs and outputs are as on HuggingFace."""
    keys = list(_keys(hf, all_layers=True))
    got = pipe.trace(C, block=_reading(keys), **ONE).saves
    right = hf.reads(C, layers=range(4))
    assert got.keys() == set(keys)
    for key in keys:
        _assert_location(got[key], right[key], key)


def test_residual_stream_logits_and_samples(pipe: Any, hf: Oracle) -> None:
    """The stream of every layer, logits and the drawn token come home from both stages."""
    with pipe.trace(C, **ONE) as tracer:
        pairs = [layer.output for layer in pipe.model.layers].save()
        logits, samples = pipe.logits.save(), pipe.samples.save()
    right = hf.reads(C, layers=range(4))
    for i, (hidden, residual) in enumerate(pairs):
        assert_close(hidden + residual, right[f"residual.{i}"], hidden, TOLERANCE)
    assert_close(logits, right["logits"], right["logits"].roll(1, -1))
    assert samples.tolist() == [tracer.result.outputs[0].token_ids] == [[int(logits.argmax())]]


@pytest.mark.parametrize("name", EDITS)
def test_edit_equals_huggingface(name: str, pipe: Any, hf: Oracle) -> None:
    """Every kind of write, on whichever stage, has HuggingFace's effect."""
    block, change = EDITS[name]

    def edited(model: Any, tracer: Any) -> dict[str, Any]:
        block(model, tracer)
        return {"logits": model.logits}

    trace = pipe.trace(A, block=edited, temperature=0.0, max_tokens=4)
    right = hf.generate(A, 4, changes=[change], when="prefill")
    assert_close(trace.saves["logits"], right.logits[:1], hf.run(A).logits)
    assert list(trace.result.outputs[0].token_ids) == right.tokens


def test_early_value_is_written_to_a_later_stage(pipe: Any, hf: Oracle) -> None:
    """What a block makes of layer 0, it may write to layer 3."""
    with pipe.trace(A, **ONE):
        early = sum(pipe.model.layers[0].output)
        pipe.model.layers[3].output[0][:] += 2 * early
        logits = pipe.logits.save()
    early = hf.reads(A)["residual.0"]
    right = hf.run(A, [edit_layer(3, lambda rows: rows + 2 * early)])
    assert_close(logits, right.logits, hf.run(A).logits)


def test_late_value_is_written_to_an_earlier_stage_a_step_later(pipe: Any, hf: Oracle) -> None:
    """A value of layer 3 may be written to layer 0 in the next step, with its effect."""
    trace = pipe.trace(A, block=carrying(3.0), temperature=0.0, max_tokens=2, ignore_eos=True)
    (added,) = trace.saves["added"]
    right = hf.generate(A, 2, changes=[add_vector(0, added[0])], when=[1])
    clean = hf.generate(A, 2)
    assert_close(trace.saves["logits"][1], right.logits[1:], clean.logits[1:])


def test_late_value_into_an_earlier_stage_is_refused(pipe: Any) -> None:
    """In the same step it is out of order, and refused at once, at the user's line."""
    began = time.monotonic()
    with pytest.raises(InterventionError, match="already ran past it") as caught:
        with pipe.trace(A, **MANY):
            late = pipe.model.layers[3].output[0]
            pipe.model.layers[0].output[0][:] = late
    assert "stage 0" in str(caught.value)
    assert time.monotonic() - began < 2.0


def test_an_edit_in_every_step(pipe: Any, hf: Oracle) -> None:
    """A loop over steps edits and reads on both stages in each of them."""
    with pipe.trace(A, **MANY) as tracer:
        streams = [].save()
        for _ in tracer.iter[:]:
            pipe.model.layers[1].output[0][:] += VECTOR
            streams.append(sum(pipe.model.layers[3].output))
    right = hf.generate(A, 6, changes=[add_vector(1, VECTOR)], when="all")
    assert list(tracer.result.outputs[0].token_ids) == right.tokens != hf.generate(A, 6).tokens
    assert [len(rows) for rows in streams] == [5, 1, 1, 1, 1, 1]


def test_skips(pipe: Any, hf: Oracle) -> None:
    """A module is skipped on either stage."""
    zeros = torch.zeros(5, 128)
    with pipe.trace(A, **ONE):
        pipe.model.layers[0].mlp.skip(zeros)
        pipe.model.layers[3].mlp.skip(zeros)
        logits = pipe.logits.save()
    right = hf.run(A, [zero_mlp(0), zero_mlp(3)])
    assert_close(logits, right.logits, hf.run(A, [zero_mlp(3)]).logits)


def test_operations_inside_forwards(pipe: Any, hf: Oracle) -> None:
    """Operations of a forward on either stage are read and written."""
    with pipe.trace(A, **ONE):
        early = pipe.model.layers[0].mlp.source.x_0.output
        gate_up = pipe.model.layers[3].mlp.source.self_gate_up_proj_0.output[0].save()
        kept = early.save()
        pipe.model.layers[3].mlp.source.self_down_proj_0.output[0][:] = 0
        logits = pipe.logits.save()
    reads = hf.reads(A)
    activated = [reads[f"model.layers.{i}.mlp.down_proj.input"] for i in (0, 3)]
    assert_close(kept, activated[0], activated[1])
    assert gate_up.shape == (5, 512)
    assert_close(logits, hf.run(A, [zero_mlp(3)]).logits, hf.run(A).logits)


def test_cache_of_all_modules(pipe: Any, hf: Oracle) -> None:
    """One cache has the modules of both stages, in the model's order, in all steps."""
    with pipe.trace(A, temperature=0.0, max_tokens=3, ignore_eos=True) as tracer:
        cache = tracer.cache()
    right = hf.reads(A, layers=range(4))
    paths = [path for path in cache if path.endswith("mlp")]
    assert paths == [f"model.layers.{i}.mlp" for i in range(4)]
    for path in paths:
        prefill, *decodes = cache[path].output
        wrong = right[f"model.layers.{(int(path[13]) + 1) % 4}.mlp.output"]
        assert_close(prefill, right[f"{path}.output"], wrong)
        assert [len(rows) for rows in decodes] == [1, 1]


def test_modules_of_the_last_stage_are_called(pipe: Any, hf: Oracle) -> None:
    """Norm and head are called on values of both stages, once all that is early has been read."""
    with pipe.trace(C, **ONE):
        streams = [sum(layer.output) for layer in pipe.model.layers]
        lens = [
            pipe.logits_processor(pipe.lm_head, pipe.model.norm(s)[-1:]) for s in streams
        ].save()
        logits = pipe.logits.save()
    assert_close(lens[-1], logits, lens[0])
    right = hf.model.lm_head(hf.model.model.norm(hf.reads(C)["residual.0"][-1:])).detach()
    assert_close(lens[0], right, lens[1])


def test_call_that_leads_past_a_layer(pipe: Any) -> None:
    """A call of a later stage's module between two reads of an early one is refused, and told."""
    with pytest.raises(InterventionError, match=r"Calling 'model\.norm'"):
        with pipe.trace(C, **ONE):
            for layer in pipe.model.layers:
                lens = pipe.model.norm(sum(layer.output)).save()
    del lens


def test_weights(pipe: Any, hf: Oracle) -> None:
    """Parameters of both stages are read."""
    with pipe.trace(C, **ONE):
        early = pipe.model.layers[0].input_layernorm.weight.save()
        late = pipe.model.layers[3].input_layernorm.weight.save()
        listed = [name for name, _ in pipe.model.layers[3].named_parameters()].save()
    layers = hf.model.model.layers
    assert torch.equal(early, layers[0].input_layernorm.weight)
    assert torch.equal(late, layers[3].input_layernorm.weight)
    assert "mlp.down_proj.weight" in listed


@pytest.mark.parametrize("what", ["source", "skip", "call"])
def test_module_on_both_stages(pipe: Any, what: str) -> None:
    """What is no single place of a module on both stages is refused; its values are whole."""
    with pytest.raises(InterventionError, match=r"several (pipeline )?stages"):
        with pipe.trace(A, **ONE):
            if what == "source":
                pipe.model.source.layer_0.output
            elif what == "skip":
                pipe.model.skip(torch.zeros(5, 128))
            else:
                pipe.compute_logits(torch.zeros(1, 128))


def test_several_sequences(pipe: Any) -> None:
    """Each sequence of n has its own block."""
    with pipe.trace(A, n=3, seed=3, temperature=1.0, max_tokens=4, ignore_eos=True) as tracer:
        drawn = [].save()
        for _ in tracer.iter[:]:
            pipe.model.layers[0].output[0][:] *= 1.0
            drawn.append(int(pipe.samples))
    outputs = [list(output.token_ids) for output in tracer.result.outputs]
    assert len({tuple(tokens) for tokens in outputs}) > 1
    assert [list(each) for each in drawn] == outputs


def _zeroing_both(pipe: Any) -> Any:
    with pipe.edit() as (tracer, edit):
        for _ in tracer.all():
            pipe.model.layers[0].mlp.output[:] = 0
            pipe.model.layers[3].mlp.output[:] = 0
    return edit


def test_installed_edits(pipe: Any, hf: Oracle) -> None:
    """An edit runs beside plain and traced requests, on both stages."""
    right = hf.generate(A, 4, changes=[zero_mlp(0), zero_mlp(3)], when="all").tokens
    assert right != hf.generate(A, 4).tokens
    edits = _zeroing_both(pipe)
    try:
        (plain,) = pipe.generate([A], temperature=0.0, max_tokens=4, ignore_eos=True)
        with pipe.trace(A, temperature=0.0, max_tokens=4, ignore_eos=True) as traced:
            mlps = [pipe.model.layers[i].mlp.output for i in (0, 3)].save()
    finally:
        edits.clear()
    assert list(plain.outputs[0].token_ids) == right
    assert list(traced.result.outputs[0].token_ids) == right
    assert all(not mlp.any() for mlp in mlps)


def test_result_is_had_in_the_block(pipe: Any) -> None:
    """A block gets its finished request, with what it had read on both stages."""
    with pipe.trace(A, **MANY) as tracer:
        early = pipe.model.layers[0].mlp.output.sum()
        late = pipe.model.layers[3].mlp.output.sum()
        told = (float(early + late), list(tracer.result.outputs[0].token_ids)).save()
    assert told[1] == list(tracer.result.outputs[0].token_ids)


def test_random_numbers_agree(pipe: Any, hf: Oracle) -> None:
    """Random numbers of a block are the same on both stages: what is saved is what was added."""
    with pipe.trace(A, **ONE):
        noise = torch.randn(5, 128).save()
        pipe.model.layers[1].output[0][:] += 3 * noise
        more = torch.randn(5, 128).save()
        pipe.model.layers[3].output[0][:] += 3 * more
        logits = pipe.logits.save()
    late = edit_layer(3, lambda rows: rows + 3 * more)
    right = hf.run(A, [edit_layer(1, lambda rows: rows + 3 * noise), late])
    assert_close(logits, right.logits, hf.run(A, [late]).logits)
