"""The requests a client has in an engine, and what has come home of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import msgspec

from midstream.modeling.vllm.payloads import Record, unpack
from midstream.modeling.vllm.results import Result, of_output
from midstream.modeling.vllm.wire import EDIT, KEY, NEW, RECORDS, SENT, Payload


@dataclass(eq=False)
class Outcome:
    """What one request brought home.

    Attributes:
        expected: how many records come of each sequence: one of its block, if it has one, and one
            of each installed edit.
        edited: whether edits run beside it.
        output: vLLM's finished `RequestOutput`; None if the request was aborted.
        records: what its block left, one for each sequence of the request; None for one that ended
            before the block began.
        edits: what the edits left, by sequence and by the edit's number.
        aborted: whether it was ended early, so that it has no result for its block.
        new: what each sequence's block has appended to the lists it saves since it was last asked
            for, by name; empty unless the block's payload says so.
    """

    expected: int = 0
    edited: bool = False
    output: Any = None
    records: list[Record | None] = field(default_factory=list)
    edits: list[dict[int, Record]] = field(default_factory=list)
    aborted: bool = False
    new: list[dict[str, list[Any]]] = field(default_factory=list)

    @classmethod
    def of(cls, payload: Payload | None, sequences: int) -> Self:
        """What a request is going to bring home."""
        payload = payload or Payload()
        return cls(
            expected=bool(payload.block) + len(payload.edits),
            edited=bool(payload.edits),
            records=[None] * sequences,
            edits=[{} for _ in range(sequences)],
            new=[{} for _ in range(sequences)],
        )

    def has_all_of(self, index: int) -> bool:
        """Whether all records of a sequence are in."""
        return (self.records[index] is not None) + len(self.edits[index]) == self.expected

    @property
    def is_complete(self) -> bool:
        """Whether all records are in."""
        return all(map(self.has_all_of, range(len(self.records))))

    @property
    def has_failed(self) -> bool:
        """Whether a block beside it has failed, its own or an edit's."""
        own = [record for record in self.records if record is not None]
        edits = [record for found in self.edits for record in found.values()]
        return any(record.error is not None for record in (*own, *edits))


@dataclass(frozen=True)
class Submission:
    """One request to run: vLLM's prompt, sampling parameters and adapter, and what blocks need.

    Without a payload it is plain vLLM's, its KV cache shared like any other's. `common` is what its
    block shares with others that are submitted with it, `where` the block's file and line.
    """

    prompt: dict[str, Any]
    params: Any
    payload: Payload | None
    lora: Any = None
    common: bytes = b""
    where: str = ""

    def loaded(self, kind: Any, salt: str) -> tuple[dict[str, Any], Any]:
        """The prompt and the sampling parameters as vLLM is to have them.

        Args:
            kind: which outputs vLLM gives, its `RequestOutputKind`.
            salt: keeps the KV cache of a request with blocks to itself.
        """
        params, prompt = copy.copy(self.params), dict(self.prompt)
        params.output_kind = kind
        if self.payload is not None:
            load(params, prompt, self.payload, salt)
        return prompt, params


def load(params: Any, prompt: dict[str, Any], payload: Payload, salt: str) -> None:
    """Put what blocks need into a request, and keep its KV cache to itself."""
    params.extra_args = {**(params.extra_args or {}), KEY: msgspec.msgpack.encode(payload)}
    params.skip_reading_prefix_cache = True
    prompt["cache_salt"] = f"{prompt['cache_salt']}-{salt}" if "cache_salt" in prompt else salt


class Ledger:
    """The sequences of requests that run, and how far they are.

    Args:
        has_news: called with a request of which something has come.

    Attributes:
        sequences: by vLLM's id of a sequence, its request and its number in it.
        closed: those of which the engine says that they are over.
        waiting: those whose block waits for what its request ended with.
    """

    def __init__(self, has_news: Callable[[Any], None] = lambda _: None) -> None:
        self._has_news = has_news
        self.sequences: dict[str, tuple[Outcome, int]] = {}
        self.closed: set[str] = set()
        self.waiting: set[str] = set()

    def without_messages(self, outputs: Sequence[Any]) -> list[Any]:
        """Take the engine's messages out of vLLM's outputs; the others."""
        for output in outputs:
            if output.request_id == RECORDS:
                self._take(output.kv_transfer_params)
        return [output for output in outputs if output.request_id != RECORDS]

    def _take(self, message: Mapping[str, Any]) -> None:
        waiting = self.sequences.keys() & message["waiting"]
        closed = (self.sequences.keys() & message["closed"]) - waiting
        self.waiting.update(waiting)
        self.take_records(message["records"])
        self.close(closed)
        for i in waiting:
            self._has_news(self.sequences[i][0])

    def close(self, sequences: Iterable[str]) -> None:
        """Take in that nothing more comes of sequences; those of unknown requests are ignored."""
        for i in self.sequences.keys() & set(sequences):
            self.closed.add(i)
            self.waiting.discard(i)
            self._has_news(self.sequences[i][0])

    def take_records(self, records: bytes) -> None:
        """Take in records as the engine packed them; those of unknown requests are dropped."""
        for record in unpack(records) if records else ():
            if record.request_id in self.sequences:
                outcome, index = self.sequences[record.request_id]
                _put(outcome, index, record)
                self._has_news(outcome)

    def is_closed(self, sequence: str) -> bool:
        """Whether nothing more comes of a sequence: the engine says so, or all of it is here."""
        if sequence in self.closed:
            return True
        outcome, index = self.sequences[sequence]
        return outcome.output is not None and outcome.has_all_of(index)

    def results(self) -> dict[str, Result | None]:
        """What blocks that wait for it are to be given, as far as it is known; None for no result.

        VLLM's output of a request may come before or after its block is known to wait.
        """
        found: dict[str, Result | None] = {}
        for i in sorted(self.waiting):
            outcome, index = self.sequences[i]
            if outcome.aborted:
                found[i] = None
            elif outcome.output is not None:
                result = of_output(outcome.output, index)
                found[i] = None if result.finish_reason == "abort" else result
        return found

    def forget(self, sequences: Sequence[str]) -> None:
        """Forget sequences of which nothing more is asked."""
        for i in sequences:
            self.sequences.pop(i, None)
        self.closed.difference_update(sequences)
        self.waiting.difference_update(sequences)


def _put(outcome: Outcome, index: int, record: Record) -> None:
    """Take in a record of one sequence of a request."""
    if EDIT in record.extra:
        outcome.edits[index][record.extra[EDIT]] = record
        return
    sent: dict[str, int] | None = {}
    if NEW not in record.extra:
        outcome.records[index], sent = record, record.extra.get(SENT)
    if sent is None:
        return  # what it appends was not asked for
    for name, value in record.saves.items():
        new = value[sent.get(name, 0) :] if isinstance(value, list) else []
        if new:
            outcome.new[index].setdefault(name, []).extend(new)
