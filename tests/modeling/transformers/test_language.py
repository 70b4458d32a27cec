"""What the language of blocks has beside reads and writes, on HuggingFace models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from midstream import TransformersModel
from midstream.errors import InterventionError
from tests.support.checkpoints import A, B
from tests.support.compare import assert_close
from tests.support.hooking import first, hooked, reading

Models = Callable[[str], TransformersModel]


def plain(model: TransformersModel, ids: list[int]) -> torch.Tensor:
    """The logits of plain transformers, of all positions."""
    found: torch.Tensor = model.module(torch.tensor([ids])).logits
    return found


# Inputs.


def test_a_mask_counts_in_every_step(traced: Models) -> None:
    """An encoding with padding gives the prompt's own tokens and values (H13, case 29, case 63)."""
    model = traced("T-GPT2")
    padded = {"input_ids": [[0, 0, *B]], "attention_mask": [[0, 0, 1, 1, 1]]}
    unmasked = plain(model, [0, 0, *B])
    with model.trace(padded):
        logits = model.logits.save()
    assert_close(logits, plain(model, B)[:, -1], unmasked[:, -1], 1e-5)
    right = model.module.generate(torch.tensor([B]), max_new_tokens=6)[0, len(B) :].tolist()
    wrong = model.module.generate(torch.tensor([[0, 0, *B]]), max_new_tokens=6)[0, 5:].tolist()
    with model.generate(padded, max_new_tokens=6) as tracer:
        tokens = [].save()
        for _ in tracer.iter[:]:
            tokens.append(model.samples.item())
    assert list(tokens) == right != wrong
    with pytest.raises(TypeError, match="'bogus'"):
        model.generate(padded, bogus=1)


@pytest.mark.parametrize("word", ["max_tokens", "max_new_tokens"])
def test_either_name_of_the_length(llama: TransformersModel, word: str) -> None:
    """5 tokens by either name are 5 steps and 5 tokens (case 28)."""
    with llama.generate(A, **{word: 5}) as tracer:
        steps = [].save()
        for step in tracer.iter[:]:
            steps.append(step)
    assert list(steps) == [0, 1, 2, 3, 4]
    assert tracer.result.shape == (1, len(A) + 5)


def test_a_forward_of_keywords_alone(llama: TransformersModel) -> None:
    """A wrapper whose forward swallows keywords is read and generates as it is (case 83)."""

    class Wrapper(type(llama.module)):  # type: ignore[misc]
        def forward(self, **kwargs: Any) -> Any:
            kwargs.pop("output_hidden_states", None)
            return super().forward(**kwargs)

    module = Wrapper(llama.config).eval()
    module.load_state_dict(llama.module.state_dict())
    model = TransformersModel(module)
    with model.trace(input_ids=torch.tensor([A])) as tracer:
        streams = [layer.output for layer in model.model.layers].save()
    right = llama.module(torch.tensor([A]), output_hidden_states=True)
    assert torch.equal(tracer.result.logits, right.logits)
    assert all(map(torch.equal, streams[:-1], right.hidden_states[1:-1]))


# Inside a forward.


def test_looking_at_source_and_then_generating(traced: Models) -> None:
    """Operations of attention are read, and a generation after that is as before (case 50, H20)."""
    model = traced("T-GEMMA2")
    right = model.module.generate(torch.tensor([A]), max_new_tokens=3)
    listing = str(model.model.layers[1].self_attn.source)
    assert "attention_interface_" in listing
    with model.trace(A):
        attention = model.model.layers[1].self_attn
        keys = attention.k_proj.output.save()
        mixed = attention.source.attention_interface_1.output[0].save()
        out = attention.o_proj.input.save()
    assert torch.equal(mixed.reshape(out.shape), out)
    assert keys.shape == (1, 5, 128)
    with model.generate(A, max_new_tokens=3) as tracer:
        first(model.model.layers[1].output).sum()
    assert torch.equal(tracer.result, right)
    assert torch.equal(model.generate(A, max_new_tokens=3), right)


