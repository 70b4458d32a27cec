"""Logits and tokens: what a block sees of them, and what its writes do."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from midstream import TransformersModel
from midstream.errors import InterventionError, StepsCutShortWarning
from tests.support.checkpoints import EOS, A, B

FORCED = 77


def plain(model: Any, ids: list[int], count: int, **settings: Any) -> list[int]:
    """The new tokens of plain transformers."""
    row = torch.tensor([ids])
    whole = model.module.generate(
        row, attention_mask=torch.ones_like(row), max_new_tokens=count, **settings
    )
    found: list[int] = whole[0, len(ids) :].tolist()
    return found


# Logits.


@pytest.mark.parametrize("assigned", [False, True])
@pytest.mark.parametrize("gradients", [False, True])
def test_logits_of_a_trace_can_be_written(
    llama: TransformersModel, assigned: bool, gradients: bool
) -> None:
    """What is written is in the output's last position, and nowhere else (H10, H20)."""
    clean = llama.module(torch.tensor([A])).logits
    with torch.set_grad_enabled(gradients), llama.trace(A) as tracer:
        if assigned:
            llama.logits = llama.logits.flip(-1)
        else:
            llama.logits[:] = llama.logits.flip(-1)
        read = llama.logits.save()
    assert not torch.allclose(clean, clean.flip(-1), atol=1e-1)
    assert torch.equal(read, clean[:, -1].flip(-1))
    assert torch.equal(tracer.result.logits[:, -1], clean[:, -1].flip(-1))
    assert torch.equal(tracer.result.logits[:, :-1], clean[:, :-1])


def test_logits_are_assigned_also_where_their_numbers_stay(llama: TransformersModel) -> None:
    """A tensor of the same numbers and its own gradients is what the output is made of (H22)."""
    with llama.trace(A) as tracer:
        own = llama.logits.detach().requires_grad_().save()
        llama.logits = own
    tracer.result.logits[:, -1].sum().backward()
    assert torch.equal(own.grad, torch.ones_like(own))


def test_gradients_flow_through_written_logits(llama: TransformersModel) -> None:
    """The gradient of the output's logits is that of what a block made of them (H22)."""
    with llama.trace(A) as tracer:
        stream = llama.model.layers[1].output.save()
        llama.logits[:, ::2] = 0
    (gradient,) = torch.autograd.grad(tracer.result.logits[0, -1].sum(), stream)
    with llama.trace(A):
        same = llama.model.layers[1].output.save()
        odd = llama.logits[0, 1::2].sum().save()
        whole = llama.logits[0].sum().save()
    (right,) = torch.autograd.grad(odd, same, retain_graph=True)
    (wrong,) = torch.autograd.grad(whole, same)
    assert not torch.allclose(right, wrong, atol=1e-2)
    assert torch.allclose(gradient, right, atol=1e-5)


def test_the_root_output_is_written(llama: TransformersModel) -> None:
    """Tensors of the root module's output can be written, and the logits are theirs (H20)."""
    with llama.trace(A) as tracer:
        llama.output.logits[:, -1] = 3
        read = llama.logits.save()
    assert read.unique().tolist() == [3]
    assert tracer.result.logits[:, -1].unique().tolist() == [3]
    with llama.generate(A, max_new_tokens=2) as tracer:
        for _ in tracer.iter[:]:
            llama.output.logits[:, -1, FORCED] = 1e6
    assert tracer.result[0, len(A) :].tolist() == [FORCED, FORCED] != plain(llama, A, 2)


@pytest.mark.parametrize("assigned", [False, True])
def test_written_logits_choose_the_token(llama: TransformersModel, assigned: bool) -> None:
    """A generation draws from the logits that a block wrote, in that step alone (H11, H20)."""
    right = plain(llama, A, 3)
    with llama.generate(A, max_new_tokens=3) as tracer:
        for step in tracer.iter[:]:
            if step == 1:
                wanted = llama.logits.clone()
                wanted[:, FORCED] = 1e6
                if assigned:
                    llama.logits = wanted
                else:
                    llama.logits[:] = wanted
    tokens = tracer.result[0, len(A) :].tolist()
    assert tokens[:2] == [right[0], FORCED]
    assert tokens[2:] == plain(llama, [*A, *tokens[:2]], 1)
    assert right[1] != FORCED


def test_logits_of_a_scan_have_a_shape(llama: TransformersModel) -> None:
    """Logits are read and written without numbers, with gradients and without (H27)."""
    with llama.scan(A):
        shape = llama.logits.shape.save()
        llama.logits = llama.logits * 2
    assert shape == (1, 128)
    with torch.no_grad(), llama.scan(A):
        llama.logits[:] = 0
        shape = llama.logits.shape.save()
    assert shape == (1, 128)


# Tokens.


@pytest.mark.parametrize("assigned", [False, True])
def test_a_forced_token_is_what_the_next_step_runs_on(
    llama: TransformersModel, assigned: bool
) -> None:
    """A token can be forced, in place or assigned, and what follows follows from it (H11)."""
    with llama.generate(A, max_new_tokens=4) as tracer:
        entered = [].save()
        for step in tracer.iter[:]:
            entered.append(llama.model.embed_tokens.input[0, -1].item())
            if step == 1 and assigned:
                llama.samples = torch.tensor([[FORCED]])
            elif step == 1:
                llama.samples[:] = FORCED
    tokens = tracer.result[0, len(A) :].tolist()
    assert tokens[1] == FORCED != plain(llama, A, 2)[1]
    assert tokens[2:] == plain(llama, [*A, *tokens[:2]], 2)
    assert entered == [A[-1], *tokens[:3]]


