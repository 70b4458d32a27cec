"""Nested arguments and results of modules, taken apart into leaves and put together again."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch

Leaves = list[Any]

PLAIN = (type(None), bool, int, float, str)
"""Leaves that are the same object or an equal one wherever they turn up."""


_NESTED = (tuple, list, dict)


def _is_record(value: Any) -> bool:
    """Whether a value is a dataclass that holds something to take apart."""
    fields = getattr(type(value), "__dataclass_fields__", ())
    kinds = (torch.Tensor, *_NESTED)
    return any(isinstance(getattr(value, name, None), kinds) for name in fields)


def flatten(value: Any) -> tuple[Leaves, Callable[[Leaves], Any]]:
    """Take nested tuples, lists, dicts and dataclasses apart.

    Returns:
        The leaves in order, and a function that builds the same structure from other leaves.
        The containers it builds are new, so a block never holds the model's own.
    """
    if isinstance(value, torch.Tensor) or value is None:
        return [value], _only
    kind = type(value)
    if (kind is tuple or kind is list) and all(map(_is_leaf, value)):
        return list(value), kind
    if kind is tuple and _are_tensors(value):
        return list(value[0]), _arguments
    leaves: Leaves = []
    build = _take(value, leaves)
    return leaves, lambda new: build(iter(new))


def _is_leaf(item: Any) -> bool:
    return isinstance(item, torch.Tensor) or not (isinstance(item, _NESTED) or _is_record(item))


def _only(leaves: Leaves) -> Any:
    return leaves[0]


def _are_tensors(value: tuple[Any, ...]) -> bool:
    """Whether a value is what a module is called with: tensors alone, and none by keyword."""
    return (
        len(value) == 2
        and type(value[0]) is tuple
        and type(value[1]) is dict
        and not value[1]
        and all(isinstance(item, torch.Tensor) for item in value[0])
    )


def _arguments(leaves: Leaves) -> Any:
    return tuple(leaves), {}


def _take(value: Any, leaves: Leaves) -> Callable[[Iterator[Any]], Any]:
    if isinstance(value, tuple | list):
        kind, parts = type(value), [_take(item, leaves) for item in value]
        return lambda new: _rebuild(kind, [part(new) for part in parts])
    if isinstance(value, dict):
        fields = {key: _take(item, leaves) for key, item in value.items()}
        return lambda new: _refill(value, {key: part(new) for key, part in fields.items()})
    if _is_record(value):
        names = {name: _take(item, leaves) for name, item in _fields(value).items()}
        return lambda new: _rewrite(value, {name: part(new) for name, part in names.items()})
    leaves.append(value)
    return next


def _rebuild(kind: type[Any], items: list[Any]) -> Any:
    if hasattr(kind, "_fields"):
        return kind(*items)
    if kind in (tuple, list) or hasattr(kind, "n_sequence_fields"):  # as `torch.return_types.max`
        return kind(items)
    return tuple(items)


def _refill(value: dict[Any, Any], fields: dict[Any, Any]) -> dict[Any, Any]:
    """A dictionary of the same type, such as HuggingFace's outputs, whose fields are attributes."""
    if type(value) is dict:
        return fields
    made = copy.copy(value)
    for key, field in fields.items():
        made[key] = field
    return made


def _fields(record: Any) -> dict[str, Any]:
    names = type(record).__dataclass_fields__
    return {name: getattr(record, name) for name in names if hasattr(record, name)}


def _rewrite(record: Any, fields: dict[str, Any]) -> Any:
    """A dataclass of the same type with other fields; frozen ones too."""
    made = copy.copy(record)
    for name, field in fields.items():
        object.__setattr__(made, name, field)
    return made


def describe(value: Any) -> str:
    """Shape of a value for an error text: "[5, 576]", "([5, 576], None)", "int"."""
    if isinstance(value, torch.Tensor):
        return str(list(value.shape))
    if isinstance(value, tuple | list):
        return f"({', '.join(describe(item) for item in value)})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {describe(item)}" for key, item in value.items()) + "}"
    if _is_record(value):
        inner = ", ".join(f"{name}={describe(item)}" for name, item in _fields(value).items())
        return f"{type(value).__name__}({inner})"
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
    if _is_record(expected):
        return type(got) is type(expected) and same_shape(_fields(got), _fields(expected))
    return got is expected or bool(type(got) is type(expected) and got == expected)
