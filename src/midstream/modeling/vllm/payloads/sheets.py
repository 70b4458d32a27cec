"""Caches in messages: what a step has recorded for many requests is told once, not by value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from midstream.interleaving.batches import Kept
from midstream.interleaving.caches import Cache
from midstream.interleaving.mirroring import Spot
from midstream.interleaving.shares import Sheet, Unseen
from midstream.modeling.vllm.payloads.handlers import Refused
from midstream.modeling.vllm.payloads.nodes import (
    DTYPE_NAMES,
    CallNode,
    LeafNode,
    Node,
    SheetNode,
)
from midstream.modeling.vllm.payloads.places import Sources

_ENCODER = msgspec.msgpack.Encoder()


class Sheets:
    """The sheets of one message.

    Args:
        sources: the mirrors to which it refers.

    Attributes:
        nodes: the sheets.
        layouts: what they have recorded, where several have the same.
    """

    def __init__(self, sources: Sources):
        self.nodes: list[SheetNode] = []
        self.layouts: list[list[CallNode]] = []
        self._sources = sources
        self._numbers: dict[int, int] = {}
        self._known: dict[bytes, int] = {}
        self._kept: list[Sheet] = []  # ids in `_numbers` stay theirs only while these live

    def parts(self, cache: Cache, node: Callable[[Any], Node]) -> bytes | None:
        """What `Recorded.parts` says of a cache; None if it has to be sent by value.

        Args:
            node: makes the node of a value.
        """
        unread = cache.__dict__.get("_unread")
        if not isinstance(unread, Unseen):
            return None
        found = unread.parts() or []
        lines = [(self._number(part.sheet, node), *part[1:]) for part in found]
        if not lines or any(number < 0 for number, *_ in lines):
            unread.settle(cache.__dict__["visits"])
            return None
        return np.array(lines, np.int32).tobytes()

    def _number(self, sheet: Sheet, node: Callable[[Any], Node]) -> int:
        if id(sheet) not in self._numbers:
            made = self._made(sheet, node)
            self._numbers[id(sheet)] = -1 if made is None else len(self.nodes)
            self._kept.append(sheet)
            if made is not None:
                self.nodes.append(made)
        return self._numbers[id(sheet)]

    def _made(self, sheet: Sheet, node: Callable[[Any], Node]) -> SheetNode | None:
        spots = [spot for kept in sheet.kept for spot in kept.spots or () if spot is not None]
        segments = [self._sources.number(spot.mirror) for spot in spots]
        if min(segments, default=-1) < 0:
            return None
        try:
            calls = [_call(kept, node) for kept in sheet.kept]
        except Refused:
            return None
        return SheetNode(
            self._layout(calls),
            np.array([kept.number for kept in sheet.kept], np.int64).tobytes(),
            np.array(segments, np.int32).tobytes(),
            np.array([spot.mirror.offsets[spot.index] for spot in spots], np.int64).tobytes(),
        )

    def _layout(self, calls: list[CallNode]) -> int:
        key = _ENCODER.encode(calls)
        if key not in self._known:
            self._known[key] = len(self.layouts)
            self.layouts.append(calls)
        return self._known[key]


def _call(kept: Kept, node: Callable[[Any], Node]) -> CallNode:
    path, side, _ = kept.location
    spots = zip(kept.spots or (), kept.axes, strict=True)
    leaves = [_leaf(spot, axis) for spot, axis in spots if spot is not None]
    return CallNode(path, side, node(kept.form()), leaves)


def _leaf(spot: Spot, axis: int | None) -> LeafNode:
    dtype, shape, _ = spot.mirror.forms[spot.index]
    return LeafNode(DTYPE_NAMES[dtype], tuple(shape), -1 if axis is None else axis)
