"""Records to one message, in the engine; one message to records, in the client."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import sys
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import msgspec
import torch

from midstream.errors import TransportError
from midstream.modeling.vllm.payloads import segments
from midstream.modeling.vllm.payloads.buffers import Buffers
from midstream.modeling.vllm.payloads.decode import Decoder
from midstream.modeling.vllm.payloads.encode import Encoder
from midstream.modeling.vllm.payloads.mirrors import Mirrors
from midstream.modeling.vllm.payloads.nodes import Message, Node, Part, RecordNode
from midstream.modeling.vllm.payloads.places import Places, Sources
from midstream.modeling.vllm.payloads.received import Bytes
from midstream.modeling.vllm.payloads.record import BlockError, BlockWarning, Print, Record
from midstream.modeling.vllm.payloads.sheets import Sheets

INLINE_LIMIT = 64 * 1024  # bytes; beyond it a segment costs less than copying through the engine
FALLBACK_LIMIT = 1 << 30  # bytes; msgpack and the engine's sockets stop at 4 GiB for a message

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Message)
_T = TypeVar("_T")


def pack(
    records: Sequence[Record],
    *,
    owner: str,
    inline_limit: int = INLINE_LIMIT,
    mirrors: Mirrors | None = None,
) -> bytes:
    """Write all records of a step into one message.

    A save that cannot travel is left out and becomes its record's error; the record's other
    saves and the other records are not touched. Tensors may be on any device.

    Args:
        records: The records.
        owner: The client that will unpack the message, as `segments.owner_id` names it.
        inline_limit: Up to this many bytes of tensors, arrays and long bytes ride in the message;
            more go to one shared memory segment, or to a few that are written at once, or into
            the message where there is no room for them.
        mirrors: Where the values of the records may lie already. The senders of the records are
            forgotten there.
    """
    buffers, sources = Buffers(), Sources(mirrors)
    sheets = Sheets(sources)
    with _uncollected():
        nodes = [_record_node(record, buffers, sources, sheets) for record in records]
        size = sum(buffers.sizes)
        parts = _parts(buffers, owner) if size > inline_limit else []
        if not parts and size > max(inline_limit, FALLBACK_LIMIT):
            small = list(map(_too_large, records))
            return pack(small, owner=owner, inline_limit=sys.maxsize, mirrors=mirrors)
        inline = bytearray() if parts else buffers.read()
    over = sources.send([record.sender for record in records if record.sender is not None])
    found = sources.handles, over, sheets.nodes, sheets.layouts
    return _ENCODER.encode(Message(nodes, buffers.sizes, inline, parts, *found))


def unpack(data: bytes) -> list[Record]:
    """Read what `pack` wrote. Call it once for a message: it removes its segments' names.

    Tensors and arrays are writable, on the CPU, and not copied: they are views of the message's
    memory, and hold all of it (a segment: a quarter of a large message) until the last of them
    goes. A save whose class is not loaded in this process becomes its record's error.

    Raises:
        TransportError: `data` is no such message, or its segment is gone.
    """
    return _records(_message(data))


def pack_apart(records: Sequence[Record]) -> tuple[bytes, list[memoryview]]:
    """Write records for another machine: the message, and the bytes of its tensors apart from it.

    Those come in parts that are sent one behind the other, see ``unpack_apart``; large tensors on
    the CPU are not copied, so that they must stay as they are until then.
    """
    buffers = Buffers()
    with _uncollected():
        nodes = [_record_node(record, buffers) for record in records]
        data = buffers.parts()
    return _ENCODER.encode(Message(nodes, buffers.sizes, bytearray(), [])), data


def unpack_apart(message: bytes, data: memoryview) -> list[Record]:
    """Read, as ``unpack``, what ``pack_apart`` wrote elsewhere: no shared memory belongs to it.

    Args:
        message: the message.
        data: the bytes of its tensors, writable; the tensors are views of it.

    Raises:
        TransportError: there is no such message, or it names shared memory.
    """
    found = _message(message)
    if found.parts or found.inline or found.mirrors or found.over:
        raise TransportError("a message from elsewhere names shared memory of this machine")
    found.inline = data  # type: ignore[assignment]  # which holds bytes too, and is not copied
    return _records(found)


def _message(data: bytes) -> Message:
    try:
        return _DECODER.decode(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise TransportError(f"not a message of midstream's engine half: {error}") from error


def _records(message: Message) -> list[Record]:
    # Tensors made in inference mode could not be used in autograd afterwards.
    with _uncollected(), torch.inference_mode(False):
        found = Bytes(message)
        return [_record(node, Decoder(found, node.rows)) for node in message.records]


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Let no garbage be looked for: many objects are made here, and none of them is garbage.

    With hundreds of thousands of tensors, Python would look through all of the process's objects
    again and again, which takes longer than everything else.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _parts(buffers: Buffers, owner: str) -> list[Part]:
    try:
        return buffers.write(owner)
    except OSError:  # full, or not to be written: the message itself is the other way
        return []


def _record_node(
    record: Record,
    buffers: Buffers,
    sources: Sources | None = None,
    sheets: Sheets | None = None,
) -> RecordNode:
    places = None
    if sources is not None and sources.may_refer(record.sender):
        places = Places(record.saves, sources)
    encoder = Encoder(buffers, places, sheets)
    problems: list[TransportError] = []
    saves = []
    for name, value in record.saves.items():
        try:
            saves.append((encoder.node(name), encoder.encode(value, f"saves[{name!r}]")))
        except TransportError as problem:
            problems.append(problem)
    try:
        extra = encoder.encode(record.extra, "extra")
    except TransportError as problem:
        problems.append(problem)
        extra = encoder.node({})
    error = _with_problems(record.error, problems)
    return RecordNode(
        record.request_id,
        saves,
        encoder.node(error and _sendable(encoder, error)),
        encoder.node(record.warnings),
        encoder.node(record.prints),
        extra,
        None if places is None else places.rows,
    )


def _with_problems(
    error: BlockError | None, problems: Sequence[TransportError]
) -> BlockError | None:
    """Return the record's own error, or the first problem; further problems become notes."""
    if not problems:
        return error
    if error is None:
        first, *problems = problems
        error = BlockError.of(first, f"{type(first).__module__}.{type(first).__name__}: {first}\n")
    notes = [*error.notes, *(f"also: {problem}" for problem in problems)]
    return dataclasses.replace(error, notes=notes)


