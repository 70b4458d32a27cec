"""Copies of what blocks read, sent home while later steps run.

Copies of one step, or of a few, become one shared memory segment, a `Mirror`, that threads write
while the engine goes on. A save that is an unchanged view of such a copy is then sent as the
place where its bytes lie. Several requests have rows in a mirror: it stays until the record of
the last of them has been packed.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from midstream.modeling.vllm.payloads import segments
from midstream.modeling.vllm.payloads.segments import Handle
from midstream.modeling.vllm.payloads.streaming import GATHERED, stream
from midstream.modeling.vllm.payloads.threads import Launched, as_they_are, launched

WRITERS = 4  # segments that are written at once: a file in memory takes one writer at a time
LEAST = 8 << 20  # bytes from which a segment is written: below it files cost more than they save
MOST = 32 << 20  # bytes after which the rest of a step goes into a further segment
UNDER_WAY = 2 << 30  # bytes that may wait to be written; with more, copies are not taken in
KEPT_UNDER_WAY = 1 << 29  # of caches, whose copies nobody else holds: with more, the step waits


class Spot:
    """Where one copy lies: in which mirror, and its place among the copies there."""

    def __init__(self, mirror: Mirror, index: int):
        self.mirror, self.index = mirror, index

    def load(self) -> torch.Tensor | None:
        """A copy of its own of what lies there, on the CPU; None if it has not got there."""
        mirror, index = self.mirror, self.index
        if mirror.handle is None:
            return None
        dtype, shape, size = mirror.forms[index]
        memory = segments.private(mirror.handle)
        offset = int(mirror.offsets[index])
        return memory[offset : offset + size].view(dtype).view(shape).clone()


class Mirror:
    """Copies on their way into one segment.

    Attributes:
        forms: dtype, shape and bytes of each copy.
        owners: who may still refer to it.
        messages: how many messages refer to it.
        size: bytes of the copies.
        starts, ends, versions, offsets: of the copies that blocks have views of: their memory,
            the version that is written, and where it lies in the segment. ``offsets`` has all.
    """

    def __init__(self) -> None:
        self.forms: list[tuple[torch.dtype, torch.Size, int]] = []
        self.owners: set[Hashable] = set()
        self.messages = self.size = 0
        self.starts = self.ends = self.versions = self.offsets = np.zeros(0, np.int64)
        self.read: list[int] = []
        self._tensors: list[torch.Tensor] = []
        self._storages: list[weakref.ref[Any]] = []
        self._arrived: list[Callable[[], None]] = []
        self._written: Future[Handle | None] | None = None

    def add(self, copy: torch.Tensor, arrived: Callable[[], None] | None) -> Spot:
        """Take in a copy.

        Args:
            copy: a dense tensor.
            arrived: called when it is in the segment; None for one that blocks have views of.
        """
        if arrived is None:
            self.read.append(len(self._tensors))
        else:
            self._arrived.append(arrived)
        self._tensors.append(copy)
        self.forms.append((copy.dtype, copy.shape, copy.nbytes))
        self.size += copy.nbytes
        return Spot(self, len(self._tensors) - 1)

    def begin(self, threads: ThreadPoolExecutor, owner: str) -> None:
        """Have it written. What changes from now on is not in it."""
        offsets, _ = segments.layout([size for *_, size in self.forms])
        self.offsets = np.array(offsets, np.int64)
        read = [self._tensors[index] for index in self.read]
        self.starts = np.array([copy.data_ptr() for copy in read], np.int64)
        self.ends = self.starts + np.array([copy.nbytes for copy in read], np.int64)
        self.versions = np.array([copy._version for copy in read], np.int64)
        self._storages = [weakref.ref(copy.untyped_storage()) for copy in read]
        behind = launched({copy.device for copy in self._tensors if copy.is_cuda})
        self._written = threads.submit(_write, self._tensors, behind, owner)

    @property
    def is_pending(self) -> bool:
        """Whether nobody writes it yet."""
        return self._written is None

    @property
    def handle(self) -> Handle | None:
        """The segment, waited for; None if there is none."""
        if self._written is None or self._written.cancelled():
            return None
        return self._written.result()

    def alive(self) -> np.ndarray[Any, Any]:
        """Of the copies that blocks have views of, whether there may still be any."""
        return np.array([storage() is not None for storage in self._storages], np.bool_)

    def let_go(self) -> bool:
        """Let go of the copies if they have been written; whether they have, or never will."""
        if self._written is None or not self._written.done():
            return False
        self._tensors = []
        arrived, self._arrived = self._arrived, []
        for call in arrived if self.handle is not None else ():
            call()
        return True

    def remove(self) -> None:
        """Remove what nobody was told of."""
        if self._written is not None:
            self._written.cancel()
        if self.handle is not None:
            segments.remove([self.handle.name])
        self.let_go()


def _write(copies: list[torch.Tensor], behind: list[Launched], owner: str) -> Handle | None:
    """Write copies into a new segment, in another thread; None if there is no room for it."""
    try:
        with as_they_are(behind):
            return segments.write(stream([[copy] for copy in copies]), owner)
    except Exception:  # noqa: BLE001 - the copies are still there, and go the other way
        return None


class Mirrors:
    """All mirrors of an engine's worker. Used by the engine's own thread alone.

    Args:
        owner: the client that maps them.
        least, most: bytes from which a segment is written, and after which another is begun.
        under_way: bytes that may wait to be written.
        kept_under_way: the same for copies that nobody else holds.
    """

    def __init__(
        self,
        owner: str,
        least: int = LEAST,
        most: int = MOST,
        under_way: int = UNDER_WAY,
        kept_under_way: int = KEPT_UNDER_WAY,
    ):
        self._owner, self._least, self._most = owner, least, most
        self._bound, self._kept_bound = under_way, kept_under_way
        self._threads: ThreadPoolExecutor | None = None
        self._pending = Mirror()
        self._under_way: deque[Mirror] = deque()
        self._bytes = 0  # under way
        self._of: dict[Hashable, list[Mirror]] = {}
        self._trusted: set[Hashable] = set()

    def trust(self, owner: Hashable) -> None:
        """Note that the versions of copies tell of all that an owner changes in them."""
        self._trusted.add(owner)

    def is_trusted(self, owner: Hashable) -> bool:
        """Whether views of copies that an owner saves may be referred to."""
        return owner in self._trusted

    @property
    def live(self) -> list[Mirror]:
        """The mirrors that somebody may refer to, without those that are not being written."""
        found = {id(mirror): mirror for mirrors in self._of.values() for mirror in mirrors}
        return [mirror for mirror in found.values() if not mirror.is_pending]

    def add(
        self,
        copy: torch.Tensor,
        owners: frozenset[Hashable],
        arrived: Callable[[], None] | None = None,
    ) -> Spot | None:
        """Send a copy home; None if it cannot be.

        Args:
            copy: nobody changes it without its version telling.
            owners: who may refer to it.
            arrived: see ``Mirror.add``.
        """
        if copy.dtype not in GATHERED or not copy.nbytes or copy.layout is not torch.strided:
            return None
        if self._pending.size + copy.nbytes > self._most and self._pending.size:
            self.flush()
        if not self._has_room(wait=arrived is not None):
            return None
        for owner in owners - self._pending.owners:
            self._pending.owners.add(owner)
            self._of.setdefault(owner, []).append(self._pending)
        return self._pending.add(copy, arrived)

    def _has_room(self, *, wait: bool) -> bool:
        bound = self._kept_bound if wait else self._bound
        while self._bytes > bound:
            self._let_go()
            if self._bytes > bound:
                if not wait:
                    return False
                self._under_way[0].handle  # noqa: B018  # waits
        return True

    def _let_go(self) -> None:
        """Let go of the copies that have been written."""
        self._under_way = deque(each for each in self._under_way if not each.let_go())
        self._bytes = sum(each.size for each in self._under_way)

    def end_step(self) -> None:
        """Have written what there is, if it is worth a segment."""
        if self._pending.size >= self._least:
            self.flush()
        if self._under_way:
            self._let_go()

    def flush(self) -> None:
        """Have all written that has been taken in."""
        if not self._pending.size:
            return
        mirror, self._pending = self._pending, Mirror()
        if not mirror.owners:
            return  # they have all gone home meanwhile
        if self._threads is None:
            count = min(WRITERS, os.cpu_count() or 1)
            self._threads = ThreadPoolExecutor(count, "midstream-mirrors")
        mirror.begin(self._threads, self._owner)
        self._under_way.append(mirror)
        self._bytes += mirror.size

    def release(self, owners: Iterable[Hashable]) -> dict[str, int]:
        """Take in that nothing more comes of some owners.

        Returns:
            The segments to which nobody refers any more, and how many messages have.
        """
        over: dict[str, int] = {}
        for owner in owners:
            self._trusted.discard(owner)
            for mirror in self._of.pop(owner, ()):
                mirror.owners.discard(owner)
                if mirror.owners:
                    continue
                if not mirror.messages:
                    mirror.remove()
                elif mirror.handle is not None:
                    over[mirror.handle.name] = mirror.messages
        if not self._pending.owners and self._pending.size:
            self._pending = Mirror()
        return over

    def wait(self) -> None:
        """Wait until nothing is being written."""
        for mirror in self._under_way:
            mirror.handle  # noqa: B018  # waits
        self._let_go()

    def close(self) -> None:
        """Remove what no message has named; nothing is sent any more."""
        for mirror in self.live:
            if not mirror.messages:
                mirror.remove()
        self._of.clear()
        self._under_way.clear()
        self._bytes, self._pending = 0, Mirror()
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
            self._threads = None
