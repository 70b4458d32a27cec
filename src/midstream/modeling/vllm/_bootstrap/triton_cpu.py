"""Registers a "cpu" backend with Triton, for its interpreter. Imports nothing of midstream."""

import types


class _Driver:
    """Says that it is active; the interpreter asks it for nothing else."""

    @staticmethod
    def is_active() -> bool:
        return True


def register() -> None:
    """Add the backend, unless there is one; without Triton, do nothing."""
    try:
        import triton.backends
    except ImportError:
        return
    backends = triton.backends.backends
    backends.setdefault("cpu", types.SimpleNamespace(driver=_Driver, compiler=None))
