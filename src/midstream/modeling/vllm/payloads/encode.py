"""Values to nodes, in the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from midstream.errors import TransportError
from midstream.modeling.vllm.payloads.buffers import Buffers
from midstream.modeling.vllm.payloads.handlers import FIX, Refused, handler_for
from midstream.modeling.vllm.payloads.nodes import Node

MAX_DEPTH = 100  # containers inside one another; far below Python's and msgspec's own limits


class Encoder:
    """Turns the values of one record into nodes; the bytes of their tensors go to `buffers`.

    A tensor that occurs twice in the record has one buffer and comes back as one object.
    """

    def __init__(self, buffers: Buffers) -> None:
        self.buffers = buffers
        self._indices: dict[int, int] = {}
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
        self._indices = {key: index for key, index in self._indices.items() if index < mark}
        raise TransportError(problem)

    def node(self, value: Any) -> Node:
        """Make the node of a value inside one that `encode` was called with."""
        return handler_for(value)(self, value)

    def children(
        self, owner: object, values: Iterable[Any], step: Callable[[int], str]
    ) -> list[Node]:
        """Make the nodes of a container's values; `step(i)` is the path to the i-th."""
        self._enter(owner)
        made: list[Node] = []
        try:
            for value in values:
                made.append(self.node(value))  # noqa: PERF401 - its length is the failing index
        except Refused as refused:
            refused.steps.append(step(len(made)))
            raise
        self._open.discard(id(owner))
        return made

    def tensor_index(self, tensor: torch.Tensor) -> int:
        """Return the buffer of a tensor, the same one for the same object."""
        index = self._indices.get(id(tensor))
        if index is None:
            index = self._indices[id(tensor)] = self.buffers.add_tensor(tensor)
            self._kept.append(tensor)
        return index

    def _enter(self, owner: object) -> None:
        if id(owner) in self._open:
            raise Refused("a container that contains itself: save its items")
        if len(self._open) >= MAX_DEPTH:
            raise Refused(f"nested more than {MAX_DEPTH} deep: save a flatter value")
        self._open.add(id(owner))
