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
    """Select the interpreter and add the backend, unless there is one; without Triton, nothing.

    Triton decides at its import which of its functions are interpreted, so this comes first.
    """
    os.environ.update(INTERPRETER)
    try:
        import triton.backends
    except ImportError:
        return
    backends = triton.backends.backends
    backends.setdefault("cpu", types.SimpleNamespace(driver=_Driver, compiler=None))
