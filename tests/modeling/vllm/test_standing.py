"""Loops that make one edit in each step, which the engine makes for all requests together."""

from __future__ import annotations

from typing import Any

import pytest
import torch

PROMPTS = ["Rome is", "The capital of France is", "One two three"]
TOKENS = 8


def vectors() -> list[torch.Tensor]:
    """One for each prompt."""
    return [torch.randn(128, generator=torch.Generator().manual_seed(i)) * 2 for i in range(3)]


def recognised(model: Any, own: list[torch.Tensor], scale: float = 1.0) -> list[torch.Tensor]:
    """The last layer's rows of each request, steered by a loop that is nothing but the edit."""
    with model.trace(temperature=0.0, max_tokens=TOKENS, ignore_eos=True) as tracer:
        for prompt, vector in zip(PROMPTS, own, strict=True):
            with tracer.invoke(prompt):
                cache = tracer.cache(modules=[model.model.norm])
                for _ in tracer.iter[:]:
                    stream = model.model.layers[1].output[0]
                    stream += scale * vector
    return [torch.cat([pair[0] for pair in each["model.norm"].output]) for each in cache]


def by_hand(model: Any, own: list[torch.Tensor], scale: float = 1.0) -> list[torch.Tensor]:
    """The same with a loop in which something else might happen."""
    with model.trace(temperature=0.0, max_tokens=TOKENS, ignore_eos=True) as tracer:
        for prompt, vector in zip(PROMPTS, own, strict=True):
            with tracer.invoke(prompt):
                cache = tracer.cache(modules=[model.model.norm])
                for _ in tracer.iter[:]:
                    if scale:
                        stream = model.model.layers[1].output[0]
                        stream += scale * vector
    return [torch.cat([pair[0] for pair in each["model.norm"].output]) for each in cache]


@pytest.fixture(params=["eager", "recorded"])
def decoding(request: pytest.FixtureRequest, llama: Any) -> Any:
    """The engine with eager steps, and with recorded ones."""
    from tests.conftest import record_steps

    core = llama.vllm_entrypoint.llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.model_runner
    before = runner.graphs
    if request.param == "recorded":
        record_steps(llama)
    yield llama
    runner.graphs = before


def test_requests_are_steered_as_by_their_own_blocks(decoding: Any) -> None:
    """What the last layer returns is the same whether blocks make each edit or the engine does."""
    mine, its = recognised(decoding, vectors()), by_hand(decoding, vectors())
    clean = recognised(decoding, vectors(), 0.0)
    assert [len(rows) for rows in mine] == [len(rows) for rows in its]
    for a, b, c in zip(mine, its, clean, strict=True):
        assert torch.equal(a, b)
        assert (a[-TOKENS + 1 :] - c[-TOKENS + 1 :]).abs().max() > 0.1


def test_blocks_do_not_execute_while_their_edit_stands(decoding: Any) -> None:
    """A block makes its edit in the prompt and in one step of decoding; then its engine does."""
    core = decoding.vllm_entrypoint.llm_engine.engine_core.engine_core
    standing = core.model_executor.driver_worker.model_runner.blocks.interleaver.standing
    taken: list[bool] = []
    take = standing.take
    standing.take = lambda run: taken.append(take(run)) or taken[-1]
    try:
        recognised(decoding, vectors())
        stood = taken.count(True)
        taken.clear()
        by_hand(decoding, vectors())
    finally:
        del standing.take
    assert stood == len(PROMPTS) * (TOKENS - 2)
    assert taken.count(True) == 0
    assert len(taken) == len(PROMPTS) * TOKENS


def test_a_request_beside_others_code(decoding: Any) -> None:
    """A steered request and one that reads the edited layer in each step keep to their own rows."""
    vector = vectors()[0]

    def run(steered: bool) -> Any:
        with decoding.trace(temperature=0.0, max_tokens=TOKENS, ignore_eos=True) as tracer:
            if steered:
                with tracer.invoke(PROMPTS[0]):
                    for _ in tracer.iter[:]:
                        decoding.model.layers[1].output[0][:] += vector
            with tracer.invoke(PROMPTS[1]):
                rows = [].save()
                for _ in tracer.iter[:]:
                    rows.append(decoding.model.layers[1].output[0])
        return torch.cat(rows)

    beside, alone = run(True), run(False)
    torch.testing.assert_close(beside, alone, atol=1e-4, rtol=1e-4)
    assert vector.abs().max() > 1e-2


def test_a_loop_that_the_request_outlives(decoding: Any) -> None:
    """Behind the loop's last turn the block goes on, in the same step."""
    vector = vectors()[0]
    with decoding.trace(PROMPTS[0], temperature=0.0, max_tokens=TOKENS, ignore_eos=True) as tracer:
        for _ in tracer.iter[1:5]:
            decoding.model.layers[0].output[0][:] += vector
        later = decoding.model.layers[2].output[0].save()
        step = model_step = decoding.samples.save()
    assert later.shape[0] == 1
    assert step is model_step
    assert int(step) == tracer.result.outputs[0].token_ids[4]


def test_what_loops_append(decoding: Any) -> None:
    """Lists that the engine fills for all requests hold what each block would have appended."""
    layers = decoding.model.layers

    def gathered() -> tuple[Any, Any]:
        with decoding.trace(temperature=0.0, max_tokens=TOKENS, ignore_eos=True) as tracer:
            for prompt in PROMPTS:
                with tracer.invoke(prompt):
                    rows = [].save()
                    for _ in tracer.iter[:]:
                        rows.append([(layer.mlp.output, layer.output[0]) for layer in layers])
        return rows

    def read() -> tuple[Any, Any]:
        with decoding.trace(temperature=0.0, max_tokens=TOKENS, ignore_eos=True) as tracer:
            for prompt in PROMPTS:
                with tracer.invoke(prompt):
                    rows = [].save()
                    for _ in tracer.iter[:]:
                        pairs = [(layer.mlp.output, layer.output[0]) for layer in layers]
                        rows.append(pairs)
        return rows

    mine, its = gathered(), read()
    for a, b in zip(mine, its, strict=True):
        assert len(a) == len(b) == TOKENS
        flat = [(x, y) for p, q in zip(a, b, strict=True) for x, y in zip(p, q, strict=True)]
        assert len(flat) == TOKENS * len(layers)
        for one, other in flat:
            assert all(torch.equal(x, y) for x, y in zip(one, other, strict=True))
    assert not torch.equal(mine[0][3][0][0], mine[0][4][0][0])
    assert not torch.equal(mine[0][3][0][0], mine[0][3][1][0])


def test_a_list_filled_for_a_block_is_its_own(decoding: Any) -> None:
    """Behind the loop the block finds all rows in its list, and its changes of them come home."""
    layer = decoding.model.layers[1]
    with decoding.trace(PROMPTS[0], temperature=0.0, max_tokens=TOKENS, ignore_eos=True) as tracer:
        rows = [].save()
        for _ in tracer.iter[:]:
            rows.append(layer.output[0])
        count = len(rows).save()
        rows[3][:] = 7.0
    assert count == len(rows) == TOKENS
    assert [bool((row == 7.0).all()) for row in rows] == [i == 3 for i in range(TOKENS)]
