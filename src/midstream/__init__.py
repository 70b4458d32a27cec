"""Read and edit a language model mid-forward, while vLLM serves it, and on HuggingFace."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from midstream import errors
from midstream._version import __version__
from midstream.tracing.saves import save

if TYPE_CHECKING:
    from midstream.modeling.base import Model
    from midstream.modeling.transformers import TransformersModel
    from midstream.modeling.vllm import VLLM

__all__ = ["VLLM", "Model", "TransformersModel", "__version__", "errors", "save"]

_MODELS = {
    "Model": "midstream.modeling.base",
    "TransformersModel": "midstream.modeling.transformers",
    "VLLM": "midstream.modeling.vllm",
}


def __getattr__(name: str) -> Any:
    """Import models when they are first used: they need PyTorch, transformers or an engine."""
    if name in _MODELS:
        return getattr(import_module(_MODELS[name]), name)
    raise AttributeError(f"module 'midstream' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
