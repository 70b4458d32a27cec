"""What client and server say to each other: msgpack that is checked as it is decoded, no pickle.

Code travels inside as bytes that only the engine opens. Everything else is plain data of known
types; what is unknown, too long or nested too deep is refused before any code is looked at.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from midstream._version import __version__
from midstream.errors import DataVersionError

MEDIA = "application/msgpack"
"""Media type of requests and replies; replies come as JSON where a client asks for that."""

FRAMES = "application/vnd.midstream.frames"
"""Media type of what a trace brought home, see ``framed``."""

TRACES, EDITS, MODEL = "/v1/midstream/traces", "/v1/midstream/edits", "/v1/midstream/model"
"""Paths of the routes."""

MOST_REQUESTS = 1024
"""Requests of one trace."""

_T = TypeVar("_T")


class Versions(msgspec.Struct):
    """Who speaks: a block is only understood by the same midstream and Python."""

    midstream: str = __version__
    python: str = f"{sys.version_info.major}.{sys.version_info.minor}"

    def check(self, there: Versions, who: str) -> None:
        """Refuse another version.

        Raises:
            DataVersionError: naming both.
        """
        if there != self:
            raise DataVersionError(
                f"The {who} has midstream {there.midstream} on Python {there.python}; here is "
                f"midstream {self.midstream} on Python {self.python}. Use the same on both sides."
            )


class TraceCall(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A trace to run.

    Attributes:
        versions: the client's.
        trace: the requests with their blocks, as ``Tracer.to_bytes`` gives them.
        stream: answer with server-sent events while it runs.
        background: answer at once with the trace's id.
    """

    versions: Versions
    trace: bytes
    stream: bool = False
    background: bool = False


class EditCall(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """An edit to install.

    Attributes:
        versions: the client's.
        block: the block, as `midstream.tracing.shipping` wrote it.
        name: what requests choose it by; None for one that always applies.
    """

    versions: Versions
    block: bytes
    name: str | None = None


class EditInfo(msgspec.Struct):
    """An installed edit.

    Attributes:
        id: its number.
        name: its name, if it has one.
        mine: whether the key that asks installed it.
        everywhere: whether it acts on all keys' requests: an admin key installed it.
    """

    id: int
    name: str | None
    mine: bool = True
    everywhere: bool = False


class Reply(msgspec.Struct):
    """What a trace brought home; the bytes of its tensors follow it, see ``framed``.

    Attributes:
        id: the trace's.
        records: see ``outcomes``.
    """

    id: str
    records: bytes


class Started(msgspec.Struct):
    """A trace that runs.

    Attributes:
        id: what it is asked for by.
        status: "running".
    """

    id: str
    status: str = "running"


class Failure(msgspec.Struct):
    """An error of the server, in the form of OpenAI's.

    Attributes:
        message: what went wrong and what to do.
        type: the error's class.
        code: the HTTP status.
        param: the field at fault, where one is.
    """

    message: str
    type: str
    code: int
    param: str | None = None


class Failed(msgspec.Struct):
    """The body of an answer that is an error."""

    error: Failure


_ALIGNMENT = 64  # bytes; tensors are views of what comes behind


def framed(reply: Reply, data: Sequence[memoryview]) -> list[memoryview]:
    """A reply and the bytes of its tensors, in parts that are sent one behind the other.

    The first has the length of the message in four bytes, the message, and zeros up to where
    tensors may begin.
    """
    body = encode(reply)
    head = len(body).to_bytes(4, "little") + body
    return [memoryview(head + bytes(-len(head) % _ALIGNMENT)), *data]


def unframed(body: memoryview) -> tuple[Reply, memoryview]:
    """The reply, and the bytes of its tensors, in what ``framed`` made.

    Raises:
        ValueError: there is none.
    """
    size = int.from_bytes(body[:4], "little")
    if not 0 < size <= len(body) - 4:
        raise ValueError("This is no reply of midstream's: it is cut off.")
    reply = decode(bytes(body[4 : 4 + size]), Reply, "reply of midstream's")
    begin = 4 + size + -(4 + size) % _ALIGNMENT
    return reply, body[begin:]


def encode(value: Any) -> bytes:
    """A message as bytes."""
    return msgspec.msgpack.encode(value)


def decode(data: bytes | memoryview, kind: type[_T], what: str) -> _T:
    """The message that bytes are.

    Raises:
        ValueError: they are no such message; the text names ``what`` and the field.
    """
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(f"This is no {what}: {error}") from error
    except RecursionError as error:
        raise ValueError(f"This is no {what}: it is nested too deep.") from error
