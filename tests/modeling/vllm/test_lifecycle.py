"""Requests end in every way there is, with the engine in this process."""

from __future__ import annotations

import gc
import json
import os
import re
import shutil
import signal
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from midstream import VLLM
from midstream.errors import EngineBuildError, EngineDeadError, InterventionError
from tests.conftest import TINY
from tests.support.checkpoints import EOS, A, B, checkpoint

GREEDY = {"temperature": 0.0}


@pytest.fixture(scope="module", params=["synchronous", "asynchronous"])
def model(request: pytest.FixtureRequest, llama: Any) -> Iterator[Any]:
    """An engine under either of vLLM's two ways of scheduling."""
    if request.param == "synchronous":
        yield llama
        return
    with VLLM(str(llama.repo), **TINY) as own:
        with pytest.MonkeyPatch.context() as patch:
            schedule_asynchronously(patch)
            own.dispatch()
        assert own.vllm_entrypoint.llm_engine.engine_core.engine_core.batch_queue is not None
        yield own


def schedule_asynchronously(patch: pytest.MonkeyPatch) -> None:
    """Turn asynchronous scheduling on, which vLLM's platform check turns off on a CPU."""
    from vllm.engine.arg_utils import EngineArgs

    create = EngineArgs.create_engine_config

    def asynchronous(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = create(self, *args, **kwargs)
        config.scheduler_config.async_scheduling = True
        return config

    patch.setattr(EngineArgs, "create_engine_config", asynchronous)


def test_length(model: Any) -> None:
    """A request that ends by length brings its saves home."""
    with model.trace(A, max_tokens=3, ignore_eos=True, **GREEDY) as tracer:
        read = model.model.layers[1].output[0].save()
    assert read.shape == (5, 128)
    [completion] = tracer.result.outputs
    assert (completion.finish_reason, len(completion.token_ids)) == ("length", 3)


def test_eos(model: Any) -> None:
    """A request that ends by the end-of-sequence token brings its saves home."""
    with model.trace(A, max_tokens=8, **GREEDY) as tracer:
        model.logits[:] = -float("inf")
        model.logits[0, EOS] = 0
        read = model.logits.save()
    assert int(read.argmax()) == EOS
    [completion] = tracer.result.outputs
    assert (completion.finish_reason, list(completion.token_ids)) == ("stop", [EOS])


@pytest.mark.parametrize("how", ["stop", "fail"])
def test_an_edit_ends_with_its_request(model: Any, how: str) -> None:
    """Where a block ends the request, an edit beside it sees no step after that one (O9).

    Neither does a cache of it. Asynchronous scheduling has planned that step already.
    """
    with model.edit() as (editing, edit):
        steps, cache = [].save(), editing.cache("model.layers.1.mlp")
        for step in editing.all():
            steps.append((step, len(model.model.layers[0].output[0])))
    try:
        with model.trace(A, max_tokens=6, ignore_eos=True, **GREEDY) as tracer:
            for step in tracer.all():
                model.samples
                if step == 2:
                    if how == "fail":
                        raise ValueError(how)
                    tracer.stop()
    except InterventionError as error:
        assert how in str(error)  # noqa: PT017  # one of two kinds ends without an error
    finally:
        edit.clear()
    assert len(tracer.result.outputs[0].token_ids) == 3
    saves = tracer.result.saves
    assert saves["steps"] == [(0, 5), (1, 1), (2, 1)]
    assert len(saves["cache"]["model.layers.1.mlp"].output) == 3


def test_stop_string(model: Any) -> None:
    """A stop string ends a request in the client; the saves come home all the same (C38)."""
    with model.trace(A, max_tokens=20, stop=["t77"], **GREEDY) as tracer:
        model.logits[:] = -float("inf")
        model.logits[0, 77] = 0
        read = model.logits.save()
    assert int(read.argmax()) == 77
    [completion] = tracer.result.outputs
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "t77")


