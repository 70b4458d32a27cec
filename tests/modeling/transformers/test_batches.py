"""Several invokes of a HuggingFace model in one forward: whose values are whose."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from midstream import TransformersModel
from midstream.errors import InterventionError, UnsupportedError
from tests.support.checkpoints import EOS, A, B
from tests.support.compare import assert_close
from tests.support.hooking import first, hooked, reading

Models = Callable[[str], TransformersModel]
DECODERS = {
    "T-GPT2": "transformer.h.1",
    "T-LLAMA": "model.layers.1",
    "T-GEMMA2": "model.layers.1",
    "T-BLOOM": "transformer.h.1",
}
TOLERANCE = 1e-5


def alone(model: TransformersModel, path: str, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer's stream and the last logits of one prompt, by hooks."""
    with reading(model.module, path) as seen:
        logits = model.module(torch.tensor([ids])).logits[:, -1]
    return first(seen[path][0]), logits


@pytest.mark.parametrize("name", DECODERS)
def test_each_invoke_sees_its_rows(traced: Models, name: str) -> None:
    """Prompts of other lengths have their solo values, from the right (H14, H15, H17, case 56)."""
    model, path = traced(name), DECODERS[name]
    with model.trace() as tracer:
        with tracer.invoke(A):
            stream = first(model.get(path).output).save()
            logits = model.logits.save()
        with tracer.invoke(B):
            stream = first(model.get(path).output).save()
            logits = model.logits.save()
    assert [each.shape[:2] for each in stream] == [(1, 5), (1, 5)]
    for got, last, ids, other in zip(stream, logits, (A, B), (B, A), strict=True):
        right, right_logits = alone(model, path, ids)
        wrong, wrong_logits = alone(model, path, other)
        assert_close(got[:, -len(ids) :], right, right.flip(1), TOLERANCE)
        assert_close(got[:, -1], right[:, -1], wrong[:, -1], TOLERANCE)
        assert_close(last, right_logits, wrong_logits, TOLERANCE)


def test_an_invoke_of_several_prompts_has_their_rows(llama: TransformersModel) -> None:
    """A list of prompts is one invoke's rows, beside another's (H15, H17)."""
    with llama.trace() as tracer:
        with tracer.invoke([A, B]):
            two = llama.logits.save()
        with tracer.invoke(B):
            one = llama.logits.save()
    assert (two.shape[0], one.shape[0]) == (2, 1)
    right = [alone(llama, "model.layers.1", ids)[1] for ids in (A, B)]
    assert_close(two, torch.cat(right), torch.cat(right[::-1]), TOLERANCE)
    assert_close(one, right[1], right[0], TOLERANCE)


def test_an_invoke_without_input_sees_the_batch(llama: TransformersModel) -> None:
    """It reads and writes all rows, after what the invokes above it did (H16)."""
    with llama.trace() as tracer:
        with tracer.invoke(A):
            llama.model.layers[1].output[:] = 1
        with tracer.invoke(B):
            own = llama.model.layers[1].output.save()
        with tracer.invoke():
            both = llama.model.layers[1].output.save()
            llama.model.layers[2].output[:] = 2
        with tracer.invoke(B):
            late = llama.model.layers[2].output.save()
    assert both.shape[0] == 3
    assert both[0].unique().tolist() == [1]
    assert torch.equal(both[1:2], own)
    assert late.unique().tolist() == [2]


def test_tensors_without_rows_are_whole(llama: TransformersModel) -> None:
    """What has no row for each prompt is given whole, and is the others' too (H17)."""
    with llama.trace() as tracer:
        with tracer.invoke(A):
            cosine = llama.model.rotary_emb.output[0].save()
            weight = llama.lm_head.weight.save()
        with tracer.invoke(B):
            angles = llama.model.rotary_emb.output[0].save()
    assert weight.shape == (128, 128)
    assert cosine.shape == angles.shape == (1, 5, 64)
    assert torch.equal(angles[:, -3:], cosine[:, :3])


