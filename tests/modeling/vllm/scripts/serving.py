"""One model, traced in engine processes through everything that ends a request or an engine.

It ends with a generation that the test interrupts by killing this process.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import torch

from midstream import VLLM
from midstream.errors import EngineBuildError, EngineDeadError
from midstream.modeling.vllm.payloads import segments
from tests.modeling.vllm.scripts.reporting import TINY, engine_processes, reported, shared_memory
from tests.support.checkpoints import EOS, A, B, checkpoint

GREEDY = {"temperature": 0.0}


def main(folder: Path) -> None:
    model = failed_build(folder)
    for scene in (
        ended_by_length, ended_by_eos, ended_by_stop_string, aborted, aborted_before_scheduled,
        results_asked_for, result_of_an_aborted, result_interrupted, recorded,
        two_threads, too_long, interrupted, ended_by_exit, core_killed, generating,
    ):  # fmt: skip
        scene(model)


def failed_build(folder: Path) -> Any:
    """Build on weights cut short, then mend them."""
    good = checkpoint("T-LLAMA", with_tokenizer=True)
    broken = Path(shutil.copytree(good, folder / "checkpoint"))
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    model = VLLM(str(broken), **TINY)
    with reported("failed_build") as facts:
        try:
            model.dispatch()
        except EngineBuildError as error:
            facts["text"] = str(error)
    with reported("after_failed_build") as facts:
        facts["processes"] = [str(process) for process in engine_processes()]
        facts["dispatched"] = model.dispatched
    shutil.copy(good / "model.safetensors", weights)
    return model


# How a request ends.


def ended_by_length(model: Any) -> None:
    with reported("length") as facts:
        with model.trace(A, max_tokens=3, ignore_eos=True, **GREEDY) as tracer:
            read = model.model.layers[1].output[0].save()
        note(facts, tracer, read)


def ended_by_eos(model: Any) -> None:
    with reported("eos") as facts:
        with model.trace(A, max_tokens=8, **GREEDY) as tracer:
            model.logits[:] = -float("inf")
            model.logits[0, EOS] = 0
            read = model.logits.save()
        note(facts, tracer, read)


def ended_by_stop_string(model: Any) -> None:
    with reported("stop") as facts:
        with model.trace(A, max_tokens=20, stop=["t77"], **GREEDY) as tracer:
            model.logits[:] = -float("inf")
            model.logits[0, 77] = 0
            read = model.logits.save()
        note(facts, tracer, read)


def aborted(model: Any) -> None:
    with reported("abort") as facts:
        abort_after(model, 3)
        with model.trace(A, max_tokens=500, ignore_eos=True, **GREEDY) as tracer:
            read = model.model.layers[1].output[0].save()
        note(facts, tracer, read)


def aborted_before_scheduled(model: Any) -> None:
    with reported("abort_at_once") as facts:
        abort_after(model, 0)
        with model.trace(A, max_tokens=500, ignore_eos=True, **GREEDY) as tracer:
            read = model.logits.save()
        facts["result"] = tracer.result
        facts["live"] = live_blocks(model)


def results_asked_for(model: Any) -> None:
    """Requests that end at different steps, by different reasons, three times three sequences."""
    with reported("results") as facts:
        with model.trace(ignore_eos=True, n=3, temperature=1.0, seed=1) as tracer:
            for steps in (2, 6, 4):
                with tracer.invoke(A, max_tokens=steps, stop=["t77"]):
                    if steps == 6:
                        model.logits[:] = -float("inf")
                        model.logits[0, 77] = 0
                    texts = [tracer.result.text, tracer.result.finish_reason].save()
        facts["found"] = texts
        facts["right"] = [[c.text, c.finish_reason] for r in tracer.result for c in r.outputs]
        facts["live"] = live_blocks(model)


def result_of_an_aborted(model: Any) -> None:
    with reported("result_of_an_aborted") as facts:
        abort_after(model, 3)
        try:
            with model.trace(A, max_tokens=500, ignore_eos=True, **GREEDY) as tracer:
                read = model.model.layers[1].output[0].save()
                result = tracer.result.save()
        except RuntimeError as error:
            facts["text"] = str(error)
        facts["shape"], facts["live"] = list(read.shape), live_blocks(model)


def result_interrupted(model: Any) -> None:
    """Ctrl-C while the block waits for its result, and one while it has it."""
    with reported("result_interrupted") as facts:
        interrupt_after(1.0)
        try:
            with model.trace(A, max_tokens=450, ignore_eos=True, **GREEDY) as tracer:
                result = tracer.result.save()
        except KeyboardInterrupt:
            facts["while_waiting"] = live_blocks(model)
        interrupt_after(1.0)
        try:
            with model.trace(A, max_tokens=1, ignore_eos=True, **GREEDY) as tracer:
                result = tracer.result.save()
                time.sleep(2.0)
        except KeyboardInterrupt:
            facts["while_it_runs"] = live_blocks(model)
        facts["right_after"] = len(tokens(model)) == 4


def interrupt_after(seconds: float) -> None:
    threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)).start()


def recorded(model: Any) -> None:
    with reported("recorded") as facts:
        with model.trace(A, max_tokens=3, ignore_eos=True, **GREEDY) as tracer:
            cache = tracer.cache(model.model.layers[1:3])
            model.model.layers[2].skip((torch.ones(len(A), 128), torch.ones(len(A), 128)))
        facts["keys"] = cache.keys()
        facts["shapes"] = [list(hidden.shape) for hidden, _ in cache.model.layers[1].output]
        facts["skipped"] = [bool((h == 1).all()) for h, _ in cache["model.layers.2"].output]


def note(facts: dict[str, Any], tracer: Any, read: Any) -> None:
    """Put down how a request ended and what it brought home."""
    facts["shape"] = list(read.shape)
    if tracer.result is None:
        facts["result"] = None
        return
    [completion] = tracer.result.outputs
    facts["tokens"] = list(completion.token_ids)
    facts["reason"] = completion.finish_reason
    facts["stop_reason"] = completion.stop_reason


def abort_after(model: Any, steps: int) -> None:
    """Abort the next request through vLLM after so many steps."""
    core = model.vllm_entrypoint.llm_engine
    step, left = core.step, iter(range(steps))

    def stepping() -> Any:
        if next(left, None) is not None:
            return step()
        del core.step
        core.abort_request(list(core.output_processor.external_req_ids))
        return []

    core.step = stepping


def live_blocks(model: Any) -> int:
    return sum(model.vllm_entrypoint.collective_rpc("midstream_live"))


def tokens(model: Any, steps: int = 4) -> list[int]:
    """What the engine generates greedily, in a trace that reads."""
    with model.trace(B, max_tokens=steps, ignore_eos=True, **GREEDY) as tracer:
        read = model.model.layers[2].output[0].save()
    assert read.shape == (len(B), 128)
    return list(tracer.result.outputs[0].token_ids)


# What a client does to its engine.


def two_threads(model: Any) -> None:
    with reported("two_threads") as facts:
        facts["expected"] = [tokens(model, 12), tokens(model, 3)] * 3
        with ThreadPoolExecutor(2) as pool:
            facts["found"] = list(pool.map(lambda steps: tokens(model, steps), [12, 3] * 3))


def too_long(model: Any) -> None:
    budget = model.vllm_entrypoint.llm_engine.vllm_config.scheduler_config.max_num_batched_tokens
    with reported("too_long") as facts:
        try:
            with model.trace([3] * (budget + 1), max_tokens=1):
                read = model.logits.save()
        except ValueError as error:
            facts["text"] = str(error)


def interrupted(model: Any) -> None:
    """Ctrl-C as a terminal sends it: to every process of the foreground group."""
    with reported("interrupt") as facts:
        before, processes = tokens(model), engine_processes()
        threading.Timer(1.0, os.killpg, [0, signal.SIGINT]).start()
        try:
            with model.trace(A, max_tokens=500, ignore_eos=True):
                read = model.logits.save()
        except KeyboardInterrupt as error:
            facts["raised"] = type(error).__name__
        facts["live"] = live_blocks(model)
        facts["right_after"] = tokens(model) == before
        facts["same_processes"] = engine_processes() == processes


# How an engine ends.


def ended_by_exit(model: Any) -> None:
    """The block ends the worker's process."""
    before = tokens(model)

    def leaving() -> None:
        with model.trace(A, max_tokens=500):
            leave(1)

    deadly("exit", model, leaving)
    with reported("after_exit") as facts:
        facts["right_after"] = tokens(model) == before


