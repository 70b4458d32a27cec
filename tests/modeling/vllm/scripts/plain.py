"""A plain `vllm.LLM` in a process in which midstream has had an engine."""

from __future__ import annotations

import inspect
import os
import sys
from importlib import import_module
from types import FunctionType
from typing import Any

from tests.modeling.vllm.scripts.reporting import (
    TINY,
    engine_processes,
    reported,
    shared_memory,
)

PROMPT = [21, 22, 23]
LOADED = (
    "vllm.v1.engine.core",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.worker.gpu.model_runner",
)
"""The parts of vLLM that midstream builds on, loaded before they are looked at."""


def main() -> None:
    importing()
    configure()
    before = state()
    initialised = watch_cuda()
    engine = midstream_engine()
    with reported("afterwards") as facts:
        facts["names"] = len(before)
        facts["changed"] = changes(before, state())
        facts["patched"] = with_a_patch(before)
        facts["cuda"] = initialised
        facts["processes"] = [str(process) for process in engine_processes()]
        facts["shared_memory"] = sorted(set(engine["shared_memory"]) & set(os.listdir("/dev/shm")))
    plain_engine()


def importing() -> None:
    with reported("import") as facts:
        import midstream

        assert midstream.__version__
        facts["heavy"] = [name for name in ("torch", "vllm") if name in sys.modules]


def configure() -> None:
    """Let vLLM make a configuration: on a CPU that alone sets environment variables."""
    from vllm.engine.arg_utils import EngineArgs

    from tests.support.checkpoints import checkpoint

    path = str(checkpoint("T-LLAMA", with_tokenizer=True))
    EngineArgs(path, enforce_eager=True, **TINY).create_engine_config()


def watch_cuda() -> list[str]:
    """Note every attempt to initialise CUDA in this process."""
    import torch

    attempts: list[str] = []
    initialise = torch.cuda._lazy_init

    def noted() -> None:
        attempts.append(str(inspect.stack()[1]))
        initialise()

    torch.cuda._lazy_init = noted
    return attempts


def midstream_engine() -> dict[str, Any]:
    """Build, trace and close."""
    import torch

    from midstream import VLLM
    from tests.support.checkpoints import checkpoint

    with (
        reported("midstream") as facts,
        VLLM(str(checkpoint("T-LLAMA", with_tokenizer=True)), **TINY) as model,
    ):
        with model.trace(PROMPT, temperature=0.0, max_tokens=6, ignore_eos=True) as tracer:
            read = model.logits.save()
        facts["tokens"] = list(tracer.result.outputs[0].token_ids)
        facts["shared_memory"] = shared_memory(engine_processes())
        facts["parts"] = model.vllm_entrypoint.collective_rpc(parts)[0]
        facts["group"] = torch.distributed.is_initialized()
        model.close()
        model.close()
    return facts


def plain_engine() -> None:
    """What vLLM is without midstream."""
    from vllm import LLM, SamplingParams

    from tests.support.checkpoints import checkpoint

    llm = LLM(str(checkpoint("T-LLAMA", with_tokenizer=True)), enforce_eager=True, **TINY)
    with reported("plain") as facts:
        settings = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
        [output] = llm.generate({"prompt_token_ids": PROMPT}, settings, use_tqdm=False)
        facts["tokens"] = list(output.outputs[0].token_ids)
        facts["parts"] = llm.collective_rpc(parts)[0]
        facts["scheduler"] = str(llm.llm_engine.vllm_config.scheduler_config.scheduler_cls)


def parts(worker: Any) -> dict[str, Any]:
    """What an engine's worker process is made of. Sent there by value."""
    import os
    import sys

    runner = worker.model_runner
    return {
        "worker": type(getattr(worker, "worker", worker)).__module__,
        "runner": type(runner).__module__,
        "model": type(runner.model).__module__,
        "midstream": sorted(name for name in sys.modules if name.startswith("midstream")),
        "interpreter": os.environ.get("TRITON_INTERPRET"),
        "path": os.environ.get("PYTHONPATH", ""),
    }


def state() -> dict[str, Any]:
    """What midstream might change in a process: environment, paths, Triton and vLLM's code."""
    import triton.backends

    for name in LOADED:
        import_module(name)
    found: dict[str, Any] = {
        "environment": dict(os.environ),
        "path": list(sys.path),
        "backends": sorted(triton.backends.backends),
    }
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "vllm":
            found |= {f"{name}.{key}": value for key, value in code(vars(module))}
    return found


def code(names: dict[str, Any]) -> list[tuple[str, Any]]:
    """Functions and classes, with the functions of the classes."""
    found: list[tuple[str, Any]] = []
    for key, value in list(names.items()):
        if isinstance(value, FunctionType | type):
            found.append((key, value))
        if isinstance(value, type):
            members = vars(value).items()
            found += [(f"{key}.{k}", v) for k, v in members if isinstance(v, FunctionType)]
    return found


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Names that are not what they were; names that are new do not count."""
    changed = [name for name, value in before.items() if after.get(name) != value]
    return [_detail(name, before[name], after.get(name)) for name in changed]


def with_a_patch(before: dict[str, Any]) -> list[str]:
    """What a patched method of vLLM and one environment variable look like."""
    from unittest import mock

    from vllm.v1.engine.core import EngineCore

    with (
        mock.patch.object(EngineCore, "step"),
        mock.patch.dict(os.environ, X="1"),
    ):
        return changes(before, state())


def _detail(name: str, before: Any, after: Any) -> str:
    if isinstance(before, dict) and isinstance(after, dict):
        keys = sorted(k for k in before.keys() | after.keys() if before.get(k) != after.get(k))
        return f"{name}: {keys}"
    return f"{name}: {before} -> {after}"


if __name__ == "__main__":
    main()
