"""Values to nodes, in the engine."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from midstream.errors import TransportError
from midstream.modeling.vllm.payloads.buffers import Buffers, are_alike
from midstream.modeling.vllm.payloads.handlers import FIX, Refused, handler_for
from midstream.modeling.vllm.payloads.nodes import DTYPE_NAMES, Mirrored, Node, Run
from midstream.modeling.vllm.payloads.places import Places
from midstream.modeling.vllm.payloads.sheets import Sheets

RUN_BYTES = 8 << 20  # a longer run is several buffers, which can be written at once
MAX_DEPTH = 100  # containers inside one another; far below Python's and msgspec's own limits


class Encoder:
    """Turns the values of one record into nodes; the bytes of their tensors go to `buffers`.

    A tensor that occurs twice in the record has one buffer and comes back as one object. Tensors
    of one shape that follow each other in a container are one buffer and one node.

    Args:
        buffers: of the message.
        places: where the record's tensors lie in mirrors.
        sheets: what the message has of caches.
    """

    def __init__(
        self, buffers: Buffers, places: Places | None = None, sheets: Sheets | None = None
    ) -> None:
        self.buffers, self.places, self.sheets = buffers, places, sheets
        self._indices: dict[int, tuple[int, int | None]] = {}
        self._kept: list[object] = []  # ids in `_indices` stay theirs only while these live
        self._open: set[int] = set()

    def encode(self, value: Any, name: str) -> Node:
        """Make the node of a value; `name` is how an error refers to it.

        Raises:
            TransportError: The value, or something in it, cannot travel. It leaves no buffers.
        """
        mark = len(self.buffers)
        try:
            return self.node(value)
        except Refused as refused:
            problem = f"{name}{''.join(reversed(refused.steps))} is {refused}"
        except Exception as error:  # noqa: BLE001 - a user's class may raise anything when read
            problem = f"{name} cannot be read to be sent: {type(error).__name__}: {error}; {FIX}"
        self._open.clear()
        self.buffers.truncate(mark)
        self._indices = {key: found for key, found in self._indices.items() if found[0] < mark}
        raise TransportError(problem)

    def node(self, value: Any) -> Node:
        """Make the node of a value inside one that `encode` was called with."""
        return handler_for(value)(self, value)

    def children(
        self, owner: object, values: Iterable[Any], step: Callable[[int], str]
    ) -> list[Node]:
        """Make the nodes of a container's values; `step(i)` is the path to the i-th."""
        if isinstance(values, list | tuple) and self.places is not None:
            found = self._mirrored(owner, values, step)
            if found is not None:
                return found
        self._enter(owner)
        if isinstance(values, list | tuple) and self._are_new(values) and are_alike(values):
            self._open.discard(id(owner))
            return self._runs(values)
        made: list[Node] = []
        try:
            for value in values:
                made.append(self.node(value))  # noqa: PERF401 - its length is the failing index
        except Refused as refused:
            refused.steps.append(step(len(made)))
            raise
        self._open.discard(id(owner))
        return made

    def tensor_index(self, tensor: torch.Tensor) -> tuple[int, int | None]:
        """Return the buffer of a tensor and its place in it, the same for the same object."""
        found = self._indices.get(id(tensor))
        if found is None:
            found = self._indices[id(tensor)] = self.buffers.add_tensor(tensor), None
            self._kept.append(tensor)
        return found

    def _mirrored(
        self, owner: object, values: Sequence[Any], step: Callable[[int], str]
    ) -> list[Node] | None:
        """Make the nodes of tensors some of which lie in mirrors; None if none does."""
        assert self.places is not None
        whole = self.places.all_of(owner)
        if whole is not None:
            return [Mirrored(*whole)]
        places = self.places.of(owner)
        if places is None or max(places) < 0:
            return None
        made: list[Node] = []
        start = 0
        for distance, same in itertools.groupby(enumerate(places), _distance):
            end = start + len(list(same))
            if distance is None:
                made += self._others(values[start:end], start, step)
            else:
                made.append(Mirrored(places[start], end - start))
            start = end
        return made

    def _others(self, values: Sequence[Any], start: int, step: Callable[[int], str]) -> list[Node]:
        return self.children(values, values, lambda index: step(start + index))

    def _are_new(self, values: Sequence[object]) -> bool:
        ids = list(map(id, values))
        return self._indices.keys().isdisjoint(ids) and len(set(ids)) == len(ids)

    def _runs(self, tensors: Sequence[torch.Tensor]) -> list[Node]:
        """Make the nodes of tensors for which `are_alike` holds, one for neighbours alike."""
        made: list[Node] = []
        start = 0
        for _, same in itertools.groupby([tensor.shape for tensor in tensors]):
            end = start + len(list(same))
            most = max(1, RUN_BYTES // max(1, tensors[start].nbytes))
            for first in range(start, end, most):
                made += self._run(tensors[first : min(end, first + most)])
            start = end
        return made

    def _run(self, tensors: Sequence[torch.Tensor]) -> list[Node]:
        first, count = tensors[0], len(tensors)
        if count == 1 or not first.nbytes:
            return list(map(self.node, tensors))
        index = self.buffers.add_run(tensors)
        places = zip([index] * count, range(count), strict=True)
        self._indices.update(zip(map(id, tensors), places, strict=True))
        self._kept.append(tensors)
        return [Run(index, DTYPE_NAMES[first.dtype], first.shape, count)]

    def _enter(self, owner: object) -> None:
        if id(owner) in self._open:
            raise Refused("a container that contains itself: save its items")
        if len(self._open) >= MAX_DEPTH:
            raise Refused(f"nested more than {MAX_DEPTH} deep: save a flatter value")
        self._open.add(id(owner))


def _distance(at: tuple[int, int]) -> int | None:
    """The same for places that follow each other; None for none."""
    index, place = at
    return place - index if place >= 0 else None
