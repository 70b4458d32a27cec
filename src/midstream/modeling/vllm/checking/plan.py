"""One run of `model.check()`: which blocks run on the engine, and what their values should be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from midstream.modeling.vllm.checking import blocks
from midstream.modeling.vllm.checking.blocks import LOGITS, Block
from midstream.modeling.vllm.checking.places import MLP, ROUTER, STREAM, Decoder, Place
from midstream.modeling.vllm.checking.reference import Reference, rows_of
from midstream.modeling.vllm.checking.report import Row, row_error

Values = Mapping[str, Tensor]

TOLERANCES = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Relative error of a row by the engine's dtype, on a CPU."""

ON_GPU = 3e-3
"""The same in float32 on a GPU, where vLLM's attention multiplies in TF32."""


@dataclass(frozen=True)
class Write:
    """A write on the engine, and the same on HuggingFace.

    Attributes:
        name: what it does.
        path: vLLM's module.
        block: what runs on the engine.
        right: gives HuggingFace's logits under it.
    """

    name: str
    path: str
    block: Block
    right: Callable[[Reference], Tensor]


class Plan:
    """What is read and written, found in the trees of a checkpoint.

    Args:
        decoder: its decoder in both.
        layers: indices of the layers to read; negative ones count from the end.
        tolerance: relative error that a row may have.

    Raises:
        IndexError: there is no such layer.
    """

    def __init__(self, decoder: Decoder, layers: Sequence[int] | None, tolerance: float):
        self._decoder = decoder
        self._tolerance = tolerance
        self.layers = _indices(layers, decoder.count)
        self._wanted = [
            *(place for layer in self.layers for place in decoder.of_layer(layer)),
            *decoder.behind(),
        ]
        self._called: list[str] = []

    @property
    def probe(self) -> Block:
        """The block that runs first."""
        return blocks.probing(self._wanted)

    def learn(self, saves: Mapping[str, Any]) -> None:
        """Take in what the first block found: which modules a forward calls, in their order."""
        self._called = list(saves[blocks.CALLED])

    @cached_property
    def places(self) -> list[Place]:
        """The places that are called, in the order in which the forward leaves them."""
        found = [place for place in self._wanted if place.engine in self._called]
        return sorted(found, key=lambda place: self._called.index(place.engine))

    @property
    def read(self) -> Block:
        """The block that reads all of them."""
        return blocks.reading(self.places)

    @cached_property
    def layer(self) -> int:
        """The layer that is written to: the middle one of those that are read."""
        return self.layers[len(self.layers) // 2]

    def writes(self, read: Values) -> Iterator[Write]:
        """Writes, each of which runs alone.

        Args:
            read: what was read before; the expert that is chosen most is taken out.
        """
        there = {place.kind: place for place in self.places if place.layer == self.layer}
        if (mlp := there.get(MLP)) is not None:
            yield Write(
                f"{mlp.name} = 0", mlp.engine, blocks.zeroing(mlp), lambda hf: hf.zeroed(mlp)
            )
        if (stream := there.get(STREAM)) is not None:
            yield Write(
                f"{stream.name} steered",
                stream.engine,
                blocks.steering(stream),
                lambda hf: hf.steered(stream),
            )
        if (router := there.get(ROUTER)) is not None:
            expert = int(rows_of(read[router.name]).float().sum(0).argmax())
            yield Write(
                f"{router.name}: expert {expert} ablated",
                router.engine,
                blocks.ablating(router, expert),
                lambda hf: hf.ablated(router, expert),
            )

    def rows(
        self, read: Values, written: Sequence[tuple[Write, Tensor | Exception]], hf: Reference
    ) -> Iterator[Row]:
        """Compare what the engine gave with HuggingFace's forward.

        Args:
            read: what the engine's places had.
            written: writes with the logits that the engine gave under them, or why it did not.
            hf: HuggingFace's model.
        """
        # also the layers beside those read: a mix-up would give their values
        right = hf.reads([*self._neighbours(), *self.places])
        for place in self.places:
            if place.name not in read:
                yield Row(place.name, place.engine, *_NOTHING, note="it returns nothing on vLLM")
                continue
            mixed_up = self._mixed_up(place, right)
            yield self._row(place.name, place.engine, read[place.name], right[place.name], mixed_up)
        for place in self._wanted:
            if place not in self.places:
                yield Row(place.name, place.engine, *_NOTHING, note="vLLM does not call it")
        logits = right[LOGITS]
        yield self._row(LOGITS, "model.logits", read[LOGITS], logits, logits.roll(1, -1))
        for write, got in written:
            if isinstance(got, Exception):
                yield Row(write.name, write.path, *_NOTHING, note=str(got).partition("\n")[0])
                continue
            yield self._row(write.name, write.path, got, write.right(hf), logits)

    def _row(self, name: str, path: str, got: Tensor, right: Tensor, mixed_up: Tensor) -> Row:
        errors = [row_error(rows_of(got), right), row_error(mixed_up, right)]
        return Row(name, path, errors[0], self._tolerance, errors[1])

    def _neighbours(self) -> list[Place]:
        others = {_beside(layer, self._decoder.count) for layer in self.layers}
        return [place for layer in others for place in self._decoder.of_layer(layer)]

    def _mixed_up(self, place: Place, right: Values) -> Tensor:
        """What the nearest mistake would give: another layer's, or the stream without its norm."""
        if place.layer is None:
            stream = right.get(f"{STREAM} {self._decoder.count - 1}")
            return torch.zeros_like(right[place.name]) if stream is None else stream
        other = right.get(f"{place.kind} {_beside(place.layer, self._decoder.count)}")
        if other is None or other.shape != right[place.name].shape:
            return right[place.name].flip(-1)
        return other


_NOTHING = (float("nan"), 0.0, float("nan"))


def _beside(layer: int, count: int) -> int:
    return layer - 1 if layer else min(1, count - 1)


def _indices(layers: Sequence[int] | None, count: int) -> list[int]:
    wanted = range(count) if layers is None else layers
    for layer in wanted:
        if not -count <= layer < count:
            raise IndexError(f"layers: the model has {count} layers; got the index {layer}")
    return sorted({layer % count for layer in wanted})
