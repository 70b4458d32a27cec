"""Tensors: every dtype, layout and kind of storage, inline and through a segment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from midstream.modeling.vllm.payloads import (
    Record,
    pack,
    pack_apart,
    segments,
    unpack,
    unpack_apart,
)
from midstream.modeling.vllm.payloads.nodes import DTYPES

OWNER = segments.owner_id()
PLAIN = [dtype for name, dtype in DTYPES.items() if not name.startswith(("q", "bits"))]


def sent(value: Any, inline_limit: int = 1 << 20) -> Record:
    """Send a record that saves `value` as x, as the client sees it."""
    [record] = unpack(pack([Record("r", {"x": value})], owner=OWNER, inline_limit=inline_limit))
    return record


def returned(value: Any, inline_limit: int = 1 << 20) -> Any:
    """Return a value as the client sees it."""
    record = sent(value, inline_limit)
    assert record.error is None, record.error
    return record.saves["x"]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("inline_limit", [1 << 20, 0], ids=["inline", "segment"])
@pytest.mark.parametrize("dtype", PLAIN, ids=str)
def test_every_dtype_arrives_bit_for_bit(dtype: torch.dtype, inline_limit: int) -> None:
    """All bytes of a tensor are the same afterwards, NaN payloads included."""
    data = torch.randint(0, 256, (3 * 5 * dtype.itemsize,), dtype=torch.uint8)
    if dtype is torch.bool:
        data &= 1
    value = data.view(dtype).view(3, 5)
    got = returned(value, inline_limit)
    assert (got.dtype, got.shape, got.device.type) == (dtype, value.shape, "cpu")
    assert torch.equal(bits(got), data)
    assert segments.remaining(OWNER) == []


BASE = torch.arange(60.0).reshape(3, 4, 5)
COMPLEX = torch.tensor([[1 + 2j, 3 - 1j]])


@pytest.mark.parametrize("inline_limit", [1 << 20, 0], ids=["inline", "segment"])
@pytest.mark.parametrize(
    "value",
    [
        torch.tensor(3.5),
        torch.empty(0),
        torch.empty(2, 0, 3, dtype=torch.int64),
        BASE.permute(2, 0, 1),
        BASE[:, 1],
        BASE[1:, ::2, 3],
        BASE[1][2],
        torch.tensor([1.0]).expand(4, 3),
        torch.ones(1, 2, 4, 4).to(memory_format=torch.channels_last),
        COMPLEX.conj(),
        COMPLEX.conj().imag,
        torch.tensor([True, False]),
    ],
    ids=lambda value: f"{tuple(value.shape)}-{value.stride()}",
)
def test_every_shape_and_stride_arrives(value: torch.Tensor, inline_limit: int) -> None:
    """Scalars, empty tensors, views, broadcasts and lazy conjugates arrive as they read."""
    got = returned(value, inline_limit)
    assert torch.equal(got, value)
    assert got.is_contiguous()


def test_a_row_of_a_large_tensor_travels_alone() -> None:
    """A view sends its own elements, not the storage it looks into (C25)."""
    row = torch.zeros(10_000, 100)[7]
    assert len(pack([Record("r", {"x": row})], owner=OWNER)) < 1000
    assert returned(row).untyped_storage().nbytes() == 400


def test_gradients_stay_behind() -> None:
    """A tensor of a graph and a parameter arrive as plain tensors without gradient."""
    weight = torch.nn.Parameter(torch.ones(2, 2))
    for value in (weight, weight * 2, weight.T):
        got = returned(value)
        assert type(got) is torch.Tensor
        assert not got.requires_grad
        assert torch.equal(got, value.detach())


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: torch.eye(2).to_sparse(), "layout torch.sparse_coo: save its .to_dense()"),
        (lambda: torch.eye(2).to_sparse_csr(), "layout torch.sparse_csr: save its .to_dense()"),
        (
            lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
            "save its .dequantize()",
        ),
        (
            lambda: torch.nested.nested_tensor([torch.ones(2)]),
            "layout nested: save its .to_dense()",
        ),
        (
            lambda: torch.empty(2, device="meta"),
            "meta device, which has no values: save its .shape",
        ),
        (lambda: torch.masked.masked_tensor(torch.ones(1), torch.tensor([True])), "MaskedTensor"),
    ],
    ids=["sparse", "csr", "quantised", "nested", "meta", "subclass"],
)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_tensors_without_plain_bytes_are_refused(make: Callable[[], Any], expected: str) -> None:
    """Sparse, quantised, nested, meta tensors and subclasses say what to save instead."""
    error = sent([make()]).error
    assert error is not None
    assert error.message.startswith("saves['x'][0] is a")
    assert expected in error.message


@pytest.mark.parametrize("inline_limit", [1 << 20, 0], ids=["inline", "segment"])
def test_received_tensors_are_the_clients_own(inline_limit: int) -> None:
    """They can be written, share nothing with the sender's or each other, and serve autograd."""
    source = [torch.zeros(3), torch.zeros(3)]
    with torch.inference_mode():
        got = returned(source, inline_limit)
    got[0] += 1
    got[0].requires_grad_()
    got[0].sum().backward()
    assert [t.tolist() for t in (*source, got[1])] == [[0.0] * 3] * 3
    assert got[0].grad is not None


