"""Which calls belong to which mode of a model, and what to write in the other one."""

from __future__ import annotations

import asyncio

from midstream.errors import UnsupportedError


def sync_only(mode: str, call: str, instead: str) -> None:
    """Refuse a call that would keep an event loop waiting.

    Raises:
        UnsupportedError: the model is asynchronous.
    """
    if mode == "async":
        raise UnsupportedError(
            f"`{call}` waits for the engine, and this model serves an event loop (mode='async'), "
            f"which must not wait. Write `{instead}`."
        )


def async_only(mode: str, call: str, instead: str) -> None:
    """Refuse the awaitable form of a call.

    Raises:
        UnsupportedError: the model is not asynchronous.
    """
    if mode != "async":
        raise UnsupportedError(
            f"`{call}` belongs to a model that serves an event loop (mode='async'), and this one "
            f"does not. Write `{instead}`."
        )


def on_loop() -> bool:
    """Whether this thread runs an event loop at the moment."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
