"""Methods of the model that users hold which a block cannot call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from midstream.errors import UnsupportedError


def refused(name: str, instead: str) -> Callable[..., NoReturn]:
    """A method that refuses.

    Args:
        name: what it is called.
        instead: what to write instead.
    """

    def refuse(self: object, *args: Any, **settings: Any) -> NoReturn:
        raise UnsupportedError(
            f"`model.{name}()` inside a block is not supported: a block runs beside one request "
            f"and leaves the engine as it is. {instead}"
        )

    refuse.__name__, refuse.__doc__ = name, f"Refuse. {instead}"
    return refuse
