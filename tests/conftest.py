"""Engines that tests share: one at a time in this process, each built once."""

from __future__ import annotations

import os
import signal

# The engine runs in this process, where a step can be stepped and its worker looked at. Tests of
# engine processes start their own Python. Both have to be set before vLLM is imported.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# On tiny models threads only wait for each other: several times as long where cores are shared.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import checkpoint
from tests.support.mirrors import mirror_everything

# A run that was started in the background inherits Ctrl-C as ignored, and so would every process
# that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

TINY = {
    "dtype": "float32",
    "max_model_len": 512,
    "block_size": 32,  # the CPU's attention takes multiples of 32
    "max_num_seqs": 8,
    "kv_cache_memory_bytes": 1 << 28,
}
"""Engine arguments that keep an engine small and exact."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Other ways of the shared engines, in which every test has to hold too.

    `--tapped`: decode steps with blocks run as recorded forwards, as graphs do on a GPU.
    `--ranks 2`: they are tensor parallel.
    `--mirrored`: whatever blocks read and caches record is sent home while the steps run.
    """
    parser.addoption("--ranks", type=int, default=1, help="tensor_parallel_size of the engines")
    parser.addoption("--tapped", action="store_true", help="record steps of the shared engines")
    parser.addoption("--mirrored", action="store_true", help="send copies home at once")


@pytest.fixture(scope="session")
def engine(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """Give engines on the tiny checkpoints by name, each built once; all close at the end."""
    from midstream import VLLM

    built: dict[str, Any] = {}

    def get(name: str) -> Any:
        if name not in built:
            path = checkpoint(name, with_tokenizer=True)
            ranks = request.config.getoption("--ranks")
            built[name] = VLLM(str(path), dispatch=True, tensor_parallel_size=ranks, **TINY)
            if request.config.getoption("--tapped"):
                record_steps(built[name])
            if request.config.getoption("--mirrored"):
                mirror_everything(built[name])
        return built[name]

    yield get
    for model in built.values():
        model.close()


def record_steps(model: Any) -> None:
    """Have an engine in this process record the forwards of steps whose locations are known."""
    from tests.support.recorders import PlainGraphs

    core = model.vllm_entrypoint.llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.model_runner
    runner.keep_graphs(PlainGraphs())
    if model.taps:
        runner.graphs.capture_all()


@pytest.fixture(scope="session")
def llama(engine: Callable[..., Any]) -> Any:
    """The engine on T-LLAMA."""
    return engine("T-LLAMA")


@pytest.fixture(scope="session")
def demo_path() -> Path:
    """Folder of the demo model, SmolLM2-135M-Instruct in fp32."""
    from midstream.demo import demo_model

    return demo_model()


@pytest.fixture(scope="session")
def demo_engine(demo_path: Path) -> Iterator[Any]:
    """An engine on the demo model in fp32."""
    from midstream import VLLM

    model = VLLM(
        str(demo_path),
        dispatch=True,
        dtype="float32",
        max_model_len=512,
        kv_cache_memory_bytes=1 << 29,
    )
    yield model
    type(model).close(model)
