"""A captured trace as bytes: prompt, settings and block, to be run by another process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from midstream.errors import TransportError

_FORMAT = "midstream-trace-1"


class Request(msgspec.Struct):
    """One request of a trace.

    Attributes:
        prompt: the prompt in vLLM's form.
        settings: sampling settings, and `lora_request`.
        block: the block, as `midstream.tracing.shipping.dumps` wrote it; empty without one.
        keep: see ``wire.Payload``.
        where: the block's file and line, for messages.
    """

    prompt: dict[str, Any]
    settings: dict[str, Any]
    block: bytes
    keep: list[str] = []
    where: str = "a captured trace"


class _TraceData(msgspec.Struct):
    requests: list[Request]
    format: str = _FORMAT


def write(requests: Sequence[Request]) -> bytes:
    """Write a captured trace.

    Raises:
        TransportError: a setting or part of a prompt is no plain data.
    """
    for request in requests:
        for name, value in {**request.settings, **request.prompt}.items():
            _check_plain(name, value)
    return msgspec.msgpack.encode(_TraceData(list(requests)))


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
    return trace.requests
