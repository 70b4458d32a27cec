"""Start-up of an engine process on a CPU; on PYTHONPATH only while midstream starts one.

vLLM's current model runner needs Triton with a "cpu" backend, and no wheel has one. Its kernels
are few and small there, so Triton's interpreter runs them. The backend has to be registered
before anything of vLLM is imported. That import takes long, so the client is followed from here
on. Other Python processes that find this file run what it hides, and nothing else.
"""

import importlib.machinery
import importlib.util
import os
import sys
import types

_here = os.path.dirname(os.path.abspath(__file__))


def _chain() -> None:
    """Run the environment's own sitecustomize, which this one hides."""
    path = [entry for entry in sys.path if os.path.abspath(entry) != _here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def _load(name: str) -> types.ModuleType:
    """Import a neighbour without importing midstream, which would import PyTorch."""
    full = f"midstream.modeling.vllm._bootstrap.{name}"
    spec = importlib.util.spec_from_file_location(full, os.path.join(_here, f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[full] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


try:
    _chain()
finally:
    if "--multiprocessing-fork" in sys.orig_argv:  # as `multiprocessing` starts its processes
        _load("follow").follow()
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
        _load("triton_cpu").register()
