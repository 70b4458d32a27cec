"""Nested values, taken apart and put together again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from midstream.interleaving.structure import flatten

A, B = torch.zeros(1), torch.ones(2)


@pytest.mark.parametrize(
    ("value", "leaves"),
    [
        (((A, B), {}), [A, B]),
        (((), {}), []),
        (((A, None), {}), [A, None]),
        (((A,), {"mask": B}), [A, B]),
        (((A, (B, None)), {}), [A, B, None]),
        (([A], {}), [A]),
        (((A,), {}, B), [A, B]),
    ],
)
def test_what_modules_are_called_with(value: tuple[Any, ...], leaves: list[Any]) -> None:
    """Arguments come apart in their order, and others are put in their places in new containers."""
    found, build = flatten(value)
    assert len(found) == len(leaves)
    assert all(one is other for one, other in zip(found, leaves, strict=True))
    again = build(list(range(len(leaves))))
    numbers = iter(range(len(leaves)))
    assert again == _numbered(value, numbers)
    assert again[1] is not value[1]


def _numbered(value: Any, numbers: Any) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(_numbered(each, numbers) for each in value)
    if isinstance(value, dict):
        return {key: _numbered(each, numbers) for key, each in value.items()}
    return next(numbers)
