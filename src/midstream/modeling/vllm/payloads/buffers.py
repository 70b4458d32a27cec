"""The bytes of a message's tensors: collected as its tree is built, read in one go at the end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from midstream.modeling.vllm.payloads.streaming import GATHERED, Entry, stream


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

    def stream(self) -> Iterator[memoryview]:
        """Bring the buffers' bytes to host memory, laid out as `segments.layout` says.

        Each part is valid until the next is asked for. Can be called again.
        """
        return stream(self._entries)

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


def _layout(tensor: torch.Tensor) -> str:
    return "nested" if tensor.is_nested else str(tensor.layout)
