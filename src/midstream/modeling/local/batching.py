"""Inputs of several invokes as one batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from midstream.errors import UnsupportedError
from midstream.interleaving.copies import Rows
from midstream.interleaving.structure import describe, flatten, same_shape


class Inputs(NamedTuple):
    """What one invoke is called with."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


class Batch(NamedTuple):
    """What a call is made with, for all invokes together.

    Attributes:
        spans: rows of each invoke.
        total: rows of all.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    spans: Sequence[Rows]
    total: int


def stacked(inputs: Sequence[Inputs]) -> Batch:
    """Inputs of a module, one invoke's tensors behind the other's along their first axis.

    Raises:
        UnsupportedError: the invokes' inputs differ in anything but the first axis.
    """
    lengths = [_rows(one) for one in inputs]
    total, spans = 0, []
    for length in lengths:
        spans.append(Rows(total, total + length))
        total += length
    if len(inputs) == 1:
        return Batch(inputs[0].args, inputs[0].kwargs, spans, total)
    parts = [flatten((one.args, dict(one.kwargs))) for one in inputs]
    leaves = [leaves for leaves, _ in parts]
    _check(inputs)
    joined = [_joined(column, lengths) for column in zip(*leaves, strict=True)]
    args, kwargs = parts[0][1](joined)
    return Batch(args, kwargs, spans, total)


def _rows(inputs: Inputs) -> int:
    if inputs.args and _has_rows(inputs.args[0]):  # most often; the rest need not be looked at
        return len(inputs.args[0])
    for leaf in flatten((inputs.args, dict(inputs.kwargs)))[0]:
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 0:
            return int(leaf.shape[0])
    return 1


def _check(inputs: Sequence[Inputs]) -> None:
    first = _without_rows(inputs[0])
    for one in inputs[1:]:
        if not same_shape(_without_rows(one), first):
            raise UnsupportedError(
                "Several invokes run in one batch, so that their inputs have to have the same "
                f"form but for the first axis: got {_shown(inputs[0])} and {_shown(one)}. Make "
                "them alike, for instance by padding, or trace them one after the other."
            )


def _without_rows(inputs: Inputs) -> Any:
    leaves, build = flatten((inputs.args, dict(inputs.kwargs)))
    return build([leaf[:0] if _has_rows(leaf) else leaf for leaf in leaves])


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0


def _joined(column: Sequence[Any], lengths: Sequence[int]) -> Any:
    if not _has_rows(column[0]):
        return column[0]
    fits = all(len(leaf) == length for leaf, length in zip(column, lengths, strict=True))
    if not fits:
        raise UnsupportedError(
            "Several invokes run in one batch, but a tensor of their inputs has no row for each: "
            f"{', '.join(describe(leaf) for leaf in column)}. Trace them one after the other."
        )
    return torch.cat(list(column))


def _shown(inputs: Inputs) -> str:
    named = [f"{name}={_value(value)}" for name, value in inputs.kwargs.items()]
    return f"({', '.join([*map(_value, inputs.args), *named])})"


def _value(value: Any) -> str:
    """A value for an error text: plain ones as they are, since they may be what differs."""
    plain = isinstance(value, bool | int | float) or (isinstance(value, str) and len(value) < 40)
    return repr(value) if plain else describe(value)
