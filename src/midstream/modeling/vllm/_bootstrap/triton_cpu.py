"""Registers a "cpu" backend with Triton, for its interpreter. Imports nothing of midstream."""

import os
import types

INTERPRETER = {
    "TRITON_INTERPRET": "1",  # Triton runs its kernels in Python
    "TORCHDYNAMO_DISABLE": "1",  # inductor would ask the stub driver for a target
}


class _Driver:
    """Says that it is active; the interpreter asks it for nothing else."""

    @staticmethod
    def is_active() -> bool:
        return True


def register() -> None:
    """Add the backend, unless there is one, and select the interpreter; without Triton, nothing."""
    try:
        import triton.backends
    except ImportError:
        return
    os.environ.update(INTERPRETER)
    backends = triton.backends.backends
    backends.setdefault("cpu", types.SimpleNamespace(driver=_Driver, compiler=None))
