"""Traces that run on a server, and those that wait to be fetched."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from midstream.modeling.vllm.ledger import Outcome
from midstream.serve import values
from midstream.serve.access import Owner
from midstream.serve.problems import Problem

Run = Callable[[], Awaitable[Sequence[Outcome]]]


@dataclass(eq=False)
class Trace:
    """One trace of a client.

    Attributes:
        id: a name that cannot be guessed.
        owner: whose it is.
        requests: how many requests it has.
        what: what it does, for the page: where its block stands.
        started: when it began, in seconds since the epoch.
        task: what runs it; its result are the outcomes.
        taken: whether what it brought home is on its way to the client.
    """

    id: str
    owner: Owner
    requests: int
    what: str
    started: float = field(default_factory=time.time)
    task: asyncio.Task[Sequence[Outcome]] | None = None
    taken: bool = False


@dataclass(frozen=True)
class Mishap:
    """An error that a client was told of.

    Attributes:
        owner: whose request it was.
        at: when, in seconds since the epoch.
        text: its first lines.
    """

    owner: Owner
    at: float
    text: str


class Traces:
    """The traces of a server.

    Args:
        most: traces of one owner that run, wait to be fetched, or are being sent.
        keep_seconds: how long a finished one waits.
    """

    def __init__(self, most: int, keep_seconds: float):
        self._most, self._keep = most, keep_seconds
        self._traces: dict[str, Trace] = {}
        self.mishaps: deque[Mishap] = deque(maxlen=100)

    def start(self, owner: Owner, requests: int, what: str, run: Run) -> Trace:
        """Begin to run a trace.

        Raises:
            Problem: the owner has too many.
        """
        if sum(trace.owner.id == owner.id for trace in self._traces.values()) >= self._most:
            raise Problem(
                429,
                f"This key has {self._most} traces that run or wait to be fetched "
                "(--max-traces-per-key); wait, fetch or delete one.",
            )
        trace = Trace(f"trace-{secrets.token_urlsafe(18)}", owner, requests, what)
        self._traces[trace.id] = trace
        trace.task = asyncio.ensure_future(run())
        trace.task.add_done_callback(lambda task: self._done(trace, task))
        return trace

    def _done(self, trace: Trace, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self.note(trace.owner, repr(task.exception()))
        asyncio.get_running_loop().call_later(self._keep, self._traces.pop, trace.id, None)

    def find(self, owner: Owner, trace_id: str) -> Trace:
        """A trace of an owner.

        Raises:
            Problem: it has none of that id.
        """
        trace = self._traces.get(trace_id)
        if trace is None or trace.owner.id != owner.id or trace.taken:
            raise _none(trace_id)
        return trace

    def take(self, trace: Trace) -> None:
        """Begin to send what a trace brought home; it is nobody's any more, but counts.

        Raises:
            Problem: another request was first.
        """
        if trace.taken:
            raise _none(trace.id)
        trace.taken = True

    def forget(self, trace: Trace) -> None:
        """Let go of a trace; one that runs is cancelled."""
        self._traces.pop(trace.id, None)
        if trace.task is not None:
            trace.task.cancel()

    def running(self, owner: Owner) -> list[Trace]:
        """An owner's traces that run; for an admin everyone's."""
        return [
            trace
            for trace in self._traces.values()
            if (owner.admin or trace.owner.id == owner.id)
            and not (trace.task is not None and trace.task.done())
        ]

    def note(self, owner: Owner, text: str) -> None:
        """Remember an error for the page."""
        self.mishaps.append(Mishap(owner, time.time(), values.text(text[:500])))

    def recent(self, owner: Owner) -> list[Mishap]:
        """An owner's errors, the newest first; for an admin everyone's."""
        return [m for m in reversed(self.mishaps) if owner.admin or m.owner.id == owner.id]


def _none(trace_id: str) -> Problem:
    return Problem(404, f"You have no trace '{trace_id[:100]}'.", param="id")
