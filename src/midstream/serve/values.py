"""Saved values as JSON, for clients that are not written in Python."""

from __future__ import annotations

import base64
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

_DEEPEST = 64
_LONGEST = 14_000  # bits of a whole number; Python writes none out that is much longer


def plain(value: Any, depth: int = 0) -> Any:
    """A value as JSON can hold it.

    Numbers, text, lists and mappings stay what they are; a tensor or array becomes
    ``{"dtype", "shape", "data"}`` with its bytes, row by row and little-endian, in base64; what
    else there is becomes ``{"repr"}``, its text.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value if value.bit_length() < _LONGEST else {"repr": hex(value)[:10_000]}
    if isinstance(value, str):
        return value if text(value) == value else {"repr": ascii(value)}
    if isinstance(value, float):
        return value if math.isfinite(value) else {"repr": repr(value)}
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        return _array(np.asarray(value))
    if depth >= _DEEPEST:
        return {"repr": "..."}
    if isinstance(value, Mapping):
        return {_told(str, key): plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item, depth + 1) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return {name: plain(getattr(value, name, None), depth + 1) for name in names}
    return {"repr": _told(repr, value)[:10_000]}


def text(value: str) -> str:
    """A text as JSON can hold it: characters that UTF-8 has not become their escapes."""
    return value.encode("utf-8", "backslashreplace").decode()


def _told(how: Callable[[Any], str], value: Any) -> str:
    """The text of a value; numbers in it may be too long for Python to write out."""
    try:
        return text(how(value))
    except ValueError:
        return hex(value) if isinstance(value, int) else f"<{type(value).__name__}>"


def _tensor(value: torch.Tensor) -> dict[str, Any]:
    flat = value.detach().cpu().contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return {
        "dtype": str(value.dtype).removeprefix("torch."),
        "shape": list(value.shape),
        "data": base64.b64encode(data).decode(),
    }


def _array(value: np.ndarray[Any, Any]) -> dict[str, Any]:
    return {
        "dtype": value.dtype.name,
        "shape": list(value.shape),
        "data": base64.b64encode(np.ascontiguousarray(value).tobytes()).decode(),
    }
