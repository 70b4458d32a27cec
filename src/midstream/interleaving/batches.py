"""Rows of several requests that are recorded together: copied once, cut when somebody looks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from itertools import accumulate, count
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from midstream.interleaving.copies import Rows, counting_edits, cut, row_axis
from midstream.interleaving.locations import Location
from midstream.interleaving.mirroring import Mirroring, Spot
from midstream.interleaving.structure import PLAIN, Leaves, flatten

if TYPE_CHECKING:
    from midstream.interleaving.run import Run


class Form(NamedTuple):
    """In what form values are kept; see ``Wanted``.

    Attributes:
        stays: whether what is wanted on the CPU stays where it is for the time being, as somebody
            brings it there.
    """

    device: torch.device | None = None
    dtype: torch.dtype | None = None
    non_blocking: bool = False
    detach: bool = True
    stays: bool = False

    def bare(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, without its gradients unless they are wanted."""
        return tensor.detach() if self.detach else tensor

    def made_of(self, tensor: torch.Tensor, *, copy: bool) -> torch.Tensor:
        """The tensor in this form; ``copy`` even if it has it."""
        return tensor.to(
            device=tensor.device if self.stays else self.device or tensor.device,
            dtype=self.dtype if self.dtype and tensor.is_floating_point() else tensor.dtype,
            non_blocking=self.is_beside(tensor),
            copy=copy,
        )

    def is_beside(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is copied beside the forward, so that the copy has to be waited for."""
        return self.non_blocking and tensor.is_cuda and not self.stays


class Spans:
    """Where the rows of several requests are, and the pieces that a copy of them is cut into.

    They are copied with the rows between them, unless those are more than their own.

    Args:
        spans: in order, none overlapping another.

    Attributes:
        lengths: rows of each piece of a copy.
        places: by request, which piece has its rows.
        starts: by piece, where it begins.
        most: rows of the largest request.
    """

    def __init__(self, spans: Sequence[Rows]):
        own = [span.stop - span.start for span in spans]
        self._spans, self._low, self._high = spans, spans[0].start, spans[-1].stop
        self._apart = self._high - self._low > 2 * sum(own)
        self._indices: dict[torch.device, torch.Tensor] = {}
        self.most, self.places = max(own), []
        self.lengths: list[int] = []
        at = self._low
        for span, length in zip(spans, own, strict=True):
            if span.start > at and not self._apart:
                self.lengths.append(span.start - at)
            self.places.append(len(self.lengths))
            self.lengths.append(length)
            at = span.stop
        self.starts = [0, *accumulate(self.lengths)][:-1]

    def copy(self, leaf: torch.Tensor, axis: int, form: Form) -> torch.Tensor:
        """A copy of the requests' rows."""
        if self._apart:
            rows = form.bare(leaf).index_select(axis, self._index(leaf.device))
            return form.made_of(rows, copy=False)
        return form.made_of(cut(form.bare(leaf), axis, self._low, self._high), copy=True)

    def _index(self, device: torch.device) -> torch.Tensor:
        if device not in self._indices:
            rows = [row for span in self._spans for row in range(span.start, span.stop)]
            self._indices[device] = torch.tensor(rows, dtype=torch.int64, device=device)
        return self._indices[device]


class Kept:
    """What is kept of one call of a module, for several requests.

    Args:
        location: one side of the module.
        number: place among all that is recorded in the engine.
        call: what it was called with or returned.
        spans, form: which rows are kept, and how.

    Attributes:
        under_way: whether the copies have to be waited for.
        a_row, whole: bytes of one row, and of all that has no rows.
        axes: by leaf, the axis that runs over rows.
        spots: by leaf, where its copy goes; None for leaves that are no tensors, and as a whole if
            one of the copies stays here.
    """

    spots: Sequence[Spot | None] | None = None

    def __init__(self, location: Location, number: int, call: Call, spans: Spans, form: Form):
        self.location, self.number, self.under_way = location, number, False
        self.a_row = self.whole = 0
        self._build, self.axes, self._is_flat = call.build, call.axes, call.is_flat
        self._device = form.device if form.stays else None
        self._lengths = spans.lengths
        with counting_edits():
            self._leaves = [
                self._copied(leaf, axis, spans, form)
                for leaf, axis in zip(call.leaves, call.axes, strict=True)
            ]

    def _copied(self, leaf: Any, axis: int | None, spans: Spans, form: Form) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf if isinstance(leaf, PLAIN) else None
        self.under_way = self.under_way or form.is_beside(leaf)
        if axis is None:
            copy = form.made_of(form.bare(leaf), copy=True)
            self.whole += copy.nbytes
        else:
            copy = spans.copy(leaf, axis, form)
            self.a_row += copy.nbytes // max(copy.shape[axis], 1)
        return copy

    def send(self, mirroring: Mirroring, runs: frozenset[Run]) -> None:
        """Have the copies sent home, for some blocks."""
        spots = [
            mirroring.keep(leaf, runs, partial(self._let_go, index))
            if isinstance(leaf, torch.Tensor)
            else None
            for index, leaf in enumerate(self._leaves)
        ]
        tensors = sum(isinstance(leaf, torch.Tensor) for leaf in self._leaves)
        if sum(spot is not None for spot in spots) == tensors:
            self.spots = spots
        self._sent = spots

    _sent: Sequence[Spot | None] = ()

    def _let_go(self, index: int) -> None:
        """A copy has got to where it goes."""
        if not self._is_here:
            self._leaves[index] = None

    _is_here = False

    def _bring(self) -> None:
        """Have all copies here, for somebody looks at them."""
        self._is_here = True
        with counting_edits():
            for index, spot in enumerate(self._sent):
                leaf = spot.load() if spot is not None else None
                if leaf is not None:
                    self._leaves[index] = leaf
            if self._device is not None:
                self._leaves = [_on(self._device, leaf) for leaf in self._leaves]

    def form(self) -> Any:
        """What the module was called with or returned, with a ``Hole`` for each tensor."""
        number = count()
        return self._build(
            [
                leaf if spot is None else Hole(next(number))
                for leaf, spot in zip(self._leaves, self.spots or (), strict=True)
            ]
        )

    def value(self, place: int) -> Any:
        """One request's value, which nobody else is given: called once for each piece."""
        if not self._is_here and (self._sent or self._device is not None):
            self._bring()
        if self._flat is not None:
            return self._flat[place]
        return self._build(
            [
                _private(leaf) if axis is None else pieces[place]
                for leaf, axis, pieces in zip(self._leaves, self.axes, self._pieces, strict=True)
            ]
        )

    @cached_property
    def _flat(self) -> Sequence[Any] | None:
        """The values of all pieces, where that takes no Python for each."""
        if not self._is_flat:
            return None
        if self._build is not tuple:
            return self._pieces[0]
        return list(zip(*self._pieces, strict=True))

    @cached_property
    def _pieces(self) -> list[Sequence[Any]]:
        """The pieces of each copy; what has no rows is in all of them.

        They are no views for PyTorch: their elements are their own, and so are their edits.
        """
        lengths = self._lengths
        if len(lengths) == 1:
            return [(leaf,) for leaf in self._leaves]
        with counting_edits():
            return [
                [leaf] * len(lengths)
                if axis is None
                else torch.unsafe_split_with_sizes(leaf, lengths, axis)
                for leaf, axis in zip(self._leaves, self.axes, strict=True)
            ]


class Hole:
    """The place of a tensor, by its number among the tensors of a value."""

    def __init__(self, number: int):
        self.number = number


def _on(device: torch.device, leaf: Any) -> Any:
    return leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf


def _private(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    with counting_edits():
        return leaf.clone()


class Call(NamedTuple):
    """What a module was called with or returned, taken apart once for all who record it.

    Attributes:
        axes: by leaf, the axis that runs over rows.
        is_flat: whether it is a tensor, or a plain tuple of leaves, in which all tensors have rows.
    """

    leaves: Leaves
    axes: list[int | None]
    build: Callable[[Leaves], Any]
    is_flat: bool

    @classmethod
    def of(cls, value: Any, sizes: Sequence[int]) -> Call:
        """Take a value apart."""
        leaves, build = flatten(value)
        axes = [row_axis(leaf, sizes) for leaf in leaves]
        is_flat = (build is tuple and bool(leaves)) or isinstance(value, torch.Tensor)
        return cls(leaves, axes, build, is_flat and all(map(_has_rows, leaves, axes)))


def _has_rows(leaf: Any, axis: int | None) -> bool:
    return axis is not None or not isinstance(leaf, torch.Tensor)
