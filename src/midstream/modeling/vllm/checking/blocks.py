"""What `model.check()` runs inside the engine: blocks that read, and blocks that write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from midstream.modeling.vllm.checking.places import STREAM, Place
from midstream.modeling.vllm.checking.streams import stream_of

CALLED, FORM, LOGITS = "called", "form", "logits"
STRENGTH = 0.5
"""How much is added to a stream, as a share of its norm."""

Block = Callable[[Any, Any], dict[str, Any]]


def first(value: Any) -> Any:
    """The tensor of an output, the first where it is a tuple."""
    return value[0] if isinstance(value, tuple | list) else value


def steered(stream: torch.Tensor) -> torch.Tensor:
    """What is added to a stream: its own features in reverse, so that both sides add the same."""
    return STRENGTH * stream.flip(-1)


def probing(places: Sequence[Place]) -> Block:
    """A block that finds out which of the places a forward calls, and in which order."""
    paths = [place.engine for place in places]

    def block(model: Any, tracer: Any) -> dict[str, Any]:
        return {CALLED: tracer.cache(modules=paths)}

    return block


def reading(places: Sequence[Place]) -> Block:
    """A block that reads places, in their order, and the logits."""

    def block(model: Any, tracer: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for place in places:
            output = model.get(place.engine).output
            if place.kind == STREAM:
                found[FORM], found[place.name] = stream_of(output, overwrites=place.overwrites)
            elif output is not None:
                found[place.name] = first(output)
        found[LOGITS] = model.logits
        return found

    return block


def zeroing(place: Place) -> Block:
    """A block that sets a module's output to zero and reads the logits."""

    def block(model: Any, tracer: Any) -> dict[str, Any]:
        first(model.get(place.engine).output)[:] = 0
        return {LOGITS: model.logits}

    return block


def steering(place: Place) -> Block:
    """A block that adds to the stream leaving a layer and reads the logits."""

    def block(model: Any, tracer: Any) -> dict[str, Any]:
        output = model.get(place.engine).output
        first(output)[:] += steered(stream_of(output, overwrites=place.overwrites)[1])
        return {LOGITS: model.logits}

    return block


def ablating(place: Place, expert: int) -> Block:
    """A block that takes an expert out of a router's choice and reads the logits."""

    def block(model: Any, tracer: Any) -> dict[str, Any]:
        first(model.get(place.engine).output)[..., expert] = -torch.inf
        return {LOGITS: model.logits}

    return block
