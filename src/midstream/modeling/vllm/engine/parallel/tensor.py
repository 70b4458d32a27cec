"""Tensor parallelism: each rank has a piece of the model, and blocks see whole tensors."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from midstream.errors import MidstreamError, UnsupportedError
from midstream.interleaving.copies import Rows, cut, row_axis
from midstream.interleaving.events import Check, Event
from midstream.interleaving.interleaver import Interleaver
from midstream.interleaving.locations import ENGINE_ORDER, SKIP, Location
from midstream.interleaving.run import Run
from midstream.interleaving.structure import describe, flatten
from midstream.modeling.vllm.engine.parallel.agreement import Agreement, Group
from midstream.modeling.vllm.engine.parallel.sharding import (
    SAME,
    Divided,
    Kind,
    Layout,
    Sum,
)
from midstream.modeling.vllm.engine.parallel.tensor_layouts import Layouts
from midstream.modeling.vllm.engine.parallel.tensor_parameters import Parameters
from midstream.modeling.vllm.engine.parallel.whole import WholeEvent


class TensorRanks:
    """The ranks of one engine, seen from one of them; see ``Across``.

    Args:
        group: the ranks.
        interleaver: this rank's steps.
        parameters: the model's, whole.

    Attributes:
        group: as given.
        layouts: how what modules are called with and return is divided.
    """

    def __init__(self, group: Group, interleaver: Interleaver, parameters: Parameters):
        self.group, self._interleaver, self._parameters = group, interleaver, parameters
        self._agreement = Agreement(group, self._further)
        self.layouts = Layouts()

    def _further(self, run: Run) -> Any:
        """More of what must be alike for a block: what it skips, and how many caches it has."""
        return sorted(self._interleaver.skips.values.get(run, ())), len(run.recorders)

    def begin(self, runs: Sequence[Run]) -> None:
        """Blocks are going to execute."""
        self._agreement.begin(runs)

    def agree(self, runs: Sequence[Run]) -> Sequence[Run]:
        """They have; those that failed on one rank fail on all."""
        return self._agreement.agree(runs)

    # Values of the forward.

    def event(
        self,
        location: Location,
        value: Any,
        sizes: Sequence[int],
        spans: Sequence[Rows],
        check: Check | None = None,
        is_models: Callable[[torch.Tensor], bool] | None = None,
        is_whole: Callable[[torch.Tensor], bool] | None = None,
    ) -> Event:
        """One hand-over with whole tensors; `refused` says why there is none."""
        leaves, _ = flatten(value)
        kinds = self._kinds(location, leaves)
        if all(kind is SAME for kind in kinds):
            return Event(value, sizes, spans, check, is_models, is_whole)
        event = WholeEvent(value, sizes, spans, self.group.rank, check, is_models, is_whole)
        pieces = {
            index: event.rows_of(index) for index, kind in enumerate(kinds) if kind is not SAME
        }
        event.refused, wholes = self._joined(location.name, pieces, kinds)
        event.wholes.update(wholes)
        return event

    def whole(
        self, location: Location, value: Any, sizes: Sequence[int], spans: Sequence[Rows]
    ) -> tuple[Any, Exception | None]:
        """A value with whole tensors; only the rows of the spans are filled."""
        leaves, build = flatten(value)
        kinds = self._kinds(location, leaves)
        if all(kind is SAME for kind in kinds):
            return value, None
        low, high = min(s.start for s in spans), max(s.stop for s in spans)
        axes = [row_axis(leaf, sizes) for leaf in leaves]
        pieces = {
            index: cut(leaves[index], axes[index], low, high)
            for index, kind in enumerate(kinds)
            if kind is not SAME
        }
        refused, wholes = self._joined(location.name, pieces, kinds)
        if refused is None:
            try:
                for index, (whole, _) in wholes.items():
                    leaves[index] = _placed(whole, leaves[index], axes[index], low)
            except Exception as error:  # noqa: BLE001  # no memory left, on this rank
                refused = error
        return build(leaves), refused

    def _kinds(self, location: Location, leaves: Sequence[Any]) -> list[Kind | None]:
        """How each leaf is divided; None for a tensor of which that is not known."""
        if location in ENGINE_ORDER:
            return [SAME] * len(leaves)
        if location.side == SKIP:
            location = location._replace(side="output")
        known = self.layouts
        return [
            known.of(location, index, leaf) if isinstance(leaf, torch.Tensor) else SAME
            for index, leaf in enumerate(leaves)
        ]

    def _joined(
        self, name: str, pieces: dict[int, torch.Tensor], kinds: Sequence[Kind | None]
    ) -> tuple[Exception | None, dict[int, tuple[torch.Tensor, Divided]]]:
        """Whole tensors from all ranks' pieces, where all ranks are at the same place.

        What is not known to be divided is taken for whole if all ranks have the same.
        """
        rooms, error = {}, None
        digest = 1
        try:
            for index, piece in pieces.items():
                if kinds[index] is None:
                    digest = zlib.crc32(_bytes_of(piece), digest)
                else:
                    rooms[index] = self.group.room(piece)
        except Exception as met:  # noqa: BLE001  # no memory left: no rank must wait for this one
            error = met
        words = self._agreement.all_say(-1 if error is not None else digest)
        if -1 in words:
            return error or MidstreamError(_no_memory(name, words.index(-1))), {}
        if len(set(words)) > 1:
            unknown = [describe(pieces[i]) for i in pieces if kinds[i] is None]
            return UnsupportedError(_unknown(name, unknown)), {}
        wholes: dict[int, tuple[torch.Tensor, Divided]] = {}
        for index, room in rooms.items():
            kind = kinds[index]
            assert isinstance(kind, Layout | Sum)
            try:
                found = self.group.pieces(pieces[index], room)
                wholes[index] = kind.join(found), kind
            except Exception as met:  # noqa: BLE001  # as above; the other pieces are still due
                error = error or met
        return error, wholes

    # What blocks call.

    def call(
        self, run: Run, path: str, function: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """A block's own call of a module, or of a method of one, with whole tensors.

        Raises:
            UnsupportedError: it is not known how what it takes or returns is divided.
            MidstreamError: the block has failed on another rank, or went another way there.
        """
        leaves, build = flatten((args, kwargs))
        is_module = isinstance(function, torch.nn.Module)
        if is_module:
            leaves = self.layouts.pieces(path, leaves, self.group.rank)
        what = repr((path, getattr(function, "__name__", ""), describe(leaves)))

        def call() -> Any:
            self._agreement.meet(run, zlib.crc32(what.encode()))
            result, error = None, None
            try:
                args, kwargs = build(leaves)
                result = function(*args, **kwargs)
            except Exception as met:  # noqa: BLE001  # the block's, when the others know of it
                error = met
            if 0 in self._agreement.all_say(int(error is None)):
                raise error or MidstreamError(f"'{path}' could not be called on another rank.")
            return self._result(path, result, is_module=is_module)

        return self._held(run, call)

    def _held(self, run: Run, do: Callable[[], Any]) -> Any:
        """Do something for a block that all ranks take part in: not to be left halfway."""
        held = run.clock.hold()
        try:
            return do()
        finally:
            run.clock.release(held)

    def _result(self, path: str, result: Any, *, is_module: bool) -> Any:
        leaves, build = flatten(result)
        kinds = [
            (self.layouts.returned(path, index, len(leaves), leaf) if is_module else None)
            if isinstance(leaf, torch.Tensor)
            else SAME
            for index, leaf in enumerate(leaves)
        ]
        pieces = {i: leaves[i] for i, kind in enumerate(kinds) if kind is not SAME}
        if pieces:
            refused, wholes = self._joined(f"model.{path}(...)", pieces, kinds)
            if refused is not None:
                raise refused
            for index, (whole, _) in wholes.items():
                leaves[index] = whole
        return build(leaves)

    def parameter(self, run: Run | None, path: str, name: str) -> torch.Tensor:
        """A whole parameter of a module.

        Raises:
            UnsupportedError: it is not known how it is divided.
            MidstreamError: the block has failed on another rank, or went another way there.
        """
        tensor, kind, size = self._parameters.of(path, name)
        if run is None:
            raise MidstreamError("`param()` of an engine's module belongs into a block.")
        if kind is SAME:
            return tensor

        def gather() -> Any:
            self._agreement.meet(run, zlib.crc32(repr((path, name)).encode()))
            return self._joined(f"model.{path}.{name}", {0: tensor}, [kind])

        refused, wholes = self._held(run, gather)
        if refused is not None:
            raise refused
        whole = wholes[0][0] if wholes else self._parameters.same(path, name, tensor)
        return whole if size is None else whole[:size]


def _placed(whole: torch.Tensor, leaf: torch.Tensor, axis: int | None, low: int) -> torch.Tensor:
    """Whole rows where they are in the step."""
    if axis is None or whole.shape[axis] == leaf.shape[axis]:
        return whole
    shape = [*whole.shape]
    shape[axis] = leaf.shape[axis]
    found = whole.new_empty(shape)
    found.narrow(axis, low, whole.shape[axis]).copy_(whole)
    return found


def _bytes_of(tensor: torch.Tensor) -> bytes:
    held = tensor.detach().cpu().contiguous()
    return repr(held.shape).encode() + held.view(torch.uint8).numpy().tobytes()


def _no_memory(name: str, rank: int) -> str:
    return f"Rank {rank} has no memory left to put '{name}' together. Read fewer rows, or less."


def _unknown(name: str, shapes: Sequence[str]) -> str:
    return (
        f"'{name}' differs between the ranks of this engine, and it is not known how it is divided "
        f"among them (this rank has {', '.join(shapes)}). Read what the linear layers and the "
        "attention around it take and return, whose parts are known, or build the model with "
        "tensor_parallel_size=1."
    )
