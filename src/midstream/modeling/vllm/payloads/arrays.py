"""numpy dtypes as text, in the notation of numpy's own file format."""

from __future__ import annotations

import ast
from typing import Any

import numpy as np


def dtype_text(dtype: np.dtype[Any]) -> str:
    """Write a dtype down.

    Raises:
        ValueError: It holds Python objects, or comes from an extension and would be lost.
    """
    if dtype.hasobject:
        raise ValueError("a numpy array of Python objects")
    text = repr(np.lib.format.dtype_to_descr(dtype))  # type: ignore[no-untyped-call]
    if dtype_of(text) != dtype:
        raise ValueError(f"a numpy array of the extension dtype {dtype}")
    return text


def dtype_of(text: str) -> np.dtype[Any]:
    """Read what `dtype_text` wrote.

    Raises:
        ValueError: The text is no dtype, or one of Python objects (its bytes would be pointers).
    """
    try:
        dtype: np.dtype[Any] = np.lib.format.descr_to_dtype(  # type: ignore[no-untyped-call]
            ast.literal_eval(text)
        )
    except (SyntaxError, TypeError) as error:
        raise ValueError(f"{text!r} is no numpy dtype") from error
    if dtype.hasobject:
        raise ValueError(f"{text!r} is a numpy dtype of Python objects")
    return dtype
