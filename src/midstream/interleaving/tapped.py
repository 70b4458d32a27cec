"""A forward that is recorded once, with breaks at some locations, and run again step by step.

Between the breaks it runs as it was recorded, without Python: as CUDA graphs, say. At a break the
blocks that wait there are given the values, which lie in the recording's own memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch

from midstream.interleaving.copies import row_axis
from midstream.interleaving.locations import Location
from midstream.interleaving.offers import Offer
from midstream.interleaving.replacing import Forward, Replacing
from midstream.interleaving.routes import Needs
from midstream.interleaving.structure import flatten

if TYPE_CHECKING:
    from midstream.interleaving.interleaver import Interleaver


class Missed(Exception):  # noqa: N818  # no error: it ends a run that cannot serve a block
    """A block asked for something that a recorded forward has no break for."""


class Recorder(Protocol):
    """Makes something that can be run again of the forward that is under way."""

    def hold(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor as a break finds it in each run; holding on to it keeps no memory."""

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy that each run makes anew, of what the tensor then holds at this place."""

    def pause(self, serve: Callable[[], None]) -> None:
        """Put a break here, at which ``serve`` is called in each run."""


class Tapped:
    """A forward with breaks at what some blocks write, and copies of what they only read.

    The copies are given to blocks at the next break, or when the forward is over: it does not stop
    for them.

    Args:
        interleaver: serves the blocks.
        needs: where there are breaks, and copies. In the place of a leaf that is replaced the
            forward goes on with a tensor of its own, so that other holders of the module's keep
            theirs.

    Attributes:
        live: whether blocks are served; while it is recorded they are not.
        complete: whether it has breaks at all that blocks may ask for, so that it serves them all.
    """

    complete = False

    def __init__(self, interleaver: Interleaver, needs: Needs):
        self._interleaver, self.needs = interleaver, needs
        self._kept: list[Offer] = []
        self._sizes: Sequence[int] = ()
        self.live = False

    def record(
        self,
        recorder: Recorder,
        forward: Forward,
        kwargs: dict[str, Any],
        sizes: Sequence[int] = (),
    ) -> Any:
        """Run the model's forward and have it recorded.

        Args:
            kwargs: what it is called with.
            sizes: lengths along which a tensor counts as one row a token; without any, there is a
                break at each location.

        Returns:
            What it returns.
        """
        self._sizes, self._kept = sizes, []
        modules = dict(self._interleaver.modules)
        replacing = Replacing(modules, partial(self._with_breaks, recorder))
        try:
            for path in self.paths - {""}:
                replacing.replace(path)
            return self._with_breaks(recorder, "", forward)(**kwargs)
        finally:
            replacing.restore()

    @property
    def paths(self) -> set[str]:
        """The modules that have breaks."""
        return {location.path for location in self.needs.locations}

    def _with_breaks(self, recorder: Recorder, path: str, forward: Forward) -> Forward:
        entry, leave = Location(path, "input"), Location(path, "output")
        enters, leaves = (place in self.needs.locations for place in (entry, leave))

        def tapped(*args: Any, **kwargs: Any) -> Any:
            if self._interleaver.is_paused:
                return forward(*args, **kwargs)
            if enters:
                args, kwargs = self._break(recorder, entry, (args, kwargs))
            value = forward(*args, **kwargs)
            return self._break(recorder, leave, value) if leaves else value

        return tapped

    def _break(self, recorder: Recorder, location: Location, value: Any) -> Any:
        leaves, build = flatten(value)
        if self._can_be_kept(location, leaves):
            self._kept.append((location, build([_map(recorder.keep, leaf) for leaf in leaves])))
            return value
        before, self._kept = self._kept, []
        held = [_map(recorder.hold, leaf) for leaf in leaves]
        own = {
            index: torch.empty_like(leaf)
            for index, leaf in enumerate(leaves)
            if (location, index) in self.needs.replaced
        }
        buffers = {index: recorder.hold(leaf) for index, leaf in own.items()}
        recorder.pause(partial(self._serve, before, location, build(held), buffers))
        return build([own.get(i, leaf) for i, leaf in enumerate(leaves)]) if own else value

    def _can_be_kept(self, location: Location, leaves: Sequence[Any]) -> bool:
        """Whether no block writes there, and all tensors are of the step's tokens."""
        return location not in self.needs.written and all(
            row_axis(leaf, self._sizes) is not None
            for leaf in leaves
            if isinstance(leaf, torch.Tensor)
        )

    def finish(self) -> None:
        """Serve what lies behind the last break, when a run is over."""
        if self.live:
            self._offer(self._kept)

    def _offer(self, kept: Sequence[Offer]) -> None:
        if kept:
            self._interleaver.offer(kept)
        if self._interleaver.tapping.has_missed:
            raise Missed

    def _serve(
        self,
        before: Sequence[Offer],
        location: Location,
        value: Any,
        buffers: Mapping[int, torch.Tensor],
    ) -> None:
        if not self.live:
            return
        self._offer(before)
        given = self._interleaver.serve(location, value)
        if buffers or given is not value:
            _fill(buffers, flatten(value)[0], flatten(given)[0])
        if self._interleaver.tapping.has_missed:
            raise Missed


def _fill(buffers: Mapping[int, torch.Tensor], leaves: list[Any], given: list[Any]) -> None:
    """Put what the forward is to go on with where it will look for it."""
    for index, (leaf, new) in enumerate(zip(leaves, given, strict=True)):
        if index in buffers:
            buffers[index].copy_(new)
        elif new is not leaf:
            raise Missed


def _map(function: Callable[[torch.Tensor], torch.Tensor], leaf: Any) -> Any:
    return function(leaf) if isinstance(leaf, torch.Tensor) else leaf
