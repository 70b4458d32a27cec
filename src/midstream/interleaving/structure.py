"""Nested arguments and results of modules, taken apart into leaves and put together again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

Leaves = list[Any]

PLAIN = (type(None), bool, int, float, str)
"""Leaves that are the same object or an equal one wherever they turn up."""


_NESTED = (tuple, list, dict)


def flatten(value: Any) -> tuple[Leaves, Callable[[Leaves], Any]]:
    """Take nested tuples, lists and dicts apart.

    Returns:
        The leaves in order, and a function that builds the same structure from other leaves.
        The containers it builds are new, so a block never holds the model's own.
    """
    if isinstance(value, torch.Tensor) or value is None:
        return [value], _only
    kind = type(value)
    if (kind is tuple or kind is list) and not any(isinstance(item, _NESTED) for item in value):
        return list(value), kind
    leaves: Leaves = []
    build = _take(value, leaves)
    return leaves, lambda new: build(iter(new))


def _only(leaves: Leaves) -> Any:
    return leaves[0]


def _take(value: Any, leaves: Leaves) -> Callable[[Iterator[Any]], Any]:
    if isinstance(value, tuple | list):
        kind, parts = type(value), [_take(item, leaves) for item in value]
        return lambda new: _rebuild(kind, [part(new) for part in parts])
    if isinstance(value, dict):
        fields = {key: _take(item, leaves) for key, item in value.items()}
        return lambda new: {key: part(new) for key, part in fields.items()}
    leaves.append(value)
    return next


def _rebuild(kind: type[Any], items: list[Any]) -> Any:
    if hasattr(kind, "_fields"):
        return kind(*items)
    if kind in (tuple, list) or hasattr(kind, "n_sequence_fields"):  # as `torch.return_types.max`
        return kind(items)
    return tuple(items)


def describe(value: Any) -> str:
    """Shape of a value for an error text: "[5, 576]", "([5, 576], None)", "int"."""
    if isinstance(value, torch.Tensor):
        return str(list(value.shape))
    if isinstance(value, tuple | list):
        return f"({', '.join(describe(item) for item in value)})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {describe(item)}" for key, item in value.items()) + "}"
    return "None" if value is None else type(value).__name__


def same_shape(got: Any, expected: Any) -> bool:
    """Whether two structures have the same containers, and tensors of the same shape."""
    if isinstance(expected, torch.Tensor):
        return isinstance(got, torch.Tensor) and got.shape == expected.shape
    if isinstance(expected, tuple | list):
        return (
            isinstance(got, tuple | list)
            and len(got) == len(expected)
            and all(map(same_shape, got, expected))
        )
    if isinstance(expected, dict):
        return (
            isinstance(got, dict)
            and got.keys() == expected.keys()
            and all(same_shape(got[key], expected[key]) for key in expected)
        )
    return got is expected or bool(type(got) is type(expected) and got == expected)