def test_operations_are_written_and_skipped(llama: TransformersModel) -> None:
    """Writing what attention mixes is the same as writing what its projection gets (H20)."""
    with llama.trace(A) as tracer:
        llama.model.layers[1].self_attn.source.attention_interface_1.output[0][:] = 0
    with llama.trace(A) as other:
        llama.model.layers[1].self_attn.o_proj.input[:] = 0
    assert torch.equal(tracer.result.logits, other.result.logits)
    assert not torch.allclose(tracer.result.logits, plain(llama, A), atol=1e-2)


def test_modules_are_called_on_values(llama: TransformersModel) -> None:
    """A lens through norm and head is that of the modules themselves, with gradients (H20)."""
    with llama.trace(A):
        stream = llama.model.layers[1].output.save()
        lens = llama.lm_head(llama.model.norm(stream)).save()
        logits = llama.logits.save()
    right = llama.module.lm_head(llama.module.model.norm(stream))
    assert torch.equal(lens, right)
    assert not torch.allclose(lens[:, -1], logits, atol=1e-1)
    (gradient,) = torch.autograd.grad(lens.sum(), stream)
    assert torch.equal(gradient, torch.autograd.grad(right.sum(), stream)[0])


def test_a_cache_records_each_step(llama: TransformersModel) -> None:
    """A cache has a value for each step, after all edits, of the modules chosen (H20)."""
    with llama.generate(A, max_new_tokens=3) as tracer:
        cache = tracer.cache(modules=[llama.model.layers[1]], include_inputs=True).save()
        for _ in tracer.iter[:]:
            llama.model.layers[1].output[:] = 1
    kept = cache["model.model.layers.1"]
    assert [tuple(each.shape) for each in kept.output] == [(1, 5, 128), (1, 1, 128), (1, 1, 128)]
    assert {each.unique().item() for each in kept.output} == {1}
    assert [each.shape for each in kept.input] == [each.shape for each in kept.output]
    assert kept.input[0].unique().numel() > 100


# What stays.


def test_an_edited_copy_leaves_the_model(llama: TransformersModel) -> None:
    """A copy is edited in all its calls, its original in none; cleared it is as before (H23)."""
    with hooked(llama.module, {"model.layers.1": lambda output: output * 0.2}):
        right = plain(llama, A)
        tokens = llama.module.generate(torch.tensor([A]), max_new_tokens=1)
    with llama.edit() as (_, edited):
        edited.model.layers[1].output[:] *= 0.2
    with edited.trace(A) as tracer:
        read = edited.model.layers[1].output.save()
    with llama.trace(A):
        clean = llama.model.layers[1].output.save()
    assert torch.equal(tracer.result.logits, right)
    assert torch.equal(edited.trace(A, trace=False).logits, right)
    assert torch.equal(edited.generate(A, max_new_tokens=1), tokens)
    assert torch.equal(read, clean * 0.2)
    assert torch.equal(llama(A).logits, plain(llama, A))
    assert not torch.allclose(right, plain(llama, A), atol=1e-2)
    edited.clear_edits()
    assert torch.equal(edited(A).logits, plain(llama, A))


def test_edits_in_place_do_not_pile_up(llama: TransformersModel) -> None:
    """Edited twice it acts twice, on each prompt of a batch, then not at all (H23, case 53)."""
    clean = [plain(llama, A)[:, -1], plain(llama, B)[:, -1]]
    try:
        for _ in range(2):
            with llama.edit(inplace=True):
                llama.model.layers[1].output[:, -1] += 1
        with llama.trace() as tracer:
            with tracer.invoke(A):
                stream = llama.model.layers[1].output[:, -1].save()
            with tracer.invoke(B):
                stream = llama.model.layers[1].output[:, -1].save()
    finally:
        llama.clear_edits()
    for got, ids in zip(stream, (A, B), strict=True):
        with reading(llama.module, "model.layers.1") as seen:
            plain(llama, ids)
        right = seen["model.layers.1"][0][:, -1]
        assert_close(got, right + 2, right + 1, 1e-5)
    assert torch.equal(llama(A).logits[:, -1], clean[0])
    assert torch.equal(llama(B).logits[:, -1], clean[1])


