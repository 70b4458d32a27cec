"""Hand-overs in the caller's own process, where values carry gradients.

A tensor that gradients flow through is given to a block as it is: what the block computes from it,
`retain_grad` and `torch.autograd.grad` included, is as in the model's own code. The model goes on
with a copy, so that the block's tensor stays what it was. Where nothing but the model's Python code
holds the tensor, the copy takes its place in that very object: code that writes into it later, as
`x += layer(x)` does, writes into the copy, and whatever else knows the object sees that.
A tensor without gradients is copied for the block, as everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from operator import methodcaller
from typing import Any, NamedTuple, Self
from weakref import getweakrefcount

import torch

from midstream.interleaving.copies import (
    Edit,
    Rows,
    counting_edits,
    cut,
    row_axis,
    same_bytes,
)
from midstream.interleaving.events import Check, Event
from midstream.interleaving.gradients import note_origin
from midstream.interleaving.served import Bundle


class LiveEvent(Event):
    """The live value of one location in one forward, for blocks in the same process.

    Args:
        value, sizes, spans, check, is_models, is_whole: as in ``Event``.
        total: rows of the batch.
        is_callers: whether a tensor is one that the traced call was made with.
        tokens: of each row; a tensor of that many rows for each of the batch's is cut too.
    """

    shared_since = (
        "whose first axis is not the batch's: all invokes share it, so no block of several may "
        "change it. Give that input a trace of its own."
    )

    def __init__(
        self,
        value: Any,
        sizes: Sequence[int],
        spans: Sequence[Rows],
        check: Check | None = None,
        is_models: Callable[[torch.Tensor], bool] | None = None,
        is_whole: Callable[[torch.Tensor], bool] | None = None,
        *,
        total: int,
        is_callers: Callable[[torch.Tensor], bool] | None = None,
        tokens: int = 1,
    ):
        super().__init__(value, sizes, spans, check, is_models, is_whole)
        self._total, self._is_callers, self._tokens = total, is_callers, tokens
        self._flat: set[int] = set()
        self._given: dict[int, Taken] = {}

    def axis(self, index: int) -> int | None:
        """The axis that runs over rows, or over all rows' tokens, as in a mixture of experts."""
        if self._tokens > 1 and index not in self._axes:
            leaf = self.leaves[index]
            many = self._total * self._tokens
            is_flat = type(leaf) is torch.Tensor and leaf.dim() > 0 and leaf.shape[0] == many
            if is_flat and row_axis(leaf, self._sizes) is None:
                self._axes[index] = 0
                self._flat.add(index)
        return super().axis(index)

    def _cut(self, index: int, rows: Rows, leaf: torch.Tensor | None = None) -> Any:
        """A request's rows of a leaf, or of a tensor of its form."""
        axis = self.axis(index)
        whole = self.leaves[index] if leaf is None else leaf
        return cut(whole, axis, *self._in_leaf(index, rows))

    def _in_leaf(self, index: int, rows: Rows) -> Rows:
        times = self._tokens if index in self._flat else 1
        return Rows(rows.start * times, rows.stop * times)

    def live(self, index: int, rows: Rows) -> Any:
        """A leaf's rows as the model goes on with them (tensors without a row axis: whole)."""
        replaced = self._replaced.get(index)
        if replaced and rows in replaced:
            return replaced[rows]
        return self._cut(index, rows)

    def _is_all(self, index: int, rows: Rows) -> bool:
        """Whether a request's rows are all that a leaf has."""
        return rows == (0, self._total)

    def is_shared(self, index: int, rows: Rows) -> bool:
        """Whether a leaf has no rows, and other requests of the batch see it too."""
        return self.axis(index) is None and not self._is_all(index, rows)

    def private(self, value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """A copy that nobody else holds; gradients flow through it to what it is made of."""
        with counting_edits():
            return value.to(like.device, like.dtype, copy=True)

    def bare(self, value: torch.Tensor) -> torch.Tensor:
        """The tensor itself, with its gradients."""
        return value

    def is_changed(self, index: int, value: torch.Tensor, rows: Rows) -> bool:
        """Whether a block's tensor, whose version is as it was, is another for the model."""
        if index in self._given:
            return False
        return differs(value, self.live(index, rows))

    def copy(self, index: int, rows: Rows) -> Any:
        """A block's own tensor: the live one if gradients flow through it, else a copy."""
        leaf = self.leaves[index]
        if not isinstance(leaf, torch.Tensor):
            return leaf
        axis = self.axis(index)
        if not (leaf.requires_grad and torch.is_grad_enabled()):
            with counting_edits():
                return self._cut(index, rows).clone()
        if self._is_all(index, rows):
            if self._is_fixed(leaf):  # the block may change its tensor, and not that one
                leaf = self.leaves[index] = leaf.clone()
            self._given[index] = given = taken(leaf)
            return given.tensor
        part = self._cut(index, rows).clone()
        note_origin(part, leaf, axis, *self._in_leaf(index, rows))
        return part

    def having_given(self, leaves: list[Any], given: dict[int, Taken]) -> Self:
        """The event after its only block has read it: what the model has, and what the block."""
        self.leaves, self._given = leaves, given
        return self

    def bundle(self, rows: Rows) -> Bundle | None:
        """None: each request's tensors are made on their own."""
        return None

    def edit(self, index: int, edit: Edit) -> None:
        """Take what a block changed in its tensor of a leaf, at once.

        Raises:
            RuntimeError: its tensor was given a shape that does not fit.
        """
        if self._check is not None:
            self._check(index, edit.value, edit.rows)
        live = self.live(index, edit.rows)
        if index in self._given:  # it is the live one
            edit.value.expand(live.shape)
            return
        value = edit.value.expand(live.shape)
        if self._must_replace(self.leaves[index]):
            self._replaced.setdefault(index, {})[edit.rows] = value
        else:
            self._write(index, edit.rows, value)

    def flush(self) -> list[tuple[Rows, Exception]]:
        """Nothing: edits are taken at once."""
        return []

    def _write(self, index: int, rows: Rows, value: torch.Tensor) -> None:
        leaf = self.leaves[index]
        with torch.inference_mode() if leaf.is_inference() else nullcontext():
            self._cut(index, rows).copy_(value)

    def _must_replace(self, leaf: torch.Tensor) -> bool:
        """Whether a leaf must not be written into: it is the model's own, or the caller's."""
        return self._is_fixed(leaf) or (self._is_models is not None and self._is_models(leaf))

    def _is_fixed(self, leaf: torch.Tensor) -> bool:
        """Whether autograd refuses to write into a leaf, or the caller holds it."""
        return is_fixed(leaf, self._is_callers)

    def result(self) -> Any:
        """The value the model goes on with, which shares no memory with what a block was given."""
        if not self._replaced and not self._given:
            return self._value
        leaves = list(self.leaves)
        for index, given in self._given.items():
            leaves[index] = given.replaced(leaves[index])
        for index in self._replaced:
            leaves[index] = self._with_replaced(index)
        return self._build(leaves)

    def _with_replaced(self, index: int) -> torch.Tensor:
        values = self._replaced[index]
        for rows, value in reversed(values.items()):
            if self._is_all(index, rows):
                return value.clone()
        new: torch.Tensor = self.leaves[index].clone()
        for rows, value in values.items():
            self._cut(index, rows, new).copy_(value)
        return new


class Taken(NamedTuple):
    """A live tensor that a block has been given.

    Attributes:
        tensor: what the block holds.
        is_swapped: whether it is another object than the model's, which stands for nothing until
            it is filled.
    """

    tensor: torch.Tensor
    is_swapped: bool

    def replaced(self, leaf: torch.Tensor) -> torch.Tensor:
        """What the model goes on with: a copy, in the object that it holds if that can be."""
        copied = self.tensor.clone()
        return leaf if self.is_swapped and _swapped(leaf, copied) else copied


def taken(leaf: torch.Tensor) -> Taken:
    """The live tensor for a block; the model keeps the object, which ``replaced`` fills."""
    mine = leaf.detach()
    if type(leaf) is torch.Tensor and not leaf.is_leaf and _swapped(leaf, mine):
        return Taken(mine, is_swapped=True)
    return Taken(leaf, is_swapped=False)


def is_fixed(leaf: torch.Tensor, is_callers: Callable[[torch.Tensor], bool] | None) -> bool:
    """Whether autograd refuses to write into a leaf, or the caller holds it."""
    base = leaf._base if leaf._is_view() and leaf._base is not None else leaf
    if base.is_leaf and base.requires_grad:
        return True
    if base is not leaf and leaf.requires_grad and _creation_of(leaf) != _BY_AUTOGRAD:
        return True  # as the parts that `split` gives
    return is_callers is not None and is_callers(leaf)


def differs(value: torch.Tensor, live: torch.Tensor) -> bool:
    """Whether a block's copy, whose version is as it was, is another tensor for the model."""
    if value.requires_grad and not live.requires_grad:  # `x.requires_grad_()`
        return True
    if not _has_bytes(value) or torch.equal(value, live):
        return False
    return not same_bytes(value.detach(), live.detach())


_creation_of: Any = torch._C._autograd._get_creation_meta
_BY_AUTOGRAD: Any = torch._C._autograd.CreationMeta.DEFAULT


# As `torch.utils.swap_tensors`, but that attributes of the objects stay where they are.
_swap: Any = torch._C._swap_tensor_impl
_holders: Any = methodcaller("_use_count")


def _swapped(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Exchange what two tensor objects stand for, unless more than these objects hold it."""
    if _holders(a) > 1 or _holders(b) > 1 or getweakrefcount(a) or getweakrefcount(b):
        return False
    _swap(a, b)
    return True


def _has_bytes(tensor: torch.Tensor) -> bool:
    """Whether a tensor's numbers can be looked at here and now: not on a GPU, and no fake."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.device.type == "cpu"
