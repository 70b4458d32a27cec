"""Messages between the stages of a pipeline: what travels, and over which group."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch

_ALIGNED = 16  # bytes at which a tensor begins in a message


class _Place(NamedTuple):
    """Where a tensor lies in a message."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class _Pickler(pickle.Pickler):
    """Writes a value whose tensors go beside it."""

    def __init__(self, file: io.BytesIO):
        super().__init__(file, protocol=5)
        self.tensors: list[torch.Tensor] = []
        self._size = 0

    def persistent_id(self, value: Any) -> _Place | None:
        if not isinstance(value, torch.Tensor):
            return None
        bare = value.detach().as_subclass(torch.Tensor)
        data = bare.cpu().contiguous().reshape(-1).view(torch.uint8)
        place = _Place(self._size, value.dtype, tuple(value.shape))
        self.tensors.append(data)
        self._size += len(data) + _padding(len(data))
        return place


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, tensors: torch.Tensor):
        super().__init__(io.BytesIO(data))
        self._tensors = tensors

    def persistent_load(self, place: _Place) -> torch.Tensor:
        size = place.dtype.itemsize
        for length in place.shape:
            size *= length
        found = self._tensors[place.offset : place.offset + size]
        return found.view(place.dtype).view(place.shape)


def _padding(size: int) -> int:
    return -size % _ALIGNED


def encode(value: Any) -> torch.Tensor:
    """A value as bytes, [bytes], uint8 on the CPU: its tensors behind the rest.

    Only workers of one engine write and read these; vLLM's own messages between them are alike.

    Raises:
        Exception: whatever pickle raises for what cannot travel.
    """
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    text = file.getvalue()
    head = bytearray(len(text).to_bytes(_ALIGNED, "little") + text)
    head += bytes(_padding(len(head)))
    parts = [torch.frombuffer(head, dtype=torch.uint8)]
    for tensor in pickler.tensors:
        parts.append(tensor)
        if padding := _padding(len(tensor)):
            parts.append(torch.zeros(padding, dtype=torch.uint8))
    return torch.cat(parts)


def decode(data: torch.Tensor) -> Any:
    """The value of ``encode``; its tensors are views of the message."""
    length = int.from_bytes(bytes(data[:_ALIGNED].tolist()), "little")
    text = data[_ALIGNED : _ALIGNED + length].numpy().tobytes()
    start = _ALIGNED + length
    return _Unpickler(text, data[start + _padding(start) :]).load()


class Link:
    """Sends messages to other stages, and takes theirs in the order in which they were sent.

    Sending waits for nobody: a message leaves when its receiver asks for it.

    Args:
        ranks: of the stages, in order.
        timeout: seconds that a receiver waits; then the engine has failed.
    """

    def __init__(self, ranks: Sequence[int], timeout: float):
        self._ranks = ranks
        self._group = torch.distributed.new_group(
            list(ranks), timeout=timedelta(seconds=timeout), backend="gloo"
        )
        self._under_way: list[tuple[Any, torch.Tensor]] = []

    def send(self, stage: int, data: torch.Tensor) -> None:
        """Send a message, see ``encode``."""
        self._under_way = [each for each in self._under_way if not each[0].is_completed()]
        size = torch.tensor([len(data)], dtype=torch.int64)
        for part in (size, data):
            work = torch.distributed.isend(part, self._ranks[stage], group=self._group)
            self._under_way.append((work, part))

    def receive(self, stage: int) -> Any:
        """The next message of a stage; waits for it."""
        size = torch.zeros(1, dtype=torch.int64)
        torch.distributed.recv(size, self._ranks[stage], group=self._group)
        data = torch.empty(int(size), dtype=torch.uint8)
        torch.distributed.recv(data, self._ranks[stage], group=self._group)
        return decode(data)
