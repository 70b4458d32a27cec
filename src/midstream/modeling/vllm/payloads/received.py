"""The memory of a message in the client, and the tensors in it."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from midstream.errors import TransportError
from midstream.modeling.vllm.payloads import nodes, segments


class Bytes:
    """The buffers of a message; maps its segments.

    Raises:
        TransportError: A segment is gone, or the bytes are not as many as the message says.
    """

    def __init__(self, message: nodes.Message) -> None:
        self._sizes = message.sizes
        self._places: list[tuple[memoryview, int]] = []
        if message.parts:
            counts = [part.count for part in message.parts]
            memories = segments.open_all([part.segment for part in message.parts])
        else:
            counts, memories = [len(message.sizes)], [memoryview(message.inline)]
        fits = min(message.sizes + counts, default=0) >= 0 and sum(counts) == len(message.sizes)
        for memory, count in zip(memories, counts, strict=True):
            first = len(self._places)
            offsets, total = segments.layout(message.sizes[first : first + count])
            fits = fits and memory.nbytes == total
            self._places += ((memory, offset) for offset in offsets)
        if not fits:
            raise TransportError("a message of the engine does not hold the bytes it announces")

    def at(self, index: int) -> tuple[memoryview, int, int]:
        """Return the memory that holds a buffer, its offset in it and its size, in bytes."""
        if not 0 <= index < len(self._sizes):
            raise TransportError(f"buffer {index} of {len(self._sizes)}")
        return *self._places[index], self._sizes[index]


def tensors_at(
    memory: memoryview, offset: int, dtype: torch.dtype, shape: tuple[int, ...]
) -> list[torch.Tensor]:
    """Make tensors that lie one behind the other in memory, which is not copied.

    Each has a storage of its own. Slices of one tensor would be made in half the time, but each
    of them would be pickled and saved to a file with all the others, and a write into one would
    count, for autograd, as one into each.

    Args:
        memory: what holds them, writable.
        offset: where the first begins, in bytes.
        dtype: their dtype.
        shape: their number, at least 1, and then the shape of each, no length of which is 0.
    """
    rows = np.ndarray(shape, _numpy_dtype(dtype), memory, offset)
    each = rows if len(shape) > 1 else (rows[i, ...] for i in range(len(rows)))
    found = list(map(torch.from_numpy, each))
    return found if found[0].dtype is dtype else [tensor.view(dtype) for tensor in found]


@functools.cache
def _numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """NumPy's dtype of the same name, or integers of that size where it has none."""
    try:
        return torch.empty(0, dtype=dtype, device="cpu").numpy().dtype
    except TypeError:
        return np.dtype(f"u{dtype.itemsize}")
