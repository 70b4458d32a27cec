"""What the requests of a trace brought home, as bytes: every record says whose it is."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from midstream.errors import TransportError
from midstream.modeling.vllm.ledger import Outcome
from midstream.modeling.vllm.payloads import Record, pack_apart, unpack_apart
from midstream.modeling.vllm.remote.outputs import ServedOutput, of_output
from midstream.modeling.vllm.remote.wire import Reply, framed, unframed
from midstream.modeling.vllm.wire import EDIT

_OUTPUT, _PLACE, _NEW = "output", "place", "new"


def write(name: str, outcomes: Sequence[Outcome]) -> list[memoryview]:
    """A trace's outcomes as bytes, in parts; those of large tensors are the tensors' own memory."""
    records = [record for index, each in enumerate(outcomes) for record in _records(index, each)]
    message, data = pack_apart(records)
    return framed(Reply(name, message), data)


def _records(index: int, outcome: Outcome) -> list[Record]:
    output = None if outcome.output is None else of_output(outcome.output)
    size = len(outcome.records)
    extra = {_PLACE: [index, size], "edited": outcome.edited, "expected": outcome.expected}
    new = {_NEW: outcome.new} if any(outcome.new) else {}
    found = [Record(str(index), saves={_OUTPUT: output, **new}, extra=extra)]
    for sequence, record in enumerate(outcome.records):
        if record is not None:
            found.append(_placed(record, {_PLACE: [index, sequence]}))
    for sequence, edits in enumerate(outcome.edits):
        for edit, record in edits.items():
            found.append(_placed(record, {_PLACE: [index, sequence], EDIT: edit}))
    return found


def _placed(record: Record, extra: dict[str, Any]) -> Record:
    return dataclasses.replace(record, extra=extra)


def read(body: memoryview) -> list[Outcome]:
    """The outcomes in what a server sent. Nothing is imported and no code of it runs.

    Args:
        body: what ``write`` made, writable; tensors are views of it.

    Raises:
        TransportError: it is nothing of the kind.
    """
    outcomes: list[Outcome] = []
    try:
        reply, data = unframed(body)
        for record in unpack_apart(reply.records, data):
            _take(record, outcomes)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise TransportError(f"The server's reply makes no sense: {error!r}.") from error
    return outcomes


def _take(record: Record, outcomes: list[Outcome]) -> None:
    index, at = record.extra[_PLACE]
    if "expected" in record.extra:
        _begin(record, outcomes, index, at)
        return
    _known_types_only(record)
    if EDIT in record.extra:
        outcomes[index].edits[at][record.extra[EDIT]] = record
    else:
        outcomes[index].records[at] = record


def _begin(record: Record, outcomes: list[Outcome], index: int, size: int) -> None:
    if record.error is not None:
        raise ValueError(record.error.message)
    output = record.saves[_OUTPUT]
    if index != len(outcomes) or not 0 <= size <= 1 << 16:
        raise ValueError(f"request {index} of {size} sequences")
    if output is not None and not isinstance(output, ServedOutput):
        raise TypeError(f"a {type(output).__name__} in place of an output")
    outcomes.append(
        Outcome(
            expected=record.extra["expected"],
            edited=record.extra["edited"],
            output=output,
            records=[None] * size,
            edits=[{} for _ in range(size)],
            new=_lists(record.saves.get(_NEW, [{} for _ in range(size)]), size),
        )
    )


def _lists(found: Any, size: int) -> list[dict[str, list[Any]]]:
    """New items by the name of their list, for each sequence."""
    if not isinstance(found, list) or len(found) != size:
        raise TypeError("no new items for each sequence")
    return [{str(name): list(items) for name, items in each.items()} for each in found]


def write_new(new: Mapping[int, Mapping[str, list[Any]]]) -> bytes:
    """What sequences have appended to saved lists, as bytes."""
    records = [Record(str(index), saves=dict(items)) for index, items in new.items()]
    message, data = pack_apart(records)
    return b"".join(framed(Reply("", message), data))


def add_new(outcome: Outcome, body: bytes) -> None:
    """Take in what ``write_new`` wrote of a request.

    Raises:
        TransportError: it is no such message.
        ValueError: it is cut off.
    """
    reply, data = unframed(memoryview(bytearray(body)))
    for record in unpack_apart(reply.records, data):
        index = int(record.request_id)
        if not 0 <= index < len(outcome.new):
            raise TransportError(f"The server tells of sequence {index}, which there is not.")
        for name, items in record.saves.items():
            outcome.new[index].setdefault(name, []).extend(items)


def _known_types_only(record: Record) -> None:
    """Let an error be rebuilt only as a type whose module is loaded: a server imports nothing."""
    error = record.error
    if error is not None and error.type_module not in sys.modules:
        record.error = dataclasses.replace(error, type_module="")
