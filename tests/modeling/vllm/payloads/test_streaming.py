"""Tensors become one stream of bytes: their order, their alignment, and how they are gathered."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from midstream.modeling.vllm.payloads import segments, streaming
from midstream.modeling.vllm.payloads.streaming import Entry, stream

DTYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.int64, torch.complex128, torch.bool]


def expected(entries: Sequence[Entry]) -> bytes:
    """Lay the buffers out one by one."""
    data = b""
    for entry in entries:
        data += entry if isinstance(entry, memoryview) else b"".join(map(raw, entry))
        data += bytes(-len(data) % segments.ALIGNMENT)
    return data


def raw(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor."""
    plain = tensor.cpu().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes()


def drawn(chance: random.Random, device: str) -> Entry:
    """Draw a buffer: bytes, or tensors of one shape and any stride."""
    if not chance.randrange(6):
        return memoryview(chance.randbytes(chance.randrange(200)))
    dtype = chance.choice(DTYPES)
    shape = [chance.choice([1, 2, 3, 16, 33]) for _ in range(chance.randrange(3))]
    count = chance.choice([1, 2, 7, 40]) if dtype in streaming.GATHERED else 1
    whole = torch.randint(0, 2, [count, *shape], device=device).to(dtype)
    if len(shape) == 2 and chance.randrange(2):
        whole = whole.transpose(1, 2).contiguous().transpose(1, 2)
    return list(whole)


def joined(entries: Sequence[Entry], room: int | None = None) -> bytes:
    """Take the stream's parts together."""
    return b"".join(bytes(part) for part in stream(entries, room))


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], ids=["cpu", "cuda"]
)
@pytest.mark.parametrize("room", [64, 128, 1024, 1 << 20])
def test_any_mixture_comes_out_in_order_and_aligned(room: int, device: str) -> None:
    """Bytes and tensors of all sizes, dtypes and strides lie where the layout says."""
    chance = random.Random(room)
    for _ in range(60):
        where = ["cpu", device]
        entries = [drawn(chance, chance.choice(where)) for _ in range(chance.randrange(12))]
        assert joined(entries, room) == expected(entries)


def test_rows_are_gathered_in_bulk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of rows, in one list or each by itself, are a few parts, and none is large."""
    gathered: list[int] = []
    stack = torch.stack

    def counting(tensors: list[torch.Tensor], **keywords: Any) -> torch.Tensor:
        gathered.append(len(tensors))
        return stack(tensors, **keywords)

    monkeypatch.setattr(torch, "stack", counting)
    copies = [torch.full((4, 4096), float(i), dtype=torch.bfloat16) for i in range(1000)]
    rows = [copy[1:2] for copy in copies]
    for entries in ([rows], [[row] for row in rows], [rows[:300], rows[300:]]):
        gathered.clear()
        assert joined(entries) == torch.cat(rows).view(torch.uint8).numpy().tobytes()
        sizes = [part.nbytes for part in stream(entries)]
        assert max(sizes) <= streaming.HOST_ROOM
        assert len(sizes) < 12
        assert len(gathered) < 24
        assert sum(gathered) == 2 * 1000


def test_a_large_tensor_in_host_memory_is_not_copied() -> None:
    """Its own memory is the part."""
    tensors = [torch.zeros(1 << 20) for _ in range(3)]
    memory = [torch.frombuffer(part, dtype=torch.uint8) for part in stream([tensors]) if part]
    assert [each.data_ptr() for each in memory] == [each.data_ptr() for each in tensors]


@pytest.mark.parametrize("size", [2, 40_000])
def test_lazily_negated_tensors_are_sent_as_they_read(size: int) -> None:
    """The imaginary part of a conjugate, small or large, arrives negated."""
    lazy = torch.full((size,), 1 + 2j).conj().imag
    assert lazy.is_neg()
    assert joined([[lazy, lazy]]) == expected([[torch.full((size,), -2.0)] * 2])


def test_without_room_to_gather_tensors_are_copied_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A device whose memory is full costs time, and no save."""

    def full(*_: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("full")

    place = torch.zeros(3, 2)
    rows = list(torch.arange(6.0).reshape(3, 2))
    monkeypatch.setattr(torch, "stack", full)
    streaming._gather(rows, place)
    assert place.tolist() == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.gpu
def test_several_chunks_of_a_gpu_arrive() -> None:
    """Rows, large tensors and tensors of the host, more than the chunks hold, arrive in order."""
    copies = [torch.randn(3, 4096, device="cuda") for _ in range(2000)]
    large = torch.randn(10_000_001, device="cuda")
    entries: list[Entry] = [[copy[1:2] for copy in copies], [large], [large.cpu(), large.cpu()]]
    entries += [[copy[2]] for copy in copies[:700]] + [[large[:300_000]], [copies[0].T]]
    assert joined(entries) == expected(entries)
