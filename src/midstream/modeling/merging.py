"""Values of several requests under one name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch


def merge(found: Sequence[Mapping[str, Any]], shared: Mapping[str, Any]) -> dict[str, Any]:
    """Bring the saved values of a trace's requests together.

    Args:
        found: the values of each request, in the order of submission.
        shared: containers saved above the requests, which each of them has filled in a copy of
            its own. Lists and dictionaries are filled in place.

    Returns:
        A value by name: of a shared container itself; of a name that one request saved its value;
        of one that several saved the list of their values.
    """
    names = dict.fromkeys(name for values in found for name in values)
    merged: dict[str, Any] = dict(shared)
    for name in names:
        values = [each[name] for each in found if name in each]
        if name in shared:
            merged[name] = _slot(shared[name], values)
        else:
            merged[name] = values[0] if len(values) == 1 else values
    return merged


def _fill(container: Any, filled: Sequence[Any]) -> Any:
    """Take over what each copy of a container has that the container did not have."""
    if isinstance(container, list):
        size = len(container)
        for slot in range(size):
            container[slot] = _slot(
                container[slot], [copy[slot] for copy in filled if slot < len(copy)]
            )
        for copy in filled:
            container.extend(copy[size:])
        return container
    if isinstance(container, dict):
        before = dict(container)
        for key in dict.fromkeys(key for copy in filled for key in copy):
            values = [copy[key] for copy in filled if key in copy]
            container[key] = _slot(before.get(key), values)
    return container


def _slot(before: Any, values: Sequence[Any]) -> Any:
    """The value of one place: the last that a request put there."""
    if isinstance(before, list | dict):
        copies = [value for value in values if type(value) is type(before)]
        others = [value for value in values if type(value) is not type(before)]
        return others[-1] if others else _fill(before, copies)
    written = [value for value in values if not _same(value, before)]
    return written[-1] if written else before


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return (
            isinstance(a, torch.Tensor)
            and isinstance(b, torch.Tensor)
            and a.shape == b.shape
            and torch.equal(a.cpu(), b.cpu())
        )
    if type(a) is not type(b):
        return False
    try:
        return bool(a == b)
    except Exception:  # noqa: BLE001  # a comparison that fails or has no truth value: not the same
        return False
