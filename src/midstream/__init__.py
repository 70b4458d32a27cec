"""Read and edit a language model mid-forward, while vLLM serves it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from midstream import errors
from midstream._version import __version__
from midstream.tracing.saves import save

if TYPE_CHECKING:
    from midstream.modeling.vllm import VLLM

__all__ = ["VLLM", "__version__", "errors", "save"]


def __getattr__(name: str) -> Any:
    """Import models when they are first used: they need PyTorch and an engine."""
    if name == "VLLM":
        from midstream.modeling.vllm import VLLM

        return VLLM
    raise AttributeError(f"module 'midstream' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
