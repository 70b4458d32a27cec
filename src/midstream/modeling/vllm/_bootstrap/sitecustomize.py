"""Start-up of an engine process on a CPU; on PYTHONPATH only while midstream starts one.

vLLM's current model runner needs Triton with a "cpu" backend, and no wheel has one. Its kernels
are few and small there, so Triton's interpreter runs them. The backend has to be registered
before anything of vLLM is imported.
"""

import importlib.machinery
import importlib.util
import os
import sys

_here = os.path.dirname(os.path.abspath(__file__))


def _chain() -> None:
    """Run the environment's own sitecustomize, which this one hides."""
    path = [entry for entry in sys.path if os.path.abspath(entry) != _here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def _register() -> None:
    spec = importlib.util.spec_from_file_location(
        "_midstream_triton", os.path.join(_here, "triton_cpu.py")
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.register()


os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
_chain()
_register()
