"""The table of kinds: what a request of the soak may be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Requests = list[Any]
Maker = Callable[[Any, list[int], dict[str, Any]], Requests]
Block = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Kind:
    """One kind of request.

    Attributes:
        make: captures it: called with the model, token ids and sampling settings.
        most: its longest prompt; only a plain one may be longer than a step.
        slow: whether it takes seconds, so that few of them are drawn.
    """

    name: str
    make: Maker
    most: int = 100
    slow: bool = False


KINDS: dict[str, Kind] = {}
"""All kinds by name."""


def traced(block: Block, *, slow: bool = False, **own: Any) -> Block:
    """Register a block as a kind.

    Args:
        slow: see ``Kind``.
        own: settings that it needs.
    """

    def make(model: Any, ids: list[int], settings: dict[str, Any]) -> Requests:
        tracer = model.trace(ids, block=block, run=False, **{**settings, **own})
        return list(tracer._requests)

    KINDS[block.__name__] = Kind(block.__name__, make, slow=slow)
    return block


def with_settings(*, slow: bool = False, **own: Any) -> Callable[[Block], Block]:
    """`traced` with arguments, as a decorator."""
    return lambda block: traced(block, slow=slow, **own)


def made(most: int = 100) -> Callable[[Maker], Maker]:
    """Register a function that captures requests by itself."""

    def register(make: Maker) -> Maker:
        KINDS[make.__name__] = Kind(make.__name__, make, most)
        return make

    return register
