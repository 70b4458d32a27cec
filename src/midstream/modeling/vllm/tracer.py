"""One trace: a prompt, a block, and what comes back."""

from __future__ import annotations

import sys
from collections.abc import Coroutine, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from midstream.errors import (
    CaptureError,
    EngineDeadError,
    NotInTraceError,
    PromptError,
    UnsupportedError,
)
from midstream.interleaving.caches import Cache  # its class has to be loaded when one comes home
from midstream.modeling.capturing import Capturing, at_once
from midstream.modeling.merging import merge
from midstream.modeling.vllm.data import Request, write
from midstream.modeling.vllm.failures import report
from midstream.modeling.vllm.invoke import Invoke
from midstream.modeling.vllm.ledger import Outcome
from midstream.modeling.vllm.modes import async_only
from midstream.modeling.vllm.outputs import attach_edits, edit_records
from midstream.modeling.vllm.payloads import Record
from midstream.modeling.vllm.remote.waiting import Waiting
from midstream.modeling.vllm.unsupported import BARRIER
from midstream.tracing import Block, Execution, bind
from midstream.tracing.sharing import Sharing
from midstream.tracing.shipping import write as write_block

if TYPE_CHECKING:
    from midstream.modeling.vllm.asynchronous.backend import Backend
    from midstream.modeling.vllm.model import VLLM


