"""The bytes of a message's tensors: collected as its tree is built, read in one go at the end."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import torch

from midstream.modeling.vllm.payloads import segments
from midstream.modeling.vllm.payloads.nodes import Part
from midstream.modeling.vllm.payloads.streaming import (
    GATHERED,
    Entry,
    lies_in_memory,
    memories,
    stream,
)

WRITERS = 4  # segments that are written at once
PART_BYTES = 16 << 20  # bytes from which a further segment, and a thread to write it, pays


class Buffers:
    """Buffers of one message, in order. What is added stays referenced until the end."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self._entries: list[Entry] = []

    def __len__(self) -> int:
        return len(self.sizes)

    def add_tensor(self, tensor: torch.Tensor) -> int:
        """Add a dense tensor of any device; returns its index.

        Raises:
            ValueError: The tensor has no plain bytes; the text says what it is and what to do.
        """
        if tensor.layout is not torch.strided or tensor.is_nested:
            raise ValueError(f"a tensor of layout {_layout(tensor)}: save its .to_dense()")
        if tensor.is_quantized:
            raise ValueError("a quantised tensor: save its .dequantize()")
        if tensor.is_meta:
            raise ValueError("a tensor on the meta device, which has no values: save its .shape")
        return self._add([tensor], tensor.nbytes)

    def add_run(self, tensors: Sequence[torch.Tensor]) -> int:
        """Add tensors for which `are_alike` holds, of one shape, as one buffer; returns its index.

        They lie one behind the other, without a gap.
        """
        return self._add(tensors, tensors[0].nbytes * len(tensors))

    def add_bytes(self, data: memoryview) -> int:
        """Add contiguous bytes; returns their index."""
        return self._add(data, data.nbytes)

    def truncate(self, length: int) -> None:
        """Forget the buffers from index `length` on."""
        del self.sizes[length:]
        del self._entries[length:]

    def read(self) -> bytearray:
        """Copy the bytes of all buffers, laid out as `segments.layout` says."""
        with _modes(self._streams()):
            return _copied(self._entries)

    def parts(self) -> list[memoryview]:
        """The bytes of all buffers, as ``read`` has them; large ones in host memory as they lie."""
        found: list[memoryview] = []
        with _modes(self._streams()):
            for lies, entries in itertools.groupby(self._entries, lies_in_memory):
                if lies:
                    found += memories(entries)
                else:
                    found.append(memoryview(_copied(entries)))
        return found

    def write(self, owner: str) -> list[Part]:
        """Write the buffers into a new segment, or into several at once where they are large.

        Raises:
            OSError: The folder is full or cannot be written; nothing is left behind.
        """
        wanted = min(WRITERS, os.cpu_count() or 1, sum(self.sizes) // PART_BYTES)
        cuts = list(itertools.pairwise(_cuts(self.sizes, max(wanted, 1))))
        several = [stream(self._entries[first:end]) for first, end in cuts]
        # CUDA streams and PyTorch's modes are a thread's own.
        handles = segments.write_all(several, owner, partial(_modes, self._streams()))
        counts = [end - first for first, end in cuts]
        return list(map(Part, handles, counts))

    def _streams(self) -> list[torch.cuda.Stream]:
        """The CUDA streams that the tensors' values are computed on."""
        tensors = (entry[0] for entry in self._entries if not isinstance(entry, memoryview))
        devices = {tensor.device for tensor in tensors if tensor.is_cuda}
        return [torch.cuda.current_stream(device) for device in devices]

    def _add(self, entry: Entry, size: int) -> int:
        self._entries.append(entry)
        self.sizes.append(size)
        return len(self.sizes) - 1


def are_alike(tensors: Sequence[object]) -> bool:
    """Whether all are dense tensors of one device and dtype, whose bytes can be sent as they are.

    Cheap on purpose: what a block saves may be hundreds of thousands of rows.
    """
    if len(tensors) < 2 or set(map(type, tensors)) != {torch.Tensor}:
        return False
    found: Sequence[torch.Tensor] = tensors  # type: ignore[assignment]
    if any([tensor.is_nested for tensor in found]):  # noqa: C419 - a list is twice as fast
        return False
    first, layouts = found[0], {tensor.layout for tensor in found}
    if layouts != {torch.strided} or first.is_meta or first.dtype not in GATHERED:
        return False
    return len({tensor.dtype for tensor in found}) == len({t.device for t in found}) == 1


def _copied(entries: Iterable[Entry]) -> bytearray:
    data = bytearray()
    for part in stream(entries):
        data += part
    return data


def _layout(tensor: torch.Tensor) -> str:
    return "nested" if tensor.is_nested else str(tensor.layout)


def _cuts(sizes: Sequence[int], parts: int) -> list[int]:
    """Cut buffers into at most so many parts of about the same size, none of them empty.

    Returns the indices of the parts' first buffers, and the number of buffers.
    """
    cuts, taken, total = [0], 0, sum(sizes)
    for index, size in enumerate(sizes):
        if size and taken * parts >= total * len(cuts):
            cuts.append(index)
        taken += size
    return [*cuts, len(sizes)]


@contextlib.contextmanager
def _modes(streams: Sequence[torch.cuda.Stream]) -> Iterator[None]:
    """Have tensors read as what they are, behind what computes them, in this thread."""
    with contextlib.ExitStack() as entered:
        for each in streams:
            entered.enter_context(torch.cuda.stream(each))
        entered.enter_context(torch.no_grad())
        # A subclass of ours refuses some operations; here it is a tensor like any other.
        entered.enter_context(torch._C.DisableTorchFunctionSubclass())
        yield
