"""A preempted request comes out as if it had never been preempted, whatever its block does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from midstream import VLLM
from midstream.errors import InterventionError, StepsCutShortWarning
from tests.modeling.vllm.conftest import runner_of
from tests.soak.engines import schedule
from tests.support.checkpoints import LONG, A, B, checkpoint
from tests.support.compare import assert_close

STEPS = 40
SETTINGS = {"temperature": 0.0, "max_tokens": STEPS, "ignore_eos": True}


@contextmanager
def built(*, asynchronous: bool, **settings: Any) -> Iterator[VLLM]:
    """An engine in this process with room for one of the requests and a bit."""
    with VLLM(
        str(checkpoint("T-LLAMA", with_tokenizer=True)),
        dtype="float32",
        max_model_len=64,
        block_size=32,
        num_gpu_blocks_override=4,
        kv_cache_memory_bytes=1 << 24,
        **settings,
    ) as model:
        with pytest.MonkeyPatch.context() as patch:
            schedule(patch, asynchronous=asynchronous)
            model.dispatch()
        yield model


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def small(request: pytest.FixtureRequest) -> Iterator[VLLM]:
    """Such an engine with asynchronous scheduling off and on."""
    with built(asynchronous=request.param) as model:
        yield model


@pytest.fixture
def preempted(small: VLLM) -> Iterator[list[str]]:
    """Ids of the requests that were preempted."""
    scheduler = small.vllm_entrypoint.llm_engine.engine_core.engine_core.scheduler
    found: list[str] = []
    preempt = scheduler._preempt_request

    def noting(request: Any, *more: Any, **keywords: Any) -> Any:
        found.append(request.request_id)
        return preempt(request, *more, **keywords)

    scheduler._preempt_request = noting
    yield found
    del scheduler._preempt_request


def plain(model: Any, tracer: Any) -> dict[str, Any]:
    """Reads the logits of every step."""
    return {"logits": [model.logits.clone() for _ in tracer.iter[:]]}


def prefill(model: Any, tracer: Any) -> dict[str, Any]:
    """Writes into the prompt's rows in place, in step 0 only."""
    model.model.layers[1].mlp.output[:] *= -3.0
    return plain(model, tracer)


def steering(model: Any, tracer: Any) -> dict[str, Any]:
    """Adds a vector to the residual stream in every step."""
    seen = []
    for step in tracer.iter[:]:
        direction = torch.linspace(-8, 8, 128) * (1 + step % 3)
        model.model.layers[1].output[0][:] += direction
        seen.append(model.logits.clone())
    return {"logits": seen}


def replacing(model: Any, tracer: Any) -> dict[str, Any]:
    """Replaces an MLP's output by another one in every step."""
    seen = []
    for step in tracer.iter[:]:
        mlp = model.model.layers[0].mlp
        mlp.output = mlp.output.flip(-1) * (2 + step % 2)
        seen.append(model.logits.clone())
    return {"logits": seen}


def skipping(model: Any, tracer: Any) -> dict[str, Any]:
    """Lets an MLP's input stand for its output in every other step."""
    seen = []
    for step in tracer.iter[:]:
        mlp = model.model.layers[2].mlp
        if step % 2 == 0:
            mlp.skip(mlp.input * 2)
        seen.append(model.logits.clone())
    return {"logits": seen}


def inputs(model: Any, tracer: Any) -> dict[str, Any]:
    """Edits what a projection inside the attention is called with."""
    seen = []
    for _ in tracer.iter[:]:
        model.model.layers[1].self_attn.qkv_proj.input[:] *= 0.2
        seen.append(model.logits.clone())
    return {"logits": seen}


def inside(model: Any, tracer: Any) -> dict[str, Any]:
    """Edits the result of an operation inside a forward."""
    seen = []
    for _ in tracer.iter[:]:
        model.model.layers[1].mlp.source.maybe_fused_act_quant_0.output[:] *= 3
        seen.append(model.logits.clone())
    return {"logits": seen}