def leave(code: int) -> None:
    os._exit(code)


def core_killed(model: Any) -> None:
    """The engine core is killed while a request runs."""
    before = tokens(model)
    core = psutil.Process(os.getpid()).children()
    [core] = [process for process in core if process in engine_processes()]

    def running() -> None:
        threading.Timer(0.5, core.kill).start()
        with model.trace(A, max_tokens=500, ignore_eos=True):
            read = model.logits.save()

    deadly("core_killed", model, running)
    with reported("after_core_killed") as facts:
        facts["right_after"] = tokens(model) == before


def deadly(name: str, model: Any, trace: Callable[[], None]) -> None:
    """Run a trace that its engine does not survive."""
    with reported(name) as facts:
        try:
            trace()
        except EngineDeadError as error:
            facts["text"] = str(error)
            facts["is_runtime_error"] = isinstance(error, RuntimeError)
            cause = type(error.__cause__)
            facts["cause"] = f"{cause.__module__}.{cause.__name__}"
        facts["dispatched"] = model.dispatched
        facts["left"] = [str(process) for process in engine_processes()]


def generating(model: Any) -> None:
    """Generate until killed, with a segment of shared memory that nobody has received."""
    segment = segments.write([memoryview(bytes(1000))], model._engine._owner)
    with reported("generating") as facts:
        facts["processes"] = [process.pid for process in engine_processes()]
        facts["segment"] = str(segments.folder() / segment.name)
        facts["shared_memory"] = shared_memory(engine_processes())
    while True:
        tokens(model, 400)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