def test_a_forced_end_ends_the_generation(llama: TransformersModel) -> None:
    """A forced end-of-sequence token is the last, and an open loop ends with it (H11)."""
    with llama.generate(A, max_new_tokens=5) as tracer:
        steps = [].save()
        for step in tracer.iter[:]:
            steps.append(step)
            if step == 1:
                llama.samples[:] = EOS
        after = "reached".save()
    assert tracer.result[0, len(A) :].tolist() == [plain(llama, A, 1)[0], EOS]
    assert (steps, after) == ([0, 1], "reached")


@pytest.mark.parametrize("token", [-1, 128, 5000])
def test_a_token_outside_the_vocabulary_is_refused(llama: TransformersModel, token: int) -> None:
    """An id without an embedding is an error that names the ids there are (H11)."""
    with pytest.raises(InterventionError, match=f"the token id {token}; ids .* are 0 to 127"):
        with llama.generate(A, max_new_tokens=2):
            llama.samples[:] = token
    with llama.generate(A, max_new_tokens=2) as tracer:
        last = llama.samples.save()
    assert tracer.result[0, len(A)] == last.item() == plain(llama, A, 1)[0]


def test_beam_search_has_no_tokens_of_its_own(llama: TransformersModel) -> None:
    """Under beam search rows are read for each beam, and asking for tokens is an error (H11)."""
    with llama.generate(A, max_new_tokens=3, num_beams=2) as tracer:
        shapes = [].save()
        for _ in tracer.iter[:]:
            shapes.append(tuple(llama.model.layers[1].output.shape))
    assert tracer.result[0, len(A) :].tolist() == plain(llama, A, 3, num_beams=2)
    assert shapes == [(2, 5, 128), (2, 1, 128), (2, 1, 128)]
    with pytest.raises(InterventionError, match="not under beam search"):
        with llama.generate(A, max_new_tokens=2, num_beams=2):
            token = llama.samples.save()
            del token


def test_beams_of_several_invokes_are_told_apart(llama: TransformersModel) -> None:
    """Each invoke sees the beams of its own prompt (H15)."""
    with llama.generate(max_new_tokens=2, num_beams=2) as tracer:
        with tracer.invoke(A):
            one = llama.logits.save()
        with tracer.invoke(B):
            other = llama.logits.save()
    for got, ids in ((one, A), (other, B)):
        right = llama.module(torch.tensor([ids])).logits[:, -1].expand(2, -1)
        assert torch.allclose(got, right, atol=1e-3)
    assert not torch.allclose(one, other, atol=1e-1)


def test_sampling_is_transformers(llama: TransformersModel) -> None:
    """With a seed the tokens are those of plain sampling, and a block sees each (H11)."""
    with llama.generate(A, max_new_tokens=5, temperature=0.8, seed=3) as tracer:
        tokens = [].save()
        for _ in tracer.iter[:]:
            tokens.append(llama.samples.item())
    torch.manual_seed(3)
    right = plain(llama, A, 5, temperature=0.8, do_sample=True)
    assert tokens == right == tracer.result[0, len(A) :].tolist()
    assert right != plain(llama, A, 5)


def test_sequences_of_one_prompt_are_rows(llama: TransformersModel) -> None:
    """`n` sequences of a prompt are its rows, those of another invoke are not seen (H11, H15)."""
    with llama.generate(max_new_tokens=3, temperature=0.8, seed=3, n=2) as tracer:
        with tracer.invoke(A):
            one = [].save()
            for _ in tracer.iter[:]:
                one.append(llama.samples)
        with tracer.invoke(B):
            other = [].save()
            for _ in tracer.iter[:]:
                other.append(llama.samples)
    new = tracer.result[:, len(A) :]
    assert torch.equal(torch.cat(one, 1), new[:2])
    assert torch.equal(torch.cat(other, 1), new[2:])
    assert len({tuple(row) for row in new.tolist()}) == 4


def test_a_loop_longer_than_the_generation_warns(llama: TransformersModel) -> None:
    """A bounded loop that was cut short warns at its line and the rest of the block runs (H26)."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with llama.generate(A, max_new_tokens=2) as tracer:
            steps = [].save()
            for step in tracer.iter[:7]:
                steps.append(step)
                llama.logits.sum()
            after = "reached".save()
    warned = [each for each in caught if issubclass(each.category, StepsCutShortWarning)]
    assert (steps, after) == ([0, 1], "reached")
    assert [(each.filename, "7 steps" in str(each.message)) for each in warned] == [
        (__file__, True)
    ]


def test_no_cache_of_keys_and_values(llama: TransformersModel) -> None:
    """With `use_cache=False` each step runs on all tokens, and is read so (H20)."""
    with llama.generate(A, max_new_tokens=3, use_cache=False) as tracer:
        lengths = [].save()
        for _ in tracer.iter[:]:
            lengths.append(llama.model.layers[1].output.shape[1])
    assert lengths == [5, 6, 7]
    assert tracer.result[0, len(A) :].tolist() == plain(llama, A, 3)
