"""Tensors in a block's values."""

from __future__ import annotations

import pytest

from midstream.tracing import Block, Code, dumps, loads

torch = pytest.importorskip("torch")


def data_of(**values):
    return dumps(Block(code=Code("    pass\n", "f.py", 2), values=values), lambda _: None)


def back(**values):
    return loads(data_of(**values), lambda _: None).values


@pytest.mark.parametrize(
    "dtype",
    [*("float32", "float64", "bfloat16", "float16", "int64", "uint8", "bool"), "complex64"],
)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (2, 0, 3)])
def test_dtypes_and_shapes(dtype, shape):
    """Tensors of every common dtype and shape come back equal."""
    value = torch.arange(6)[: torch.Size(shape).numel()].reshape(shape)
    value = value.to(getattr(torch, dtype))
    got = back(x=value)["x"]
    assert got.dtype == value.dtype
    assert got.shape == value.shape
    assert torch.equal(got, value)


def test_view_does_not_carry_its_storage():
    """One row of a large tensor travels as one row (C25)."""
    large = torch.randn(1000, 1000)
    data = data_of(row=large[3], column=large[:, 3])
    assert len(data) < 2 * 4000 + 2000
    values = loads(data, lambda _: None).values
    assert torch.equal(values["row"], large[3])
    assert torch.equal(values["column"], large[:, 3])


def test_layouts_and_lazy_bits():
    """Transposed, expanded, conjugated and sparse tensors come back with their values."""
    base = torch.randn(3, 4)
    lazy = torch.randn(3, dtype=torch.complex64).conj()
    values = back(t=base.T, e=base[:1].expand(5, 4), c=lazy, s=base.to_sparse())
    assert torch.equal(values["t"], base.T)
    assert torch.equal(values["e"], base[:1].expand(5, 4))
    assert torch.equal(values["c"], lazy)
    assert torch.equal(values["s"].to_dense(), base)


def test_parameters_modules_and_gradients():
    """Parameters stay parameters, modules work, and requires_grad is kept."""
    linear = torch.nn.Linear(3, 2)
    frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    values = back(linear=linear, frozen=frozen, leaf=torch.ones(2, requires_grad=True))
    x = torch.randn(5, 3)
    assert torch.equal(values["linear"](x), linear(x))
    assert [type(p) for p in values["linear"].parameters()] == [torch.nn.Parameter] * 2
    assert type(values["frozen"]) is torch.nn.Parameter
    assert not values["frozen"].requires_grad
    assert values["leaf"].requires_grad


def test_tensor_is_writable_and_shared_by_its_names():
    """A loaded tensor is writable, one tensor under two names stays one, the original is safe."""
    original = torch.zeros(2)
    values = back(a=original, b=original)
    values["a"].add_(1)
    assert values["b"].tolist() == [1, 1]
    assert original.tolist() == [0, 0]


def test_tensors_can_be_saved():
    """A tensor comes back by identity, an equal one does not."""
    from .helpers import Trace

    kept = other = None
    with Trace() as trace:
        kept = torch.ones(2).save()
        other = torch.ones(2)
    assert trace.execution.saves().keys() == {"kept"}
    assert kept.tolist() == [1, 1]
    assert other is None