def test_what_cannot_share_a_forward_is_refused(traced: Models) -> None:
    """Flags that differ between invokes, and settings of one of them, are refused (H18)."""
    model = traced("T-LLAMA")
    with pytest.raises(UnsupportedError, match="output_attentions=None"):
        with model.trace() as tracer:
            with tracer.invoke(A, output_attentions=True):
                model.logits.sum()
            with tracer.invoke(B):
                model.logits.sum()
    with pytest.raises(UnsupportedError, match=r"belong into `model.generate"):
        with model.generate(max_new_tokens=2) as tracer:
            with tracer.invoke(A, max_new_tokens=3):
                model.logits.sum()


@pytest.mark.parametrize("name", DECODERS)
def test_a_generation_of_uneven_prompts(traced: Models, name: str) -> None:
    """Each prompt's tokens and values are those of its solo run (H14, H15, case 63)."""
    model, path = traced(name), DECODERS[name]
    with model.generate(max_new_tokens=5) as tracer:
        with tracer.invoke(A):
            streams, tokens = [].save(), [].save()
            for _ in tracer.iter[:]:
                streams.append(first(model.get(path).output)[:, -1])
                tokens.append(model.samples.item())
        with tracer.invoke(B):
            streams, tokens = [].save(), [].save()
            for _ in tracer.iter[:]:
                streams.append(first(model.get(path).output)[:, -1])
                tokens.append(model.samples.item())
    solo = []
    for ids in (A, B):
        row = torch.tensor([ids])
        with torch.no_grad(), reading(model.module, path) as seen:
            new = model.module.generate(row, attention_mask=torch.ones_like(row), max_new_tokens=5)[
                0, len(ids) :
            ]
        solo.append((new.tolist(), [first(each)[:, -1] for each in seen[path]]))
    assert tokens == [solo[0][0], solo[1][0]]
    assert tokens[0] != tokens[1]
    for got, (_, right) in zip(streams, solo, strict=True):
        assert_close(got, right, right[::-1], TOLERANCE)


# Blocks that meet.


def test_invokes_see_each_others_variables(llama: TransformersModel) -> None:
    """What one invoke binds the next reads, before the same location with a barrier (H20)."""
    with llama.trace() as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke(A):
            stream = llama.model.layers[1].output[:, -1]
            barrier()
        with tracer.invoke(B):
            barrier()
            llama.model.layers[1].output[:, -1] = stream
            logits = llama.logits.save()
    source, _ = alone(llama, "model.layers.1", A)

    def put(output: Any) -> None:
        output[:, -1] = source[:, -1]

    with torch.no_grad(), hooked(llama.module, {"model.layers.1": put}):
        right = llama.module(torch.tensor([B])).logits[:, -1]
    assert_close(logits, right, alone(llama, "model.layers.1", B)[1], TOLERANCE)


def test_a_barrier_that_too_few_reach(llama: TransformersModel) -> None:
    """Blocks that wait for more than come are told how many came (H26)."""
    with pytest.raises(InterventionError, match="barrier is for 3 blocks, and 2 came"):
        with llama.trace() as tracer:
            barrier = tracer.barrier(3)
            with tracer.invoke(A):
                barrier()
            with tracer.invoke(B):
                barrier()


def test_a_module_is_skipped_by_some(llama: TransformersModel) -> None:
    """An invoke that skips a layer has the result it has alone, and the others theirs (H21)."""

    def skipped(ids: list[int]) -> torch.Tensor:
        with llama.trace(ids):
            llama.model.layers[2].skip(llama.model.layers[1].output)
            logits = llama.logits.save()
        return logits

    with llama.trace() as tracer:
        with tracer.invoke(A):
            llama.model.layers[2].skip(llama.model.layers[1].output)
            one = llama.logits.save()
        with tracer.invoke(B):
            other = llama.logits.save()
        with tracer.invoke(A):
            same = llama.logits.save()
    clean = {len(ids): alone(llama, "model.layers.1", ids)[1] for ids in (A, B)}
    assert_close(one, skipped(A), clean[5], TOLERANCE)
    assert_close(other, clean[3], skipped(B), TOLERANCE)
    assert_close(same, clean[5], skipped(A), TOLERANCE)