def test_the_clients_default_device_does_not_matter() -> None:
    """Saves arrive on the CPU also under another default device (B15)."""
    values = [BASE, torch.empty(0)]
    with torch.device("meta"):
        got = [returned(value, limit) for value in values for limit in (1 << 20, 0)]
    assert [t.device.type for t in got] == ["cpu"] * 4


def test_engine_tensors_of_inference_mode_travel() -> None:
    """Tensors made in inference mode, strided ones too, can be packed."""
    with torch.inference_mode():
        value = torch.arange(6).reshape(2, 3).T
        message = pack([Record("r", {"x": value})], owner=OWNER)
    assert torch.equal(unpack(message)[0].saves["x"], value)


@pytest.mark.gpu
@pytest.mark.parametrize("inline_limit", [1 << 30, 0], ids=["inline", "segment"])
def test_tensors_of_a_gpu_arrive_on_the_cpu(inline_limit: int) -> None:
    """GPU tensors of any stride arrive with CPU tensors of the same record, in order (O5, B15)."""
    value = [BASE.cuda(), BASE, BASE.cuda().permute(2, 0, 1), COMPLEX.cuda().conj()]
    value += [torch.randn(1000, 1000, device="cuda", dtype=torch.bfloat16)]
    for got, sent_ in zip(returned(value, inline_limit), value, strict=True):
        assert got.device.type == "cpu"
        assert torch.equal(got, sent_.cpu())


def apart(saves: dict[str, Any]) -> tuple[list[memoryview], dict[str, Any]]:
    """The parts that saves are sent in to another machine, and the saves as they arrive there."""
    message, parts = pack_apart([Record("r", saves)])
    [record] = unpack_apart(message, memoryview(bytearray(b"".join(parts))))
    assert record.error is None, record.error
    return parts, record.saves


def test_large_tensors_are_sent_as_they_lie() -> None:
    """What goes to another machine is not copied together before it is sent."""
    large = torch.arange(40_000.0)
    parts, saves = apart({"small": torch.ones(3), "large": large, "text": "x" * 100_000})
    assert torch.equal(saves["large"], large)
    assert saves["text"] == "x" * 100_000
    large[:] = 7  # seen by who has not sent the parts yet
    assert any(bytes(part) == large.numpy().tobytes() for part in parts)


def test_any_layout_is_sent_to_another_machine() -> None:
    """Values are what they are, whatever lies in memory and whoever else holds it."""
    base = torch.randn(300, 400)
    value = {
        "turned": base.T,
        "wide": torch.tensor(2.5).expand(50_000),
        "complex": torch.randn(40_000, dtype=torch.complex64).conj(),
        "learned": base.clone().requires_grad_(),
        "half": base.bfloat16(),
        "odd": torch.ones(70_001, dtype=torch.uint8),
        "rows": [row.clone() for row in base],
        "large rows": [torch.full((20_001,), float(i)) for i in range(3)],
    }
    _, saves = apart(value)
    for name, expected in value.items():
        both = (
            zip(saves[name], expected, strict=True) if "rows" in name else [(saves[name], expected)]
        )
        assert all(
            torch.equal(bits(one), bits(other.detach().resolve_conj())) for one, other in both
        )
    del value
    assert torch.equal(bits(saves["turned"]), bits(base.T))
