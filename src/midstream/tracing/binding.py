"""Pushing results into the scope of the code that asked for them."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping
from inspect import CO_OPTIMIZED
from types import FrameType
from typing import Any

from midstream.tracing.names import Home, home

__all__ = ["bind"]


def bind(frame: FrameType, values: Mapping[str, Any]) -> None:
    """Assign each value to its name as a statement in the frame's code would.

    Local variables, also those shared with nested functions, names declared `global` (or `nonlocal`
    in a class body), and the names of a module or class body. A function cannot gain a local
    variable it has no statement for: such a name becomes a global of its module.
    """
    local: dict[str, Any] = {}
    for name, value in values.items():
        where = home(frame.f_code, name)
        if where is Home.LOCAL:
            local[name] = value
        elif where is Home.ENCLOSING and frame.f_back is not None:
            bind(frame.f_back, {name: value})
        else:
            frame.f_globals[name] = value
    if local:
        _bind_local(frame, local)


def _bind_local(frame: FrameType, values: Mapping[str, Any]) -> None:
    # Item by item: a class body may run in any mapping that its metaclass prepared.
    names = frame.f_locals
    for name, value in values.items():
        names[name] = value
    if sys.version_info < (3, 13) and frame.f_code.co_flags & CO_OPTIMIZED:
        # Up to 3.12 `f_locals` of a function is a copy; this writes it back, cells included.
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
