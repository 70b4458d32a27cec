"""`dtype` by the name of a quantisation: transformers' own configuration for it."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_BITSANDBYTES = ("bitsandbytes", "accelerate")
_NEEDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "nf4": _BITSANDBYTES,
        "fp4": _BITSANDBYTES,
        "int4": _BITSANDBYTES,
        "4bit": _BITSANDBYTES,
        "int8": _BITSANDBYTES,
        "8bit": _BITSANDBYTES,
        "fp8": ("accelerate",),
    }
)
"""Names of quantisations, each with the packages that it needs."""


def is_quantisation(dtype: Any) -> bool:
    """Whether a `dtype` names a quantisation."""
    return isinstance(dtype, str) and dtype in _NEEDS


def check_dtype(dtype: Any) -> None:
    """Check a `dtype` before anything is read.

    Raises:
        ValueError: neither a `torch.dtype`, nor the name of one, nor of a quantisation.
        ImportError: a quantisation whose package is not installed.
    """
    import torch

    if dtype is None or dtype == "auto" or isinstance(dtype, torch.dtype | dict):
        return
    if is_quantisation(dtype):
        _check_installed(dtype)
        return
    found = getattr(torch, str(dtype).removeprefix("torch."), None)
    if type(found) is not torch.dtype:
        raise ValueError(
            f"dtype={dtype!r}: expected 'auto', a torch.dtype or its name, such as 'bfloat16', or "
            f"a quantisation: {', '.join(_NEEDS)}."
        )


def quantisation_config(dtype: str) -> Any:
    """The `quantization_config` of transformers that a name stands for.

    "nf4" (also "int4", "4bit") and "fp4" keep weights in 4 bits and compute in bfloat16, "int8"
    (also "8bit") keeps them in 8 bits, all with bitsandbytes; "fp8" is transformers' own, in
    blocks of 128 by 128, on a GPU.
    """
    import torch
    import transformers

    if dtype == "fp8":
        return transformers.FineGrainedFP8Config()
    if dtype in ("int8", "8bit"):
        return transformers.BitsAndBytesConfig(load_in_8bit=True)
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="fp4" if dtype == "fp4" else "nf4",
        bnb_4bit_compute_dtype=torch.bfloat16,
    )


def _check_installed(dtype: str) -> None:
    missing = [name for name in _NEEDS[dtype] if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(
            f"dtype={dtype!r} needs {' and '.join(missing)}: pip install {' '.join(missing)}."
        )