class Tracer(Waiting, Capturing):
    """What `model.trace(...)` gives.

    As a context manager it captures the body of its `with` statement, runs it in the engine, and
    binds the saved values to their names. With ``block=`` the function has run when the call
    returns, and its values are in ``saves``. Of an asynchronous model it is on its way then, see
    ``backend``; ``async with`` waits and binds.

    Attributes:
        saves: the saved values by name.
        result: vLLM's finished `RequestOutput` (text, token ids, finish reason), a list of them in
            the order of the invokes if there are several; None before the trace has run and for a
            request that was aborted. Where installed edits ran, its ``saves`` has their values.
    """

    def __init__(
        self,
        model: VLLM,
        prompt: dict[str, Any] | None,
        settings: Mapping[str, Any],
        *,
        run: bool = True,
    ):
        self._model, self._prompt, self._settings = model, prompt, dict(settings)
        self._run = run
        self._requests: list[Request] = []
        self._sharing = Sharing()
        self._outside: Mapping[str, Any] = {}
        self._collecting: dict[str, Any] | None = None
        self._backend: Backend | None = None
        self._server: Any = None  # a `Server`, or an `AsyncServer` of a model on an event loop
        self.saves: dict[str, Any] = {}
        self.result: Any = None

    def __enter__(self) -> Tracer:
        self._enter(sys._getframe(1))
        return self

    def __aenter__(self) -> Coroutine[Any, Any, Tracer]:
        async_only(self._model.mode, "async with model.trace(...)", "with model.trace(...)")
        self._enter(sys._getframe(1))
        return at_once(self)

    def _enter(self, frame: FrameType) -> None:
        if self._requests or self._collecting is not None:
            raise UnsupportedError(
                "This trace has its block already, and a trace runs once. Call `model.trace(...)` "
                "again, in the header of the next `with`."
            )
        self._begin(frame, "model.trace")

    def _captured(self, block: Block, frame: FrameType) -> None:
        if self._model.mode == "async":
            self._take(block)  # nothing has come yet that could be bound
            return
        try:
            self._take(block)
        finally:
            bind(frame, self.saves)

    async def _acaptured(self, block: Block, frame: FrameType) -> None:
        try:
            self._take(block)
            if self._run:
                await self.backend
        finally:
            bind(frame, self.saves)

    def _take(self, block: Block) -> None:
        """Run a captured block, or keep it; without a prompt it gives the trace its requests."""
        shared: dict[str, Any] = {}
        if self._prompt is None:
            shared = self._collect(block)
        else:
            self._add(self._prompt, {}, block)
        self._share()
        if self._run:
            self._execute(shared)

    def invoke(self, prompt: Any = None, *more: Any, **settings: Any) -> Invoke:
        """One request of a trace that was opened without a prompt.

        Args:
            prompt: as in ``VLLM.trace``.
            settings: this request's sampling settings, `lora_request` and `edits`; what they leave
                out is taken from the trace's.

        Returns:
            A context manager whose body is the request's block.

        Raises:
            PromptError: not exactly one prompt.
            TypeError: an unknown setting.
            UnsupportedError: the trace has a prompt of its own, or runs already.
        """
        if self._collecting is None:
            raise UnsupportedError(
                "`tracer.invoke()` belongs into the body of a trace that was opened without a "
                "prompt: `with model.trace() as tracer:`."
            )
        checked = None if prompt is None else self._model._prompt(prompt, more)
        streams = self._model.mode == "async" or not self._run
        self._model._check_settings(settings, streams=streams)
        if self._run and self._server is None:
            self._model._edits.chosen(settings.get("edits"))
        return Invoke(self, checked, settings)

    def _collect(self, block: Block) -> dict[str, Any]:
        """Execute the trace's own body here, which opens its invokes.

        Returns:
            The containers it has saved, by name: its requests fill them together.
        """
        outer = Execution(block, model=self._model, tracer=self)
        self._collecting, self._outside = outer.namespace, block.values
        try:
            outer.run()
        finally:
            self._collecting, self._outside = None, {}
        shared = outer.saves()
        if not self._requests:
            raise PromptError(
                "The trace has neither a prompt nor an invoke, so there is nothing to run. Give it "
                "a prompt, or open `with tracer.invoke(prompt):` in its body."
            )
        for request in self._requests:
            request.keep = sorted(shared)
        return shared

    def _add(self, prompt: dict[str, Any], settings: Mapping[str, Any], block: Block) -> None:
        """Take one request in, in the order of submission."""
        session = self._model._own_session
        if session is not None:
            session._check(block)
        self._sharing.add(write_block(block, self._model._reference, self._outside))
        if session is not None:
            session._note(block)
        code = block.code or block.listing
        where = f"{code.filename}, line {code.first_line}" if code is not None else "a function"
        merged = self._merged(settings) if settings else self._settings
        self._requests.append(Request(prompt, merged, where=where))

    def _merged(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The trace's settings with an invoke's own in their place."""
        merged = {**self._settings, **settings}
        if "max_tokens" in settings or "max_new_tokens" in settings:  # two names of one setting
            for name in ("max_tokens", "max_new_tokens"):
                if name not in settings:
                    merged.pop(name, None)
        return merged

    def _share(self) -> None:
        """Take what the blocks have in common out of them, once all are known."""
        for request, parts in zip(self._requests, self._sharing.split(), strict=True):
            request.common, request.block = parts
        self._sharing = Sharing()

    def _execute(self, shared: Mapping[str, Any]) -> None:
        """Run the requests, keeping what their blocks saved.

        Raises:
            InterventionError: blocks failed; what the others and they themselves saved is kept.
            EngineDeadError: the engine did not survive it.
        """
        if self._model.mode == "async":
            self._backend = self._model._launch(self, self._requests, shared)
            return
        if not self._blocking:
            self._start(self._requests, shared)
            return
        try:
            run = self._model._submit if self._server is None else self._server.run
            outcomes = run(self._requests)
        except EngineDeadError as dead:
            where = "; ".join(dict.fromkeys(request.where for request in self._requests))
            raise EngineDeadError(f"{dead} The block that ran: {where}.") from dead.__cause__
        finally:
            if self._model._own_session is not None:
                self._model._own_session._finish_trace()
        records = self._take_home(outcomes, shared)
        attach_edits(outcomes)
        report(records)

    def _take_home(self, outcomes: Sequence[Outcome], shared: Mapping[str, Any]) -> list[Record]:
        """Take in what the requests brought home; the records, those of edits first."""
        results = [outcome.output for outcome in outcomes]
        alone = self._prompt is not None or len(results) == 1
        self.result = next(iter(results), None) if alone else results
        records = [record for outcome in outcomes for record in outcome.records if record]
        self.saves = merge([record.saves for record in records], shared)
        return [*edit_records(outcomes), *records]

    @property
    def backend(self) -> Backend:
        """An asynchronous trace on its way, see ``Backend``: to be awaited, or iterated over.

        Raises:
            UnsupportedError: the model is not asynchronous.
            CaptureError: nothing has been captured yet.
        """
        if self._model.mode != "async":
            raise UnsupportedError(
                "`tracer.backend` belongs to VLLM(..., mode='async'). Here the trace has run when "
                "its `with` ends: its values are bound to their names, and `tracer.result` is the "
                "finished request."
            )
        if self._backend is None:
            raise CaptureError(
                "Nothing runs yet: use `tracer.backend` after the `with` statement of the trace."
            )
        return self._backend

    @property
    def iter(self) -> NoReturn:
        """The request's steps, inside the block: ``for step in tracer.iter[:3]``."""
        raise NotInTraceError("`tracer.iter` exists only inside the block.")

    def all(self) -> NoReturn:
        """All steps of the request, inside the block: ``for step in tracer.all()``."""
        raise NotInTraceError("`tracer.all()` exists only inside the block.")

    def cache(self, *args: Any, **keywords: Any) -> Cache:
        """Record modules, inside the block."""
        raise NotInTraceError("`tracer.cache()` exists only inside the block.")

    def barrier(self, *args: Any) -> NoReturn:
        """Refuse, and say what to write instead.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(BARRIER)

    def stop(self) -> NoReturn:
        """End the request, inside the block."""
        raise NotInTraceError("`tracer.stop()` exists only inside the block.")

    def to_bytes(self) -> bytes:
        """The captured trace as bytes, for ``VLLM.run`` in another process. Needs no engine.

        Raises:
            CaptureError: nothing has been captured yet.
            TransportError: a setting cannot travel.
        """
        if not self._requests:
            raise CaptureError(
                "Nothing has been captured yet: call `to_bytes()` after the `with` statement."
            )
        return write(self._requests)
