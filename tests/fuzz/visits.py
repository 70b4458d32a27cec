"""One value while a block is at its place, as the oracle sees it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

Place = tuple[str, str]
"""A module's path and "input", "skip" or "output"; ("", "logits") and ("", "samples")."""


@dataclass
class Visit:
    """A value while the block is at its place: the model's leaves, and the block's own copies."""

    place: Place
    value: Any
    rows: int | None
    mine: list[Any] = field(default_factory=list)
    assigned: set[int] = field(default_factory=set)
    refused: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.live, self.form = tree_flatten(self.value)
        self.mine = [x.clone() if isinstance(x, torch.Tensor) else x for x in self.live]
        self._reshow()
        self.versions = [getattr(x, "_version", 0) for x in self.mine]

    def _reshow(self) -> None:
        self.shown = tree_unflatten(self.mine, self.form)

    def assign(self, value: Any, first: bool) -> None:
        """Take another value, with the served structure and shapes.

        Raises:
            ValueError: it has others, or a tensor of it has no rows of the request.
        """
        expected = first_argument(self.shown) if first else self.shown
        if not _fits(value, expected):
            raise ValueError("shape")
        for index, new in enumerate(tree_flatten(value)[0]):
            if isinstance(new, torch.Tensor) and new is not self.mine[index]:
                self._refuse_shared(index)
                self.mine[index] = new.detach().to(self.live[index].dtype, copy=True)
                self.assigned.add(index)
                self._reshow()

    def settle(self) -> None:
        """Write what the block changed in place into the model's own tensors.

        Raises:
            ValueError: it changed one that has no rows, or put a tensor into a container.
        """
        own = {id(x) for x in self.mine}
        if any(
            isinstance(x, torch.Tensor) and id(x) not in own for x in tree_flatten(self.shown)[0]
        ):
            self._reshow()
            raise ValueError("put into a container")
        for index, (mine, live) in enumerate(zip(self.mine, self.live, strict=True)):
            if index in self.assigned or not isinstance(mine, torch.Tensor):
                continue
            touched = mine._version != self.versions[index] or not _same(mine, live)
            if touched and not self._has_rows(index) and index not in self.refused:
                self.refused.add(index)
                self._refuse_shared(index)
        pairs = [
            (mine.clone(), live)
            for index, (mine, live) in enumerate(zip(self.mine, self.live, strict=True))
            if isinstance(mine, torch.Tensor)
            and index not in self.assigned
            and self._has_rows(index)
            and not _same(mine, live)
        ]
        for mine, live in pairs:
            live.copy_(mine)

    def result(self) -> Any:
        """What the model goes on with."""
        if not self.assigned:
            return self.value
        leaves = [
            m.clone() if i in self.assigned else x  # the block keeps its own
            for i, (m, x) in enumerate(zip(self.mine, self.live, strict=True))
        ]
        return tree_unflatten(leaves, self.form)

    def _has_rows(self, index: int) -> bool:
        return self.rows is None or self.live[index].shape[0] == self.rows

    def _refuse_shared(self, index: int) -> None:
        if not self._has_rows(index):
            raise ValueError("shared")


def first_argument(call: Any) -> Any:
    args, kwargs = call
    return [*args, *kwargs.values()][0]


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.nan_to_num(7.25), b.nan_to_num(7.25)) and torch.equal(a.isnan(), b.isnan())


def _fits(got: Any, expected: Any) -> bool:
    if isinstance(expected, torch.Tensor):
        return isinstance(got, torch.Tensor) and got.shape == expected.shape
    if isinstance(expected, dict):
        return (
            isinstance(got, dict)
            and list(got) == list(expected)
            and all(_fits(got[k], expected[k]) for k in got)
        )
    if isinstance(expected, tuple | list):
        return (
            isinstance(got, tuple | list)
            and len(got) == len(expected)
            and all(map(_fits, got, expected))
        )
    return got is expected or (type(got) is type(expected) and got == expected)
