"""Tensors of any device become one stream of bytes in host memory, chunk by chunk.

Small tensors of one shape are gathered in bulk on their own device: one launch for a hundred
rows and one copy from the device for a chunk of them. While the caller does something with
one chunk, the next is on its way from the device.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

import torch

from midstream.modeling.vllm.payloads.segments import ALIGNMENT

Entry: TypeAlias = Sequence[torch.Tensor] | memoryview
"""One buffer: bytes, or tensors of one shape, dtype and device, one behind the other."""

HOST_ROOM = 1 << 20  # bytes of a chunk on a CPU: it stays in the cache until it is written
DEVICE_ROOM = 8 << 20  # bytes of a chunk that comes from a device; as many are needed there too
_DIRECT = 64 << 10  # bytes from which a tensor in host memory is not copied into a chunk
_ALONE = 1 << 20  # bytes from which a tensor on a device is copied by itself
GATHERED = frozenset(
    {
        *(torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.bool),
        *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    }
)
"""Dtypes that PyTorch can put side by side on every device; others are copied as bytes."""
_PADDING = memoryview(bytes(ALIGNMENT))


def stream(entries: Iterable[Entry], room: int | None = None) -> Iterator[memoryview]:
    """Yield the bytes of buffers in order, each filled up to `ALIGNMENT`.

    Args:
        entries: the buffers.
        room: bytes of a chunk, a multiple of `ALIGNMENT`; two chunks are held, in pinned memory
            where a tensor is on a CUDA device.

    Yields:
        memory that is valid until the next is asked for.
    """
    entries = [_reachable(entry) for entry in entries]
    away = any(not isinstance(entry, memoryview) and entry[0].is_cuda for entry in entries)
    chunks = _Chunks(room or (DEVICE_ROOM if away else HOST_ROOM), pinned=away)
    for entry in _joined(entries):
        if isinstance(entry, memoryview):
            yield from chunks.flush()
            yield entry
            yield _PADDING[: -entry.nbytes % ALIGNMENT]
        elif _in_place(entry[0]):
            yield from chunks.flush()
            for tensor in entry:
                plain = _plain(tensor)
                yield bytes_of(plain)
            yield _PADDING[: -entry[0].nbytes * len(entry) % ALIGNMENT]
        else:
            yield from chunks.add(entry)
    yield from chunks.flush()


def lies_in_memory(entry: Entry) -> bool:
    """Whether a buffer is of large tensors in host memory, which need not be copied together."""
    return not isinstance(entry, memoryview) and _in_place(entry[0])


def memories(entries: Iterable[Entry]) -> Iterator[memoryview]:
    """Yield the bytes of buffers for which `lies_in_memory` holds, as `stream` does.

    Yields:
        memory that is valid for as long as it is kept.
    """
    for entry in entries:
        assert not isinstance(entry, memoryview)
        for tensor in entry:
            yield _plain(tensor).detach().view(-1).view(torch.uint8).numpy().data
        yield _PADDING[: -entry[0].nbytes * len(entry) % ALIGNMENT]


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU; the tensor has to outlive it."""
    # Five times cheaper than a byte view through numpy, and right for the dtypes numpy lacks.
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr()))


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with its values in memory in row-major order; a copy where they are not."""
    return tensor.resolve_conj().resolve_neg().contiguous()


def _in_place(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu and tensor.nbytes >= _DIRECT


def _reachable(entry: Entry) -> Entry:
    if isinstance(entry, memoryview) or entry[0].is_cpu or entry[0].is_cuda:
        return entry
    return [tensor.cpu() for tensor in entry]


def _joined(entries: Iterable[Entry]) -> Iterator[Entry]:
    """Join neighbours of one shape that need no padding between them."""
    group: list[torch.Tensor] = []
    for entry in entries:
        if group and (isinstance(entry, memoryview) or not _follows(group[0], entry[0])):
            yield group
            group = []
        if isinstance(entry, memoryview):
            yield entry
        else:
            group += entry
    if group:
        yield group


def _follows(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        one.dtype in GATHERED
        and not one.nbytes % ALIGNMENT
        and one.shape == other.shape
        and one.dtype is other.dtype
        and one.device == other.device
    )


class _Chunks:
    """Two chunks of host memory in turns: one is filled while the other is on its way."""

    def __init__(self, room: int, *, pinned: bool) -> None:
        self._room, self._pinned = room, pinned
        self._both: list[torch.Tensor] = []
        self._turn = self._used = 0
        self._devices: set[torch.device] = set()
        self._coming: _Coming | None = None

    def add(self, tensors: Sequence[torch.Tensor]) -> Iterator[memoryview]:
        """Add the tensors of a buffer and fill it up; yields what became full."""
        first, place = tensors[0], 0
        size = first.nbytes
        # Cut so that every chunk begins at a multiple of ALIGNMENT, where any dtype may begin.
        step = ALIGNMENT // math.gcd(size, ALIGNMENT) if size else 1
        if first.is_cuda:
            self._devices.add(first.device)
        if len(tensors) == 1 or size * step > min(self._room, _ALONE):
            for tensor in tensors:
                yield from self._add_alone(tensor)
            place = len(tensors)
        while size and place < len(tensors):
            left = len(tensors) - place
            fitting = (self._room - self._used) // size
            count = left if fitting >= left else fitting // step * step
            if count:
                self._put(tensors[place : place + count])
                place += count
            else:
                yield from self._turn_over()
        self._pad(-size * len(tensors) % ALIGNMENT)

    def flush(self) -> Iterator[memoryview]:
        """Yield all that was added."""
        yield from self._turn_over()
        if self._coming is not None:
            coming, self._coming = self._coming, None
            yield coming.wait()

    def _turn_over(self) -> Iterator[memoryview]:
        """Send the chunk off, and yield the one before it, which has arrived by then."""
        if not self._used:
            return
        sent = _Coming(self._chunk[: self._used], self._devices)
        before, self._coming = self._coming, sent
        self._turn, self._used = 1 - self._turn, 0
        if before is not None:
            yield before.wait()

    @property
    def _chunk(self) -> torch.Tensor:
        if not self._both:
            self._both = [
                torch.empty(self._room, dtype=torch.uint8, device="cpu", pin_memory=self._pinned)
                for _ in range(2)
            ]
        return self._both[self._turn]

    def _take(self, size: int) -> torch.Tensor:
        taken = self._chunk[self._used : self._used + size]
        self._used += size
        return taken

    def _pad(self, size: int) -> None:
        if size:  # there is room for it: chunks begin and end at multiples of ALIGNMENT
            self._take(size).zero_()

    def _add_alone(self, tensor: torch.Tensor) -> Iterator[memoryview]:
        flat, place = _plain(tensor).view(-1).view(torch.uint8), 0
        while place < len(flat):
            if self._used == self._room:
                yield from self._turn_over()
            part = flat[place : place + self._room - self._used]
            self._take(len(part)).copy_(part, non_blocking=True)
            place += len(part)

    def _put(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy tensors of one shape into the chunk, which has room for them."""
        first = tensors[0]
        place = self._take(first.nbytes * len(tensors))
        place = place.view(first.dtype).view(len(tensors), *first.shape)
        if first.is_cpu:
            torch.stack(list(tensors), out=place)
        else:
            _gather(tensors, place)


def _gather(tensors: Sequence[torch.Tensor], place: torch.Tensor) -> None:
    try:
        place.copy_(torch.stack(list(tensors)), non_blocking=True)
    except torch.OutOfMemoryError:  # the engine has left no room for them side by side
        for into, tensor in zip(place, tensors, strict=True):
            into.copy_(tensor, non_blocking=True)


class _Coming:
    """A chunk on its way from the devices of its tensors."""

    def __init__(self, data: torch.Tensor, devices: Iterable[torch.device]) -> None:
        self._data = data
        self._events = [torch.cuda.current_stream(device).record_event() for device in devices]

    def wait(self) -> memoryview:
        for event in self._events:
            event.synchronize()
        return bytes_of(self._data)
