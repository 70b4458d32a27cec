"""A trace that a server runs while its client does something else."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from midstream.errors import CaptureError, UnsupportedError
from midstream.modeling.vllm.failures import report
from midstream.modeling.vllm.ledger import Outcome
from midstream.modeling.vllm.outputs import attach_edits
from midstream.modeling.vllm.payloads import Record

_AT_ONCE = 30.0  # seconds that the server is asked to wait before it answers that the trace runs


class Waiting:
    """What a trace with ``blocking=False`` can do after its `with` statement."""

    _server: Any
    _blocking = True
    _trace_id = ""
    _filled: Mapping[str, Any] = {}
    _take_home: Callable[[Sequence[Outcome], Mapping[str, Any]], list[Record]]

    def collect(self, timeout: float | None = None) -> Self | None:
        """Wait for the trace; its values are then in ``saves``, bound to no names.

        Args:
            timeout: seconds to wait; without one, for as long as it takes.

        Returns:
            The tracer; None if it still runs.

        Raises:
            InterventionError: a block failed.
            ServerError: the server cannot be reached, or no longer has the trace.
            CaptureError: the trace does not run in the background, or has been collected.
        """
        name = self._running("tracer.collect()")
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = _AT_ONCE if deadline is None else max(0.0, deadline - time.monotonic())
            outcomes = self._server.fetch(name, min(left, _AT_ONCE))
            if outcomes is not None:
                break
            if deadline is not None and time.monotonic() >= deadline:
                return None
        self._trace_id = ""
        records = self._take_home(outcomes, self._filled)
        attach_edits(outcomes)
        report(records)
        return self

    def cancel(self) -> None:
        """End the trace on the server; nothing of it comes home.

        Raises:
            CaptureError: the trace does not run in the background, or has been collected.
        """
        self._server.cancel(self._running("tracer.cancel()"))
        self._trace_id = ""

    def _start(self, requests: Sequence[Any], shared: Mapping[str, Any]) -> None:
        self._filled = shared
        self._trace_id = self._server.start(requests)

    def _running(self, what: str) -> str:
        if not self._trace_id:
            raise CaptureError(
                f"`{what}` belongs to a trace of `model.trace(..., serve=..., blocking=False)`, "
                "after its `with` statement and once."
            )
        return self._trace_id


def refuse_blocking(server: Any, mode: str) -> None:
    """Refuse ``blocking=False`` where nothing else can be done meanwhile, or always can.

    Raises:
        UnsupportedError: saying what to write instead.
    """
    if server is None or mode == "async":
        raise UnsupportedError(
            "blocking=False is for a server (serve=...) and a model that is not asynchronous. "
            "Use VLLM(..., mode='async') to do something else meanwhile."
        )
