"""What a trace brought home, as JSON and as server-sent events."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from typing import Any

import msgspec

from midstream.modeling.vllm.ledger import Outcome
from midstream.modeling.vllm.payloads import Record
from midstream.modeling.vllm.remote import outcomes
from midstream.modeling.vllm.remote.outputs import of_output
from midstream.modeling.vllm.stats import Stats
from midstream.serve.values import plain, text


def as_json(found: Sequence[Outcome]) -> bytes:
    """A whole trace as JSON."""
    return msgspec.json.encode({"results": [_result(each) for each in found]})


def _result(outcome: Outcome) -> dict[str, Any]:
    output = None if outcome.output is None else of_output(outcome.output)
    sequences = [_sequence(outcome, index) for index in range(len(outcome.records))]
    for index, each in enumerate(output.outputs if output is not None else ()):
        sequences[index].update(
            text=each.text,
            token_ids=each.token_ids,
            logprobs=plain(each.logprobs),
            finish_reason=each.finish_reason,
            stop_reason=each.stop_reason,
        )
    ids = output.prompt_token_ids if output is not None else []
    return {"prompt_token_ids": ids, "outputs": sequences}


def _sequence(outcome: Outcome, index: int) -> dict[str, Any]:
    own, edits = outcome.records[index], outcome.edits[index]
    records = [*(edits[i] for i in sorted(edits)), *([own] if own is not None else [])]
    saves = {name: value for record in records for name, value in record.saves.items()}
    return {
        "saves": {name: plain(value) for name, value in saves.items()},
        "errors": [_error(record) for record in records if record.error is not None],
        "prints": [text(each.text) for record in records for each in record.prints],
        "warnings": [text(each.message) for record in records for each in record.warnings],
    }


def _error(record: Record) -> dict[str, str]:
    assert record.error is not None
    found = record.error
    told = {"type": found.type_name, "message": found.message, "traceback": found.traceback}
    return {name: text(value) for name, value in told.items()}


def failures(found: Sequence[Outcome]) -> list[str]:
    """The errors of blocks and edits, a line each."""
    records = [record for each in found for record in [*each.records, *_edits(each)] if record]
    return [
        f"{record.error.type_name}: {record.error.message}" for record in records if record.error
    ]


def _edits(outcome: Outcome) -> list[Record]:
    return [record for of_sequence in outcome.edits for record in of_sequence.values()]


class Latest:
    """Outputs on their way to a client; one that is slow gets the latest of each request."""

    def __init__(self) -> None:
        self._pending: dict[int, Any] = {}
        self._news = asyncio.Event()
        self._over = False

    def put(self, index: int, output: Any) -> None:
        """Take in how far a request is."""
        self._pending[index] = output
        self._news.set()

    def end(self) -> None:
        """Take in that nothing more comes."""
        self._over = True
        self._news.set()

    async def get(self) -> tuple[int, Any] | None:
        """The request that has waited longest, and how far it is; None at the end."""
        while not self._pending:
            if self._over:
                return None
            self._news.clear()
            await self._news.wait()
        index = next(iter(self._pending))
        return index, self._pending.pop(index)


def event(kind: str, data: bytes) -> bytes:
    """One server-sent event; ``data`` has no line breaks."""
    return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"


def output(index: int, found: Any) -> bytes:
    """How far a request is, as JSON: its sequences' whole texts and ids so far.

    What its block has appended to saved lists since the output before is in ``new_saves``, and in
    ``records`` as `outcomes` writes it, in base64.
    """
    each = [
        {"index": one.index, "text": one.text, "token_ids": list(one.token_ids)}
        | ({"new_saves": plain(one.new_saves)} if one.new_saves else {})
        for one in found.outputs
    ]
    told: dict[str, Any] = {"request": index, "outputs": each}
    if any(one.new_saves for one in found.outputs):
        new = {one.index: one.new_saves for one in found.outputs}
        told["records"] = base64.b64encode(outcomes.write_new(new)).decode()
    return msgspec.json.encode(told)


def packed(trace_id: str, found: Sequence[Outcome]) -> bytes:
    """A whole trace as JSON, and in base64 as `outcomes` writes it."""
    records = base64.b64encode(b"".join(outcomes.write(trace_id, found))).decode()
    results = [_result(each) for each in found]
    return msgspec.json.encode({"id": trace_id, "results": results, "records": records})


def load(stats: Stats, llm: Any) -> dict[str, Any]:
    """What an engine does and holds, for people."""
    return {
        "requests": llm.get_num_unfinished_requests(),
        "blocks": stats.live_blocks,
        **{f"{kind} steps": count for kind, count in stats.steps.items()},
        "seconds in blocks": round(stats.block_seconds, 2),
        "shared segments": stats.shared_segments,
    }
