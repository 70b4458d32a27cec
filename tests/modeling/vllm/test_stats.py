"""`model.stats()`: what an engine has done and what it holds."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest

from midstream import VLLM
from midstream.modeling.vllm.engine import statistics
from midstream.modeling.vllm.engine.statistics import EAGER, TAPPED, VANILLA, Statistics
from midstream.modeling.vllm.payloads import segments
from midstream.modeling.vllm.stats import Stats
from tests.modeling.vllm.conftest import plain_tokens, runner_of
from tests.support.checkpoints import A, B, checkpoint

SETTINGS: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


def since(before: Stats, after: Stats) -> tuple[dict[str, int], dict[str, int]]:
    """Steps and reasons that came in between; those without any are left out."""
    steps = Counter(after.steps)
    steps.subtract(before.steps)
    reasons = Counter(after.eager_reasons)
    reasons.subtract(before.eager_reasons)
    return +steps, +reasons


def test_without_an_engine_all_is_zero() -> None:
    """Asking builds no engine."""
    model = VLLM(str(checkpoint("T-LLAMA", with_tokenizer=True)))
    assert model.stats() == Stats({VANILLA: 0, TAPPED: 0, EAGER: 0}, {}, {}, 0.0, 0, 0, 0)
    assert not model.dispatched


def test_plain_steps_are_vanilla(llama: Any) -> None:
    """A request without a block runs vLLM's code as it stands."""
    before = llama.stats()
    plain_tokens(llama, max_tokens=5, ignore_eos=True)
    assert since(before, llama.stats()) == ({VANILLA: 5}, {})


def test_eager_steps_have_a_reason(llama: Any) -> None:
    """Only the steps in which a block is inside the forward are eager."""
    before = llama.stats()
    with llama.trace(A, max_tokens=5, **SETTINGS) as tracer:
        llama.model.layers[0].output
        for _ in tracer.iter[2:4]:
            llama.model.layers[1].mlp.input
            llama.logits
    reasons = {
        "a block waits for model.model.layers.0.output": 1,
        "a block waits for model.model.layers.1.mlp.input": 2,
    }
    assert since(before, llama.stats()) == ({VANILLA: 2, EAGER: 3}, reasons)


def test_logits_leave_a_step_vanilla(llama: Any) -> None:
    """A block that waits for what comes behind the forward does not change it."""
    before = llama.stats()
    with llama.trace(A, max_tokens=3, **SETTINGS) as tracer:
        for _ in tracer.iter[:3]:
            llama.logits
    assert since(before, llama.stats()) == ({VANILLA: 3}, {})


def test_time_in_blocks(llama: Any) -> None:
    """Seconds that blocks take add up, whatever the model takes."""
    before = llama.stats().block_seconds
    with llama.trace(A, max_tokens=1, **SETTINGS):
        time.sleep(0.2)
    taken = llama.stats().block_seconds - before
    assert 0.2 <= taken < 1.0


def test_what_is_held(llama: Any) -> None:
    """Blocks, caches and shared memory count as long as they are there."""
    held = []
    runner = runner_of(llama)
    blocks, sample = runner.blocks, runner.sample_tokens

    def looking(*args: Any, **kwargs: Any) -> Any:
        held.append((len(blocks), blocks.live_caches))
        return sample(*args, **kwargs)

    runner.sample_tokens = looking
    try:
        with llama.trace(max_tokens=2, **SETTINGS) as tracer:
            with tracer.invoke(A):
                cache = tracer.cache(modules=["model.layers.0"]).save()
            with tracer.invoke(B):
                llama.logits
    finally:
        del runner.sample_tokens
    assert (2, 1) in held
    assert len(cache) == 1
    segment = segments.write([memoryview(bytes(1000))], llama._engine._owner)
    assert llama.stats().shared_segments == 1
    segments.discard(llama._engine._owner)
    after = llama.stats()
    assert (after.live_blocks, after.live_caches, after.shared_segments) == (0, 0, 0)


def test_asking_is_cheap(llama: Any) -> None:
    """It takes about as long as a call of a function in the worker."""
    begun = time.perf_counter()
    for _ in range(20):
        llama.stats()
    assert (time.perf_counter() - begun) / 20 < 0.02


def test_reasons_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that runs for long does not collect names without end."""
    monkeypatch.setattr(statistics, "_MOST_REASONS", 2)
    counts = Statistics()
    for name in ("a", "b", "c", "a", "d"):
        counts.count([name, "x"])
    counts.count([])
    assert counts.steps == {EAGER: 5, VANILLA: 1, TAPPED: 0}
    assert counts.reasons == {
        "a block waits for a": 2,
        "a block waits for b": 1,
        "a block waits for another location": 2,
    }
