"""Warnings about what a block keeps under no name, and so cannot give back."""

from __future__ import annotations

import warnings
from types import FrameType, ModuleType
from typing import Any

from midstream.errors import UnboundSaveWarning
from midstream.tracing.block import Block, Code, Compiled
from midstream.tracing.names import resolve
from midstream.tracing.saves import save
from midstream.tracing.sources import BLOCK_NAME

__all__ = ["warn_bare_caches", "warn_bare_saves"]


def warn_bare_saves(frame: FrameType, code: Code, compiled: Compiled) -> None:
    """Warn about saves that no name holds, at their lines.

    Args:
        frame: the frame that the block stands in.
        code, compiled: the block.
    """
    if not compiled.bare_saves and not compiled.bare_calls:
        return
    owners = resolve(frame, {name for name, _ in compiled.bare_calls})
    calls = [line for name, line in compiled.bare_calls if _is_ours(owners.get(name))]
    for line in sorted({*compiled.bare_saves, *calls}):
        _warn(
            frame,
            code,
            line,
            "this save is bound to no name, so its value cannot come back: write "
            "`name = value.save()`, or save the list or dict that collects the values",
        )


def warn_bare_caches(frame: FrameType, block: Block, kind: type) -> None:
    """Warn about `tracer.cache(...)` as a statement of its own, at its line.

    Args:
        frame: the frame that the block stands in.
        block: captured there.
        kind: class of what is a tracer.
    """
    if block.code is None:
        return
    for call in block.code.compiled().calls:
        is_cache = call.method == "cache" and isinstance(block.values.get(call.name), kind)
        if is_cache and call.is_bare:
            _warn(
                frame,
                block.code,
                call.line,
                "this cache is bound to no name, so nothing is recorded and nothing comes back: "
                f"write `cache = {call.name}.cache(...)`",
            )


def _warn(frame: FrameType, code: Code, line: int, message: str) -> None:
    if BLOCK_NAME in frame.f_globals:
        return  # a trace inside a block: the block's own capture has warned
    warnings.warn_explicit(
        message,
        UnboundSaveWarning,
        code.filename,
        line,
        module=frame.f_globals.get("__name__", "<unknown>"),
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )


def _is_ours(owner: Any) -> bool:
    if isinstance(owner, ModuleType):
        owner = getattr(owner, "save", None)
    return owner is save
