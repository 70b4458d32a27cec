"""Blocks that wait, loop, print and are killed, in an engine process of its own.

It ends inside a block that sleeps; the test kills this process there.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
import time
import warnings
from typing import Any

import psutil

from midstream import VLLM
from midstream.errors import EngineDeadError, InterventionError
from tests.modeling.vllm.scripts.reporting import TINY, engine_processes, reported
from tests.support.checkpoints import A, B, checkpoint

GREEDY: dict[str, Any] = {"temperature": 0.0}


def main() -> None:
    model = VLLM(str(checkpoint("T-LLAMA", with_tokenizer=True)), block_timeout=1.0, **TINY)
    usual = tokens(model)
    printing(model)
    for name, block in {"sleep": sleep, "loop": loop, "stubborn": stubborn}.items():
        too_long(model, name, block, usual)
    counted(model)
    core_killed(model, usual)
    inside_a_block(model)


def tokens(model: Any) -> list[int]:
    with model.trace(B, max_tokens=4, ignore_eos=True, **GREEDY) as tracer:
        read = model.model.layers[2].output[0].save()
    assert read.shape == (len(B), 128)
    return list(tracer.result.outputs[0].token_ids)


def sleep() -> None:
    time.sleep(100)


def loop() -> None:
    while True:
        pass


def stubborn() -> None:
    while True:
        with contextlib.suppress(BaseException):
            time.sleep(100)


def printing(model: Any) -> None:
    """What a block prints and warns about crosses from the engine's process."""
    with reported("printing") as facts:
        out = io.StringIO()
        with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stdout(out):
            warnings.simplefilter("always")
            with model.trace(A, max_tokens=2, **GREEDY):
                import os as there

                print("process", there.getpid())
                warnings.warn("from afar", RuntimeWarning, stacklevel=1)
                model.logits
        facts["text"] = out.getvalue()
        facts["here"] = os.getpid()
        found = [each for each in caught if "from afar" in str(each.message)]
        facts["warnings"] = [[each.category.__name__, each.filename] for each in found]


def too_long(model: Any, name: str, block: Any, usual: list[int]) -> None:
    """A block that takes too long fails, and the engine goes on."""
    before = engine_processes()
    with reported(name) as facts:
        try:
            with model.trace(A, max_tokens=4, **GREEDY):
                model.model.layers[0].output
                block()
        except InterventionError as error:
            facts["text"] = str(error)
    with reported(f"after_{name}") as facts:
        facts["right_after"] = tokens(model) == usual
        facts["same_processes"] = engine_processes() == before
        facts["live"] = model.stats().live_blocks


def counted(model: Any) -> None:
    with reported("stats") as facts:
        stats = model.stats()
        facts["steps"], facts["block_seconds"] = dict(stats.steps), stats.block_seconds
        facts["shared_segments"] = stats.shared_segments


def core_killed(model: Any, usual: list[int]) -> None:
    """The engine core is killed while a block executes."""
    children = psutil.Process(os.getpid()).children()
    [core] = [process for process in children if process in engine_processes()]
    shared = set(os.listdir("/dev/shm"))
    with reported("core_killed") as facts:
        threading.Timer(0.4, core.kill).start()
        try:
            with model.trace(A, max_tokens=4, **GREEDY):
                sleep()
        except EngineDeadError as error:
            facts["text"] = str(error)
        facts["left"] = [str(process) for process in engine_processes()]
        gone = shared.difference(os.listdir("/dev/shm"))
        facts["gone"] = sorted({name.split("_")[0].split("-")[0] for name in gone})
    with reported("after_core_killed") as facts:
        facts["right_after"] = tokens(model) == usual


def inside_a_block(model: Any) -> None:
    with reported("inside") as facts:
        facts["processes"] = [process.pid for process in engine_processes()]
    with model.trace(A, max_tokens=400, ignore_eos=True, **GREEDY) as tracer:
        for _ in tracer.all():
            time.sleep(0.8)


if __name__ == "__main__":
    main()
    sys.exit("not reached")
