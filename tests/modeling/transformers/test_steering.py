"""Steering of generations: which positions and steps an edit touches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from midstream import TransformersModel
from tests.support.checkpoints import A, B
from tests.support.compare import assert_close
from tests.support.hooking import reading

VECTOR = torch.randn(128, generator=torch.Generator().manual_seed(5)) * 4
LAYER, LAST = "model.layers.1", "model.layers.3"
COUNT = 6
SCOPES = ("all", "prompt", "generated")


def steered(
    model: TransformersModel, scope: str, use_cache: bool
) -> tuple[list[int], list[torch.Tensor]]:
    """Tokens, and each step's last state of the last layer, with the vector in a scope."""
    with model.generate(A, max_new_tokens=COUNT, use_cache=use_cache) as tracer:
        states = [].save()
        for step in tracer.iter[:]:
            stream = model.model.layers[1].output
            length = len(A) + step
            start = length - stream.shape[1]  # the position of the first row
            for row in range(stream.shape[1]):
                in_prompt = start + row < len(A)
                if scope == "all" or in_prompt == (scope == "prompt"):
                    stream[:, row] += VECTOR
            states.append(model.model.layers[3].output[:, -1])
    return tracer.result[0, len(A) :].tolist(), list(states)


def by_hooks(model: TransformersModel, scope: str) -> tuple[list[int], list[torch.Tensor]]:
    """The same with plain hooks, one forward over all tokens for each step, without any cache."""

    def add(output: Any) -> None:
        if scope != "generated":
            output[:, : len(A)] += VECTOR
        if scope != "prompt":
            output[:, len(A) :] += VECTOR

    tokens, states = list(A), []
    handle = model.module.get_submodule(LAYER).register_forward_hook(lambda *call: add(call[2]))
    for _ in range(COUNT):
        with torch.no_grad(), reading(model.module, LAST) as seen:
            logits = model.module(torch.tensor([tokens]), use_cache=False).logits
        states.append(seen[LAST][0][:, -1])
        tokens.append(int(logits[0, -1].argmax()))
    handle.remove()
    return tokens[len(A) :], states


@pytest.mark.parametrize("scope", SCOPES)
def test_steering_with_and_without_a_cache(llama: TransformersModel, scope: str) -> None:
    """A vector gives the same tokens and states with `use_cache` and without (H20, case 64)."""
    right, states = by_hooks(llama, scope)
    wrong = by_hooks(llama, SCOPES[(SCOPES.index(scope) + 1) % 3])[1]
    clean = llama.generate(A, max_new_tokens=COUNT)[0, len(A) :].tolist()
    assert right != clean
    for use_cache in (True, False):
        tokens, got = steered(llama, scope, use_cache)
        assert tokens == right
        assert_close(got, states, wrong, 1e-4)


def test_chosen_positions_of_the_prompt(llama: TransformersModel) -> None:
    """A position of the prompt is edited in its step, and rows of later steps are not (case 66)."""
    with llama.generate(A, max_new_tokens=4) as tracer:
        before, after = [].save(), [].save()
        for step in tracer.iter[:]:
            before.append(llama.model.layers[1].output.clone())
            if step == 0:
                llama.model.layers[1].output[:, 1] += VECTOR
            after.append(llama.model.layers[1].output.clone())
    changed = [
        (new != old).any(-1)[0].nonzero().flatten().tolist()
        for old, new in zip(before, after, strict=True)
    ]
    assert changed == [[1], [], [], []]
    clean = llama.generate(A, max_new_tokens=4)
    assert tracer.result.tolist() != clean.tolist()


def test_positions_of_each_prompt_of_a_batch(llama: TransformersModel) -> None:
    """Positions that are counted from the right are each prompt's own (H15, case 66)."""
    with llama.trace() as tracer:
        with tracer.invoke(A):
            llama.model.layers[1].output[:, 1 - len(A)] += VECTOR
        with tracer.invoke(B):
            llama.model.layers[1].output[:, [-3, -1]] += VECTOR
        with tracer.invoke():
            edited = llama.model.layers[1].output.save()
    with llama.trace([A, B]):
        clean = llama.model.layers[1].output.save()
    touched = ((edited - clean).abs() > 1e-6).any(-1).nonzero().tolist()
    assert touched == [[0, 1], [1, 2], [1, 4]]
    for row, position in touched:
        assert torch.allclose(edited[row, position] - clean[row, position], VECTOR, atol=1e-4)


def test_rows_of_a_generation(llama: TransformersModel) -> None:
    """4 tokens after 5 are 5 + 3 rows, those of one pass over prompt and output (case 68)."""
    with llama.generate(A, max_new_tokens=4) as tracer:
        rows = [].save()
        for _ in tracer.iter[:]:
            rows.append(llama.model.layers[1].output[0])
    joined = torch.cat(list(rows))
    with torch.no_grad(), reading(llama.module, LAYER) as seen:
        llama.module(tracer.result)
    forced = seen[LAYER][0][0]
    assert (joined.shape[0], forced.shape[0]) == (len(A) + 3, len(A) + 4)
    assert_close(joined, forced[:-1], forced[1:], 1e-5)
