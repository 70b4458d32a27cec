"""How much time and memory blocks may take."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from midstream.errors import LimitExceededError
from midstream.interleaving.caches import Cache
from midstream.modeling.vllm.payloads import OnDevice

GIB = 1 << 30
_NBYTES = attrgetter("nbytes")
_NUMBERS = frozenset((int, float, bool))


@dataclass(frozen=True)
class Limits:
    """Limits of the blocks of an engine.

    Attributes:
        block_timeout: seconds that a block may take in one step of its request, all its visits
            together.
        max_save_bytes: bytes that the saves of one request may have.
        max_snapshot_bytes: bytes that the values which one request has read, and still holds, may
            have.
        max_write_log_bytes: bytes that are kept of what one request's block wrote, to write it
            again if the request is preempted. One that wrote more fails if it is preempted.
        max_graphs: CUDA graphs of decode steps with blocks that are kept, one for each set of
            locations and size of batch; 0 for none, so that those steps run eagerly.
        max_graph_bytes: GPU memory that these graphs may take, which the KV cache is smaller by.

    Raises:
        TypeError: one is no number.
        ValueError: one is not above zero; ``max_graphs`` may be.
    """

    block_timeout: float = 30.0
    max_save_bytes: int = 2 * GIB
    max_snapshot_bytes: int = 2 * GIB
    max_write_log_bytes: int = GIB // 4
    max_graphs: int = 64
    max_graph_bytes: int = GIB

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"{name}={value!r} is a {type(value).__name__}, not a number.")
            if not (value > 0 or (name == "max_graphs" and value == 0)):
                none = ", or 0 for no graphs" if name == "max_graphs" else ""
                raise ValueError(f"{name}={value!r}: expected a number above zero{none}.")

    @classmethod
    def taken_from(cls, arguments: dict[str, Any]) -> Limits:
        """Take the limits out of a model's arguments."""
        return cls(**{name: arguments.pop(name) for name in NAMES if name in arguments})

    def changed(self) -> dict[str, Any]:
        """Those that are not the usual, as plain data."""
        usual = Limits()
        given = dataclasses.asdict(self)
        return {name: value for name, value in given.items() if value != getattr(usual, name)}


NAMES = tuple(field.name for field in dataclasses.fields(Limits))


def check_saves(saves: Mapping[str, Any], limit: float) -> None:
    """Refuse the saves of a request that are too large.

    Raises:
        LimitExceededError: naming the largest of them.
    """
    if sum(size_of(value, once=False) for value in saves.values()) <= limit:
        return
    sizes = {name: size_of(value) for name, value in saves.items()}
    total = sum(sizes.values())
    if total <= limit:
        return
    largest = max(sizes, key=lambda name: sizes[name])
    raise LimitExceededError(
        f"The block saved {total} bytes, more than max_save_bytes={limit:.0f}; '{largest}' alone "
        f"has {sizes[largest]}. Save less (some rows, a sum, `.half()`), or build the model with "
        "a higher `max_save_bytes`."
    )


def size_of(value: Any, *, once: bool = True) -> int:
    """Bytes of the numbers and text in a value.

    What holds them adds little and is not counted.

    Args:
        value: the value.
        once: Count each object once. Otherwise tensors of a container may count for each time
            that they are in it, which is faster to find out.
    """
    total, seen, found = 0, set(), [value]
    while found:
        item = found.pop()
        if type(item) is torch.Tensor:
            if id(item) not in seen:
                seen.add(id(item))
                total += item.nbytes
            continue
        size = _plain_size(item)
        if size is not None:
            total += size
        elif id(item) not in seen:
            seen.add(id(item))
            size = _array_size(item)
            total += item.unread_bytes if isinstance(item, Cache) else 0
            total += size or 0
            if size is None:
                parts = _parts(item)
                rows = _rows_size(parts, seen if once else None)
                total += rows or 0
                found += parts if rows is None else ()
    return total


def _rows_size(parts: list[Any], seen: set[int] | None) -> int | None:
    """Bytes of a container's values where all are tensors, of which there may be very many.

    None if there is anything else among them, or one is in ``seen``, or twice among them.
    """
    if not parts or set(map(type, parts)) != {torch.Tensor}:
        return None
    if seen is None:
        return int(sum(map(_NBYTES, parts)))
    ids = set(map(id, parts))
    if len(ids) < len(parts) or not seen.isdisjoint(ids):
        return None
    seen |= ids
    return int(sum(map(_NBYTES, parts)))


def _plain_size(item: Any) -> int | None:
    if item is None or isinstance(item, bool | int | float):
        return 8
    return len(item) if isinstance(item, str | bytes | bytearray) else None


def _array_size(item: Any) -> int | None:
    if isinstance(item, torch.Tensor):
        return item.numel() * item.element_size()
    if isinstance(item, np.ndarray | np.generic):
        return item.nbytes
    if isinstance(item, list | tuple) and _NUMBERS.issuperset(map(type, item)):
        return 8 * len(item)  # a list of millions of numbers is no rarity
    return None


def _parts(item: Any) -> list[Any]:
    try:
        return _found_in(item)
    except Exception:  # noqa: BLE001  # a user's class; what cannot be read is refused when it is sent
        return []


def _found_in(item: Any) -> list[Any]:
    if isinstance(item, dict):
        return [*item.keys(), *item.values()]
    if isinstance(item, list | tuple | set | frozenset):
        return list(item)
    if isinstance(item, OnDevice):
        return [item.value]
    if isinstance(item, Cache):
        return [item.__dict__["visits"], item.aliases]  # what nobody has looked at stays so
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        return [getattr(item, field.name, None) for field in dataclasses.fields(item)]
    return []
