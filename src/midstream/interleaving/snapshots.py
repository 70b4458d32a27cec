"""How many bytes of the model's values one block holds."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import torch

from midstream.errors import LimitExceededError

Storage: TypeAlias = "weakref.ref[Any]"

_FEW = 1000  # copies; so many are looked through in no time


class Snapshots:
    """The copies that a block was given, as long as it holds them.

    A copy counts with the block's own rows until its memory is let go: until the last view, kept
    row or detached tensor of it is gone.

    Args:
        limit: bytes that the block may hold at a time.
    """

    def __init__(self, limit: float = math.inf):
        self._limit = limit
        self._bytes = 0
        self._held: list[tuple[Storage, int]] = []
        self._look_at = _FEW

    def add(self, leaves: Iterable[Any]) -> None:
        """Count what the block is about to be given.

        Raises:
            LimitExceededError: it would hold too much.
        """
        if self._limit == math.inf:
            return
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                self._held.append((weakref.ref(leaf.untyped_storage()), leaf.nbytes))
                self._bytes += leaf.nbytes
        self._check()

    def hold(self, held: Sequence[tuple[Storage, int]], rows: int) -> None:
        """Count some rows of copies, as ``add`` does.

        Args:
            held: their memory, and the bytes of a row in each.
        """
        for storage, row_bytes in held:
            self._held.append((storage, row_bytes * rows))
            self._bytes += row_bytes * rows
        if self._bytes > self._limit or len(self._held) > self._look_at:
            self._check()

    def hold_while(self, holder: Any, size: int) -> None:
        """Count something for as long as an object lives.

        Args:
            size: bytes.

        Raises:
            LimitExceededError: the block would hold too much; it is not counted then.
        """
        self._held.append((weakref.ref(holder), size))
        self._bytes += size
        try:
            self._check()
        except LimitExceededError:
            self._held.pop()
            self._bytes -= size
            raise

    @property
    def grain(self) -> float:
        """Bytes so few, beside the limit, that they may be counted a little later."""
        return self._limit / 64

    def _check(self) -> None:
        if self._bytes > self._limit or len(self._held) > self._look_at:
            self._forget()
        if self._bytes > self._limit:
            raise LimitExceededError(
                f"The block would hold {self._bytes} bytes of values it has read, more than "
                f"max_snapshot_bytes={self._limit:.0f}. Keep less (some rows, a sum, a `.cpu()` "
                "copy), or build the model with a higher `max_snapshot_bytes`."
            )

    def _forget(self) -> None:
        """Stop counting what has been let go. Not done at every read: that would cost more."""
        self._held = [(storage, size) for storage, size in self._held if storage() is not None]
        self._bytes = sum(size for _, size in self._held)
        self._look_at = max(_FEW, 2 * len(self._held))