def test_edits_of_each_step(llama: TransformersModel) -> None:
    """An edit with a loop acts in each step of a generation without a block (H9, H23)."""
    with hooked(llama.module, {"model.layers.1": lambda output: output * 0.2}):
        right = llama.module.generate(torch.tensor([A]), max_new_tokens=4)
    with llama.edit() as (tracer, edited):
        for _ in tracer.iter[:]:
            edited.model.layers[1].output[:] *= 0.2
    assert torch.equal(edited.generate(A, max_new_tokens=4), right)
    assert right.tolist() != llama.generate(A, max_new_tokens=4).tolist()


def test_attached_modules(folder: Callable[[str], Path]) -> None:
    """A module that is attached is called by an edit, and met by blocks with `hook=True` (H24)."""
    model = TransformersModel(folder("T-LLAMA"), dtype=torch.float32, dispatch=True)
    torch.manual_seed(0)
    adapter = torch.nn.Linear(128, 128)
    model.model.layers[1].adapter = adapter
    with model.edit() as (_, edited):
        layer = edited.model.layers[1]
        layer.output[:] += layer.adapter(layer.output, hook=True)
    with edited.trace(A) as tracer:
        added = edited.model.layers[1].adapter.output.save()
        answer = edited.logits[0, 7].save()
    with hooked(model.module, {"model.layers.1": lambda output: output + adapter(output)}):
        right = plain(model, A)
    assert torch.equal(tracer.result.logits, right)
    assert added.shape == (1, 5, 128)
    answer.backward()
    assert adapter.weight.grad is not None
    assert adapter.weight.grad.any()
    assert not torch.allclose(right, plain(model, A), atol=1e-2)


def test_sessions(llama: TransformersModel) -> None:
    """A trace of a session reads what an earlier one bound and did not save (H25)."""
    with llama.session():
        with llama.trace(A):
            stream = llama.model.layers[1].output[:, -1]
        with llama.trace(B) as tracer:
            llama.model.layers[1].output[:, -1] = stream
            put = llama.model.layers[1].output[:, -1].save()
    with reading(llama.module, "model.layers.1") as seen:
        plain(llama, A)
    assert torch.equal(put, seen["model.layers.1"][0][:, -1])
    assert not torch.allclose(tracer.result.logits[:, -1], plain(llama, B)[:, -1], atol=1e-2)
    with pytest.raises((NameError, InterventionError), match="later"):
        with llama.trace(A):
            later = llama.model.layers[1].output
        with llama.trace(B):
            llama.model.layers[1].output[:, -1] = later[:, -1]


def test_a_second_backward_pass(llama: TransformersModel) -> None:
    """A second pass works where the graph was kept, and else names `retain_graph` (case 59)."""
    with llama.trace(A):
        stream = llama.model.layers[1].output
        one, two = llama.logits[0, 7], llama.logits[0, 8]
        with one.backward(retain_graph=True):
            first_gradient = stream.grad.save()
        with two.backward():
            second = stream.grad.save()
    with reading(llama.module, "model.layers.1") as seen:
        logits = plain(llama, A)[0, -1]
    kept = seen["model.layers.1"][0]
    (right,) = torch.autograd.grad(logits[7], kept, retain_graph=True)
    assert torch.equal(first_gradient, right)
    assert torch.equal(second, torch.autograd.grad(logits[8], kept)[0])
    assert not torch.allclose(first_gradient, second)
    with pytest.raises(InterventionError, match="retain_graph"):
        with llama.trace(A):
            stream = llama.model.layers[1].output
            loss = llama.logits[0, 7]
            with loss.backward():
                one = stream.grad
            with loss.backward():
                two = stream.grad