@pytest.mark.parametrize("steps", [1, 4])
def test_abort(model: Any, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An aborted request brings its saves home and has no result."""
    abort_after(model, steps, monkeypatch)
    with model.trace(A, max_tokens=200, ignore_eos=True, **GREEDY) as tracer:
        read = model.model.layers[1].output[0].save()
    assert read.shape == (5, 128)
    assert tracer.result is None
    assert live_blocks(model) == 0


@pytest.mark.parametrize("how", ["eos", "stop string", "length", "abort"])
def test_loop_ends_with_its_request(model: Any, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However a request ends, a loop over its steps ends with it, and what follows is run.

    (O8, C56, C58).
    """
    if how == "abort":
        abort_after(model, 5, monkeypatch)
    forced = {"eos": EOS, "stop string": 77}.get(how, 50)
    settings = {**GREEDY, "max_tokens": 3 if how == "length" else 10}
    with model.trace(A, stop=["t77"], **settings) as tracer:
        seen = []
        for step in tracer.all():
            model.logits[:] = -float("inf")
            model.logits[0, forced if step == 2 else 40 + step] = 0
            seen.append(int(model.samples))
        seen.save()
        after = len(seen).save()
    assert seen[:3] == [40, 41, forced]
    assert after == len(seen)
    if how == "abort":
        assert tracer.result is None
    else:
        assert list(tracer.result.outputs[0].token_ids) == seen[:3]
    if how in ("eos", "length"):  # who ends it otherwise may be a step or two behind the engine
        assert len(seen) == 3
    assert live_blocks(model) == 0


def test_abort_before_scheduled(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request aborted before its first step ends its trace, without result or saves."""
    abort_after(model, 0, monkeypatch)
    with model.trace(A, max_tokens=5, **GREEDY) as tracer:
        read = model.model.layers[1].output[0].save()
    assert tracer.result is None
    assert tracer.saves == {}
    assert live_blocks(model) == 0


def abort_after(model: Any, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Abort the running request through vLLM after so many steps."""
    core = model.vllm_entrypoint.llm_engine
    step, done = core.step, iter(range(steps))

    def stepping() -> Any:
        outputs = step() if next(done, None) is not None else None
        if outputs is None:
            monkeypatch.undo()
            core.abort_request(list(core.output_processor.external_req_ids))
        return outputs or []

    monkeypatch.setattr(core, "step", stepping)


def live_blocks(model: Any) -> int:
    """How many blocks the engine's workers hold."""
    return sum(model.vllm_entrypoint.collective_rpc("midstream_live"))


def tokens(model: Any, steps: int = 4) -> list[int]:
    """What the engine generates greedily, in a trace that reads."""
    with model.trace(B, max_tokens=steps, ignore_eos=True, **GREEDY) as tracer:
        read = model.model.layers[2].output[0].save()
    assert read.shape == (len(B), 128)
    return list(tracer.result.outputs[0].token_ids)


def test_two_threads(llama: Any) -> None:
    """Traces of two threads on one engine wait for each other, and both are right (O13)."""
    expected = {steps: tokens(llama, steps) for steps in (3, 12)}
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda steps: (steps, tokens(llama, steps)), [12, 3] * 4))
    assert found == [(steps, expected[steps]) for steps in [12, 3] * 4]