def together(model: VLLM, block: Callable[..., Any]) -> list[tuple[list[int], Any]]:
    """Two requests at once, the same block beside both: tokens and saved logits of each."""
    found = []
    with model.trace() as tracer:
        for prompt in (A, B):
            with tracer.invoke(prompt, **SETTINGS):
                logits = block(model, tracer)["logits"].save()
    for output, seen in zip(tracer.result, logits, strict=True):
        found.append((list(output.outputs[0].token_ids), torch.cat(seen)))
    return found


def alone(model: VLLM, prompt: list[int], block: Callable[..., Any]) -> tuple[list[int], Any]:
    """One request by itself."""
    done = model.trace(prompt, block=block, **SETTINGS)
    return list(done.result.outputs[0].token_ids), torch.cat(done.saves["logits"])


@pytest.mark.parametrize(
    "block",
    [plain, prefill, steering, replacing, skipping, inputs, inside],
    ids=lambda f: f.__name__,
)
def test_a_preempted_request_gets_what_it_gets_alone(
    small: VLLM, preempted: list[str], block: Callable[..., Any]
) -> None:
    """Its tokens and the logits of all its steps are those of an undisturbed run (C60, case 30)."""
    expected = [alone(small, prompt, block) for prompt in (A, B)]
    assert not preempted
    without = alone(small, A, plain)
    if block is not plain:
        assert (expected[0][1] - without[1]).abs().max() > 1e-2  # the block has an effect
    got = together(small, block)
    assert preempted
    for (tokens, logits), (right_tokens, right) in zip(got, expected, strict=True):
        assert tokens == right_tokens
        assert (logits - right).abs().max() < 1e-4
    assert not small.vllm_entrypoint.collective_rpc("midstream_live")[0]


@pytest.mark.parametrize("block", [prefill, steering, replacing], ids=lambda f: f.__name__)
def test_without_the_log_the_cache_would_come_out_unedited(
    small: VLLM,
    preempted: list[str],
    monkeypatch: pytest.MonkeyPatch,
    block: Callable[..., Any],
) -> None:
    """The test above sees it if nothing is written again."""
    expected = [alone(small, prompt, block) for prompt in (A, B)]
    interleaver = runner_of(small).blocks.interleaver
    monkeypatch.setattr(interleaver, "_replays", type(interleaver._replays)())
    monkeypatch.setattr(interleaver._replays, "begin", lambda replays: ())
    got = together(small, block)
    assert preempted
    worst = max(
        float((logits - right).abs().max())
        for (_, logits), (_, right) in zip(got, expected, strict=True)
    )
    assert worst > 1e-3


def test_preempted_requests_have_each_row_once(small: VLLM, preempted: list[str]) -> None:
    """Of eight requests of different lengths, half of them preempted, no row is twice or missing.

    (C60, case 30).
    """
    prompts = [LONG[i * 7 :][: 3 + 2 * i] for i in range(8)]
    settings = {"temperature": 0.0, "ignore_eos": True}

    def rows(model: Any, tracer: Any) -> Any:
        return torch.cat([sum(model.model.layers[2].output) for _ in tracer.all()])

    right = [
        small.trace(prompt, block=rows, max_tokens=44 - i, **settings).saves["return"]
        for i, prompt in enumerate(prompts)
    ]
    assert not preempted
    with small.trace(**settings) as tracer:
        for i, prompt in enumerate(prompts):
            with tracer.invoke(prompt, max_tokens=44 - i):
                stream = rows(small, tracer).save()
    assert len(set(preempted)) >= 4
    for i, (got, own) in enumerate(zip(stream, right, strict=True)):
        assert len(own) == len(prompts[i]) + 44 - i - 1
        assert_close(got, own, own.roll(1, 0))


