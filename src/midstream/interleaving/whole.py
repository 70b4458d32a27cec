"""A value as the only block of a batch is served it.

Most visits are of this kind, and a visit finds the processor's caches full of the model's work:
what counts is how much code it runs through. Reading takes a short way here, and so do edits of
live tensors, which need nothing more. All else goes through the event, see ``live``, made then.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch

from midstream.interleaving.copies import Rows, counting_edits
from midstream.interleaving.events import has_items
from midstream.interleaving.live import LiveEvent, Taken, differs, is_fixed, taken
from midstream.interleaving.locations import Location
from midstream.interleaving.served import Served
from midstream.interleaving.structure import flatten

_is_grad_enabled = torch.is_grad_enabled


class Whole(Served):
    """A value as the only block of a batch sees it.

    Args:
        value: what the module was called with (``(args, kwargs)``) or returned.
        make: makes the event of the value.
        is_callers: whether a tensor is one that the traced call was made with.
        rows: all of the batch's.
        location: where the value is.
    """

    def __init__(
        self,
        value: Any,
        make: Callable[[Any], LiveEvent],
        is_callers: Callable[[torch.Tensor], bool],
        rows: Rows,
        location: Location,
    ):
        self._value, self._make, self._is_callers = value, make, is_callers
        self._leaves, self._build = flatten(value)
        self._rows, self._location, self._log = rows, location, None
        self._taken: dict[int, Taken] = {}
        self._has_event = False
        self._has_items = not isinstance(value, torch.Tensor) and has_items(value)

    @cached_property
    def _event(self) -> LiveEvent:  # type: ignore[override]  # what others are given, made here
        self._has_event = True
        return self._make(self._value).having_given(self._leaves, self._taken)

    def read(self) -> Any:
        """The block's own value; the same object at every read of this visit."""
        if self._mine is None:
            own = self._own if self._has_event else self._take
            mine, versions = [], []
            for index in range(len(self._leaves)):
                leaf = own(index)
                mine.append(leaf)
                versions.append(leaf._version if isinstance(leaf, torch.Tensor) else 0)
            self._mine, self._versions = mine, versions
            self._shown = self._build(mine)
        return self._shown

    def _take(self, index: int) -> Any:
        """As ``LiveEvent.copy`` of all rows."""
        leaf = self._leaves[index]
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if not (leaf.requires_grad and _is_grad_enabled()):
            with counting_edits():
                return leaf.clone()
        if is_fixed(leaf, self._is_callers):  # the block may change its tensor, and not that one
            leaf = self._leaves[index] = leaf.clone()
        self._taken[index] = given = taken(leaf)
        return given.tensor

    @property
    def is_as_read(self) -> bool:
        """Whether the event has nothing to be told of."""
        if self._mine is None:
            return not self._assigned
        if self._has_event or self._has_items:
            return False
        for index, mine in enumerate(self._mine):
            leaf = self._leaves[index]
            if index in self._taken:  # the model goes on with what the block changes in it
                if mine.shape != leaf.shape:
                    return False
            elif mine is not leaf and (
                mine._version != self._versions[index] or differs(mine, leaf)
            ):
                return False
        return True

    def result(self) -> Any:
        """The value the model goes on with, see ``LiveEvent``."""
        if self._has_event:
            return self._event.result()
        if not self._taken:
            return self._value
        leaves = list(self._leaves)
        for index, given in self._taken.items():
            leaves[index] = given.replaced(leaves[index])
        return self._build(leaves)