def _sendable(encoder: Encoder, error: BlockError) -> BlockError:
    """Return the error with what it carries, or the repr of what cannot travel."""
    return dataclasses.replace(
        error,
        args=[_or_repr(encoder, value) for value in error.args],
        attributes={k: _or_repr(encoder, value) for k, value in error.attributes.items()},
    )


def _or_repr(encoder: Encoder, value: Any) -> Any:
    try:
        encoder.encode(value, "args")
    except TransportError:
        return _repr(value)
    return value


def _repr(value: object) -> str:
    try:
        return repr(value)
    except Exception:  # noqa: BLE001 - a user's __repr__ may raise anything
        return object.__repr__(value)


def _too_large(record: Record) -> Record:
    problem = TransportError(
        f"the saves are too large for the shared memory folder {segments.folder()}, which is "
        "full: save less, or give it more space (docker: --shm-size)"
    )
    return dataclasses.replace(record, saves={}, error=_with_problems(record.error, [problem]))


def _record(node: RecordNode, decoder: Decoder) -> Record:
    problems: list[TransportError] = []
    saves = {}
    for key, value in node.saves:
        name = _only(decoder.decode(key, "the name of a save"), str)
        try:
            saves[name] = decoder.decode(value, f"saves[{name!r}]")
        except TransportError as problem:
            problems.append(problem)
    error = decoder.decode(node.error, "an error")
    return Record(
        request_id=node.request_id,
        saves=saves,
        error=_with_problems(error and _only(error, BlockError), problems),
        warnings=_all(decoder, node.warnings, BlockWarning),
        prints=_all(decoder, node.prints, Print),
        extra=_only(decoder.decode(node.extra, "extra"), dict),
    )


def _all(decoder: Decoder, node: Node, cls: type[_T]) -> list[_T]:
    found = _only(decoder.decode(node, f"a list of {cls.__name__}"), list)
    return [_only(item, cls) for item in found]


def _only(value: object, cls: type[_T]) -> _T:
    if not isinstance(value, cls):
        raise TransportError(f"a message of the engine has a {type(value).__name__} in place "
                             f"of a {cls.__name__}")  # fmt: skip
    return value