def test_an_edit_of_the_engine_is_written_again(small: VLLM, preempted: list[str]) -> None:
    """Plain requests that run an installed edit come out of a preemption as they do alone."""
    with small.edit() as (tracer, edit):
        for _ in tracer.iter[:]:
            small.model.layers[1].mlp.output[:] *= -3.0
    try:
        expected = [small.generate(prompt, **SETTINGS)[0] for prompt in (A, B)]
        assert not preempted
        got = small.generate([A, B], **SETTINGS)
        assert preempted
    finally:
        edit.clear()
    plain_tokens = small.generate(A, **SETTINGS)[0].outputs[0].token_ids
    assert expected[0].outputs[0].token_ids != plain_tokens
    for output, right in zip(got, expected, strict=True):
        assert output.edit_error is None
        assert output.outputs[0].token_ids == right.outputs[0].token_ids


def test_a_block_that_wrote_more_than_is_kept_fails_if_it_is_preempted() -> None:
    """Its error names the limit; requests that are not preempted, and plain ones, go on."""
    with built(max_write_log_bytes=2000, asynchronous=False) as model:
        right = alone(model, A, steering)[0]
        with pytest.raises(InterventionError, match="max_write_log_bytes=2000"):
            together(model, steering)
        assert alone(model, A, steering)[0] == right
        assert not model.vllm_entrypoint.collective_rpc("midstream_live")[0]


def reading(model: VLLM, prompts: list[list[int]]) -> list[tuple[list[int], list[Any]]]:
    """Tokens of requests whose loops read, and what they have read, its last row in the prompt."""
    layer = model.model.layers[1]
    with model.trace(**SETTINGS) as tracer:
        for prompt in prompts:
            with tracer.invoke(prompt):
                rows = [].save()
                for _ in tracer.iter[:]:
                    rows.append((layer.mlp.output[-1], layer.output))
    lists = rows if len(prompts) > 1 else [rows]
    last = [[(mlp, sum(pair)[-1]) for mlp, pair in each] for each in lists]
    return list(zip(_tokens(tracer.result), last, strict=True))


def editing(model: VLLM, prompts: list[list[int]]) -> list[tuple[list[int], list[Any]]]:
    """Tokens of requests whose loops edit, and what the last norm gives in all steps."""
    vector = torch.linspace(-8, 8, 128)
    with model.trace(**SETTINGS) as tracer:
        for prompt in prompts:
            with tracer.invoke(prompt):
                cache = tracer.cache(modules=[model.model.norm])
                for _ in tracer.iter[:]:
                    model.model.layers[1].output[0][:] += vector
    caches = cache if len(prompts) > 1 else [cache]
    norms = [[pair[0][-1] for pair in each["model.norm"].output] for each in caches]
    return list(zip(_tokens(tracer.result), norms, strict=True))


def _tokens(result: Any) -> list[list[int]]:
    outputs = result if isinstance(result, list) else [result]
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("loop", [reading, editing], ids=lambda f: f.__name__)
def test_loops_that_the_engine_runs(
    small: VLLM, preempted: list[str], loop: Callable[..., Any]
) -> None:
    """What is read and edited in a loop's place is what it is without a preemption."""
    expected = [loop(small, [A])[0], loop(small, [B])[0]]
    assert not preempted
    got = loop(small, [A, B])
    assert preempted
    for (tokens, values), (right_tokens, right) in zip(got, expected, strict=True):
        assert tokens == right_tokens
        assert len(values) == len(right) == STEPS
        torch.testing.assert_close(values, right, atol=1e-4, rtol=1e-4)


def test_a_loop_that_a_stop_token_cuts_short(small: VLLM) -> None:
    """The engine may have planned a step more than there is: it is no turn of the loop."""
    output = small.generate(A, **SETTINGS)[0].outputs[0].token_ids
    stop = next(token for i, token in enumerate(output) if i > 3 and token not in output[:i])
    count = output.index(stop) + 1
    with (
        pytest.warns(StepsCutShortWarning, match=f"{count} steps and .* ran {count - 1} of them"),
        small.trace(A, **{**SETTINGS, "stop_token_ids": [stop]}) as tracer,
    ):
        rows = [].save()
        for _ in tracer.iter[1 : count + 1]:
            rows.append(small.model.layers[1].mlp.output)
    assert len(rows) == count - 1