def test_prompt_over_the_budget(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that does not fit a step is refused before the engine hears of it (O4, G50)."""
    core = llama.vllm_entrypoint.llm_engine
    monkeypatch.setattr(core, "add_request", lambda *args, **kwargs: pytest.fail("submitted"))
    budget = core.vllm_config.scheduler_config.max_num_batched_tokens
    with (
        pytest.raises(ValueError, match=rf"{budget + 1} tokens.*{budget}.*max_num_batched_tokens="),
        llama.trace([3] * (budget + 1), max_tokens=1),
    ):
        read = llama.logits.save()


# Several engines in this process.


def test_closing_one_of_two(llama: Any) -> None:
    """Two engines work side by side; closing one leaves the other right (O13, A20, case 57)."""
    before = tokens(llama)
    with VLLM(str(checkpoint("T-QWEN3")), skip_tokenizer_init=True, **TINY) as second:
        first = tokens(second)
        assert first != before
        assert tokens(llama) == before
        assert tokens(second) == first
    assert not second.dispatched
    assert tokens(llama) == before
    assert tokens(second) == first  # builds a new engine
    second.close()
    second.close()


def test_dropping_one_of_two(llama: Any) -> None:
    """An engine that is dropped without being closed takes nothing from another."""
    before = tokens(llama)
    second = VLLM(str(llama.repo), dispatch=True, **TINY)
    core = weakref.ref(engine_core(second))
    del second
    gc.unfreeze()  # vLLM has frozen what lived when the engine was built
    gc.collect()  # ends the engine
    gc.collect()  # frees its core, which refers to itself
    assert core() is None
    assert tokens(llama) == before


def test_memory_comes_back(llama: Any) -> None:
    """A closed engine leaves neither weights nor KV cache, even where vLLM's object is kept.

    (O13, A19, case 57).
    """
    model = VLLM(str(llama.repo), dispatch=True, **TINY)
    tokens(model)
    runner = engine_core(model).model_executor.driver_worker.worker.model_runner
    for cache in runner.kv_caches:
        cache.fill_(1.0)  # memory is taken when it is first written
    held = [weakref.ref(runner.model), *map(weakref.ref, runner.kv_caches)]
    del runner, cache
    full = psutil.Process().memory_info().rss
    kept = model.vllm_entrypoint
    model.close()
    assert [reference() for reference in held] == [None] * len(held)
    freed = full - psutil.Process().memory_info().rss
    assert freed > 0.75 * TINY["kv_cache_memory_bytes"]
    assert kept.llm_engine is not None


def engine_core(model: Any) -> Any:
    """The core of an engine in this process."""
    return model.vllm_entrypoint.llm_engine.engine_core.engine_core


# Ctrl-C.


def test_interrupt_while_generating(model: Any) -> None:
    """Ctrl-C reaches the caller, ends the request, and leaves the engine right (O13)."""
    before = tokens(model)
    core = engine_core(model)
    threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt), model.trace(A, max_tokens=400, ignore_eos=True):
        read = model.logits.save()
    assert engine_core(model) is core
    assert not core.scheduler.has_requests()
    assert live_blocks(model) == 0
    assert tokens(model) == before


def test_interrupt_inside_a_step(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the middle of a step waits for its end: half a step would break the engine."""
    before = tokens(model)
    core = engine_core(model)
    executor = core.model_executor
    sample = executor.sample_tokens

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return sample(*args, **kwargs)

    monkeypatch.setattr(executor, "sample_tokens", interrupted)
    with pytest.raises(KeyboardInterrupt), model.trace(A, max_tokens=400, ignore_eos=True):
        read = model.logits.save()
    monkeypatch.undo()
    assert engine_core(model) is core
    assert live_blocks(model) == 0
    assert tokens(model) == before


def test_interrupt_inside_a_block(model: Any) -> None:
    """Ctrl-C while a block runs interrupts the block, and reaches the caller as itself."""
    before = tokens(model)
    core = engine_core(model)
    with pytest.raises(KeyboardInterrupt), model.trace(A, max_tokens=400, ignore_eos=True):
        interrupted_for_ever()
    assert engine_core(model) is core
    assert live_blocks(model) == 0
    assert tokens(model) == before


def interrupted_for_ever() -> None:
    """Raise Ctrl-C, and wait for what it does."""
    signal.raise_signal(signal.SIGINT)
    while True:
        pass


def test_interrupt_twice(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second Ctrl-C does not wait for a step; that engine is given up, the next trace has one."""
    with VLLM(str(llama.repo), dispatch=True, **TINY) as model:
        core = weakref.ref(engine_core(model))

        def hung(*args: Any, **kwargs: Any) -> Any:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

        engine_core(model).model_executor.execute_model = hung
        with pytest.raises(KeyboardInterrupt), model.trace(A, max_tokens=4):
            read = model.logits.save()
        assert not model.dispatched
        assert tokens(model) == tokens(llama)
        assert engine_core(model) is not core()


def test_failed_step(llama: Any) -> None:
    """An engine that fails in this process is given up; the next trace builds a new one (O10)."""
    with VLLM(str(llama.repo), dispatch=True, **TINY) as model:

        def failing(*args: Any, **kwargs: Any) -> Any:
            raise OSError("no device")

        engine_core(model).model_executor.execute_model = failing
        with pytest.raises(EngineDeadError) as caught, model.trace(A, max_tokens=4):
            read = model.logits.save()
        assert isinstance(caught.value, RuntimeError)
        assert isinstance(caught.value.__cause__, OSError)
        assert not model.dispatched
        assert tokens(model) == tokens(llama)


# Builds that fail.


def test_too_little_cache(llama: Any) -> None:
    """A build that fails says why, and a good one afterwards works (O12, G14)."""
    with pytest.raises(
        EngineBuildError, match="ValueError: No available memory for the cache blocks"
    ):
        VLLM(str(llama.repo), dispatch=True, **{**TINY, "kv_cache_memory_bytes": 1 << 16})
    with VLLM(str(llama.repo), **TINY) as model:
        assert tokens(model) == tokens(llama)


def test_corrupt_weights(llama: Any, tmp_path: Path) -> None:
    """Weights that cannot be read are named as the cause of a failed build (O12, G16)."""
    with VLLM(str(corrupted(llama.repo, tmp_path)), **TINY) as model:
        with pytest.raises(EngineBuildError, match=r"SafetensorError: "):
            model.dispatch()
        assert not model.dispatched


def test_unknown_architecture(tmp_path: Path) -> None:
    """An architecture vLLM does not know fails at construction, with vLLM's own words (G16)."""
    config = {"model_type": "llama", "architectures": ["NobodyForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(EngineBuildError, match=r"Error: [\s\S]*NobodyForCausalLM.*not supported"):
        VLLM(str(tmp_path), skip_tokenizer_init=True, **TINY)


def test_missing_checkpoint(tmp_path: Path) -> None:
    """A folder without a checkpoint fails at construction (G16)."""
    with pytest.raises(EngineBuildError, match=re.escape(str(tmp_path / "nothing"))):
        VLLM(str(tmp_path / "nothing"), **TINY)


def corrupted(repo: str | Path, folder: Path) -> Path:
    """A copy of a checkpoint whose weights are cut short."""
    copy = Path(shutil.copytree(repo, folder / "corrupted"))
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    return copy