def test_an_invoke_stops(llama: TransformersModel) -> None:
    """A stopped prompt draws no more, and the others go on as alone (H20)."""
    with llama.generate(max_new_tokens=4) as tracer:
        with tracer.invoke(A):
            tokens = [].save()
            for step in tracer.iter[:]:
                tokens.append(llama.samples.item())
                if step == 1:
                    tracer.stop()
        with tracer.invoke(B):
            tokens = [].save()
            for _ in tracer.iter[:]:
                tokens.append(llama.samples.item())
    right = [llama.generate(ids, max_new_tokens=4)[0, len(ids) :].tolist() for ids in (A, B)]
    assert tokens == [right[0][:2], right[1]]
    assert tracer.result[:, len(A) :].tolist() == [[*right[0][:2], EOS, EOS], right[1]]


def test_all_invokes_stop(llama: TransformersModel) -> None:
    """The call ends with the last of them, and gives what it has drawn (H10, H20)."""
    with llama.generate(max_new_tokens=9) as tracer:
        with tracer.invoke(A):
            steps = [].save()
            for step in tracer.iter[:]:
                steps.append(llama.samples.item())
                if step == 1:
                    tracer.stop()
        with tracer.invoke(B):
            steps = [].save()
            for step in tracer.iter[:]:
                steps.append(llama.samples.item())
                if step == 2:
                    tracer.stop()
    assert [len(each) for each in steps] == [2, 3]
    assert tracer.result.shape == (2, len(A) + 3)


# Gradients.


@pytest.mark.parametrize("name", DECODERS)
def test_gradients_of_several_prompts(traced: Models, name: str) -> None:
    """Each invoke's gradients are those of plain autograd on its prompt (H22, case 58)."""
    model, path = traced(name), DECODERS[name]
    with model.trace() as tracer:
        for ids in (A, B):
            with tracer.invoke(ids):
                stream = first(model.get(path).output)
                loss = model.logits[:, :64].sum()
                with loss.backward(retain_graph=True):
                    gradient = stream.grad.save()
    right = []
    for ids in (A, B):
        with reading(model.module, path) as seen:
            loss = model.module(torch.tensor([ids])).logits[:, -1, :64].sum()
        right += torch.autograd.grad(loss, first(seen[path][0]))
    assert len(gradient) == 2
    for got, plain in zip(gradient, right, strict=True):
        assert_close(got[:, -plain.shape[1] :], plain, plain.flip(1), 1e-4)
    assert not gradient[1][:, :2].any()


def test_forwards_that_stand_in_take_what_the_own_take(llama: TransformersModel) -> None:
    """Transformers looks at what forwards take, and finds their own signature (H14, H15)."""
    inner = llama.module.model.layers[1]
    right = [inspect.signature(each.forward) for each in (llama.module, inner)]
    with llama.trace(A):
        llama.model.layers[1].input.sum()
        replaced = ("forward" in vars(llama.module), "forward" in vars(inner)).save()
        found = [inspect.signature(each.forward) for each in (llama.module, inner)].save()
    assert replaced == (True, True)
    assert found == right


def test_tokens_of_an_expert_layer_are_told_apart(traced: Models) -> None:
    """Rows that experts have behind each other, one a token, are each invoke's own (H15, H17)."""
    model, back = traced("T-MIXTRAL"), A[::-1]
    experts = "model.layers.0.mlp.experts"
    seen: list[torch.Tensor] = []
    hook = model.module.get_submodule(experts).register_forward_pre_hook(
        lambda module, args: seen.append(args[0].clone())
    )
    model.module(torch.tensor([A, back]))
    hook.remove()
    right = seen[0]
    with model.trace() as tracer:
        with tracer.invoke(A):
            given = model.get(experts).input.save()
        with tracer.invoke(back):
            given = model.get(experts).input.save()
    assert torch.equal(given[0], right[:5])
    assert torch.equal(given[1], right[5:])
    with model.trace() as tracer:
        with tracer.invoke(A):
            untouched = model.logits.save()
        with tracer.invoke(back):
            model.get(experts).input[:] = 0
            edited = model.logits.save()
    with model.trace(back):
        model.get(experts).input[:] = 0
        logits = model.logits.save()
    with model.trace(back):
        plain = model.logits.save()
    with model.trace(A):
        first_alone = model.logits.save()
    assert_close(edited, logits, plain, TOLERANCE)
    assert_close(untouched, first_alone, plain, TOLERANCE)
