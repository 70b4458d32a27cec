"""Where in an autograd graph the gradient of a tensor that a block holds is to be found."""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["Place", "edge_of", "note_origin", "place_of", "version_of"]


class Place(NamedTuple):
    """Rows of the gradient that arrives at an edge.

    Attributes:
        edge: a node of the graph and the number of its output.
        axis: of the rows; None for the whole gradient.
        start, stop: the rows.
    """

    edge: GradientEdge
    axis: int | None = None
    start: int = 0
    stop: int = 0

    def rows(self, gradient: torch.Tensor) -> torch.Tensor:
        """A view of these rows of the gradient at the edge."""
        if self.axis is None:
            return gradient
        return gradient.narrow(self.axis, self.start, self.stop - self.start)

    def written(self, gradient: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """A new gradient: the one at the edge, with `value` in these rows."""
        if self.axis is None:
            return value.to(gradient.device, gradient.dtype, copy=True)
        written = gradient.clone()
        self.rows(written).copy_(value)
        return written


_ORIGINS = WeakTensorKeyDictionary()
"""Place and version of a part: by identity, and as long as it lives, which its graph does too."""


def note_origin(
    part: torch.Tensor, whole: torch.Tensor, axis: int | None, start: int, stop: int
) -> None:
    """Declare that a block was given `part` where the model goes on with `whole`.

    The gradient of `part` is then that of `whole` as it is now, narrowed to the rows. To be called
    when `part` is made; the last call counts. A part that is written to later has a gradient of its
    own, since the model goes on with what was written.

    Args:
        part: a copy or a view of rows of `whole`, differentiable with respect to it.
        whole: what the model goes on with. One that does not require grad has no gradient, and what
            was declared of `part` is forgotten.
        axis, start, stop: which rows; axis None for all that `whole` has.
    """
    if whole.requires_grad:
        place = Place(get_gradient_edge(whole), axis, start, stop)
        _ORIGINS[part] = place, version_of(part)
    else:
        _ORIGINS.pop(part, None)


def place_of(tensor: torch.Tensor) -> Place | None:
    """Where the gradient of a tensor is found; None if it does not require grad."""
    place, version = _ORIGINS.get(tensor, (None, 0))
    if place is not None and version == version_of(tensor):
        return cast(Place, place)
    edge = edge_of(tensor)
    return Place(edge) if edge is not None else None


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was written to; nobody counts it of one made in inference mode."""
    return 0 if tensor.is_inference() else tensor._version


def edge_of(tensor: torch.Tensor) -> GradientEdge | None:
    """Where the gradient of a tensor arrives, whatever it is part of."""
    if not tensor.requires_grad:
        return None
    with torch.inference_mode(False):  # in inference mode no edge is shown
        return get_gradient_edge(tensor)
