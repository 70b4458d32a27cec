"""A captured trace as bytes: prompt, settings and block, to be run by another process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from midstream.errors import TransportError

_FORMAT = "midstream-trace-1"


class TraceData(msgspec.Struct):
    """One captured trace.

    Attributes:
        prompt: the prompt in vLLM's form.
        settings: sampling settings.
        block: the block as `midstream.tracing.shipping.dumps` wrote it, with its versions.
    """

    prompt: dict[str, Any]
    settings: dict[str, Any]
    block: bytes
    format: str = _FORMAT


def write(prompt: Mapping[str, Any], settings: Mapping[str, Any], block: bytes) -> bytes:
    """Write a captured trace.

    Raises:
        TransportError: a setting or part of the prompt is no plain data.
    """
    for name, value in {**settings, **prompt}.items():
        try:
            msgspec.msgpack.encode(value)
        except (TypeError, OverflowError) as error:
            raise TransportError(
                f"'{name}' is a {type(value).__name__}, which cannot travel in a trace's bytes "
                "(numbers, text and lists of them can). Pass it where the trace is run."
            ) from error
    return msgspec.msgpack.encode(TraceData(dict(prompt), dict(settings), block))


def read(data: bytes) -> TraceData:
    """Read a captured trace.

    Raises:
        ValueError: ``data`` is none.
    """
    try:
        trace = msgspec.msgpack.decode(data, type=TraceData)
    except (msgspec.DecodeError, TypeError) as error:
        raise ValueError(f"These bytes are no captured trace: {error}") from error
    if trace.format != _FORMAT:
        raise ValueError(f"These bytes are a trace of format {trace.format!r}, not {_FORMAT!r}.")
    return trace
