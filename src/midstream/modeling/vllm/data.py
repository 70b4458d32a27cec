"""A captured trace as bytes: prompt, settings and block, to be run by another process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from midstream.errors import TransportError

_FORMAT = "midstream-trace-2"


class Request(msgspec.Struct):
    """One request of a trace.

    Attributes:
        prompt: the prompt in vLLM's form.
        settings: sampling settings, and `lora_request`.
        block: the block, as `midstream.tracing.shipping` wrote it; with ``common`` the rest of
            it. Empty without one.
        keep: see ``wire.Payload``.
        where: the block's file and line, for messages.
        common: what the block has in common with others of the trace: the same object for all.
    """

    prompt: dict[str, Any]
    settings: dict[str, Any]
    block: bytes = b""
    keep: list[str] = []
    where: str = "a captured trace"
    common: bytes = b""


class _TraceData(msgspec.Struct):
    """A trace, in which each common part is written once: its place + 1 by request, 0 for none."""

    requests: list[Request]
    commons: list[bytes]
    places: list[int]
    format: str = _FORMAT


def write(requests: Sequence[Request]) -> bytes:
    """Write a captured trace.

    Raises:
        TransportError: a setting or part of a prompt is no plain data.
    """
    for request in requests:
        for name, value in {**request.settings, **request.prompt}.items():
            _check_plain(name, value)
    places = {b"": 0}
    for request in requests:
        places.setdefault(request.common, len(places))
    _, *commons = places
    alone = [msgspec.structs.replace(request, common=b"") for request in requests]
    return msgspec.msgpack.encode(
        _TraceData(alone, commons, [places[request.common] for request in requests])
    )


def _check_plain(name: str, value: Any) -> None:
    try:
        msgspec.msgpack.encode(value)
    except (TypeError, OverflowError) as error:
        raise TransportError(
            f"'{name}' is a {type(value).__name__}, which cannot travel in a trace's bytes "
            "(numbers, text and lists of them can). Pass it where the trace is run."
        ) from error


def read(data: bytes) -> list[Request]:
    """The requests of a captured trace.

    Raises:
        ValueError: ``data`` is none.
    """
    try:
        trace = msgspec.msgpack.decode(data, type=_TraceData)
    except (msgspec.DecodeError, TypeError) as error:
        raise ValueError(f"These bytes are no captured trace: {error}") from error
    if trace.format != _FORMAT:
        raise ValueError(f"These bytes are a trace of format {trace.format!r}, not {_FORMAT!r}.")
    for request, place in zip(trace.requests, trace.places, strict=True):
        request.common = trace.commons[place - 1] if place else b""
    return trace.requests
