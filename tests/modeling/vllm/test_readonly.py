"""Tensors that refuse writes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from midstream.modeling.vllm.engine.readonly import ReadOnlyTensor

NUMBERS = torch.arange(12.0).reshape(3, 4) - 6

WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda x: x.__setitem__(0, 0),
    "augmented": lambda x: x.__iadd__(1),
    "method": lambda x: x.mul_(2),
    "function": lambda x: torch.nn.init.zeros_(x),
    "function of the class": lambda x: torch.Tensor.copy_(x, torch.zeros(3, 4)),
    "list": lambda x: torch._foreach_mul_([torch.zeros(2), x], 2),
    "out": lambda x: torch.add(x, 1, out=x),
    "outs": lambda x: torch.max(torch.zeros(3, 4), 0, out=(x[0], torch.zeros(4).long())),
    "inplace": lambda x: torch.nn.functional.relu(x, inplace=True),
    "data": lambda x: setattr(x, "data", torch.zeros(1)),
    "view": lambda x: x[1:].zero_(),
    "views": lambda x: x.chunk(3)[2].zero_(),
    "view of a view": lambda x: x.T[1].view(-1).zero_(),
    "its data": lambda x: x.data.zero_(),
    "detached": lambda x: x.detach().zero_(),
    "numpy": lambda x: x.numpy().__setitem__(0, 0),
}


@pytest.fixture
def held() -> ReadOnlyTensor:
    """`NUMBERS`, read-only."""
    return ReadOnlyTensor.of(NUMBERS.clone())


@pytest.mark.parametrize("how", WRITES)
def test_writes_are_refused(held: ReadOnlyTensor, how: str) -> None:
    """Whatever way a write takes, it is refused before anything has changed."""
    with pytest.raises(ValueError, match="shared by all requests|read-only"):
        WRITES[how](held)
    assert torch.equal(held.clone(), NUMBERS)


@pytest.mark.parametrize("how", WRITES)
def test_the_same_writes_do_change_an_ordinary_tensor(how: str) -> None:
    """None of these is refused for another reason."""
    plain = NUMBERS.clone()
    WRITES[how](plain)
    assert not torch.equal(plain, NUMBERS)


def test_what_is_computed_from_it_is_ordinary(held: ReadOnlyTensor) -> None:
    """Results and copies are the block's own, and can be written."""
    rows = torch.ones(2, 4)
    computed = {
        "sum": held + 1,
        "inverted": ~ReadOnlyTensor.of(torch.tensor([True])),
        "linear": torch.nn.functional.linear(rows, held),
        "clone": held.clone(),
        "deepcopy": copy.deepcopy(held),
        "stack": torch.stack([held[0], held[1]]),
    }
    for value in computed.values():
        assert type(value) is torch.Tensor
        value[:] = 0
    rows += held[0]
    rows[:] = held[1]
    assert torch.equal(rows, torch.tensor([[-2.0, -1, 0, 1]] * 2))
    assert float(held.sum()) == -6.0
