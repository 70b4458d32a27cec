"""What a `VLLM` sends to its engine: requests with their blocks, and calls of the workers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from midstream.errors import PromptError, TransportError
from midstream.modeling.vllm import arguments as args
from midstream.modeling.vllm.asynchronous.engine import AsyncEngine
from midstream.modeling.vllm.client import Engine
from midstream.modeling.vllm.data import Request
from midstream.modeling.vllm.edits import EditRegistry
from midstream.modeling.vllm.ledger import Outcome, Submission
from midstream.modeling.vllm.wire import Payload

_SPECIAL = 8  # tokens that a tokenizer may put around a text; the text has at most one a byte


class Sending:
    """What a `VLLM` does with its engine.

    Attributes:
        mode: "sync", or "async" for an engine that serves an event loop.
    """

    mode: Literal["sync", "async"]
    tokenizer: Any
    dispatch: Callable[[], None]
    close: Callable[[], None]
    _lock: threading.RLock
    _engine: Engine | None
    _async_engine: AsyncEngine | None
    _edits: EditRegistry

    def _submit(self, requests: Sequence[Request]) -> list[Outcome]:
        """Run requests together, each with its block if it has one."""
        with self._lock:
            submissions = self._submissions(requests)
            self.dispatch()
            engine = self._engine
            assert engine is not None
            self._check_lengths(submissions, engine)
            try:
                return engine.run(submissions)
            finally:
                if engine.broken:
                    self.close()
                self._when_idle(self._edits.send)

    def _submissions(self, requests: Sequence[Request]) -> list[Submission]:
        """What to submit for requests."""
        params: dict[int, Any] = {}  # requests of a trace mostly have the same settings
        return [self._submission(request, params) for request in requests]

    def _submission(self, request: Request, params: dict[int, Any]) -> Submission:
        """What to submit for a request; `params` has what was made of settings before, by id."""
        given = request.settings
        if id(given) not in params:
            params[id(given)] = args.sampling(args.without_ours(given))
        payload = Payload(
            request.block,
            request.keep,
            self._edits.chosen(given.get("edits")),
            stream=bool(given.get("stream_saves")),
        )
        return Submission(
            request.prompt,
            params[id(given)],
            payload if payload.block or payload.edits else None,
            given.get("lora_request"),
            request.common,
            request.where,
        )

    def _call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of every worker, as soon as no other thread runs requests."""
        with self._lock:
            self.dispatch()
            engine = self._engine
            assert engine is not None
            try:
                return engine.call(method, *arguments)
            finally:
                if engine.broken:
                    self.close()

    def _install(self, method: str, *arguments: Any) -> None:
        """Install something in every worker.

        Raises:
            TransportError: a worker could not take it in.
        """
        for problem in self._call(method, *arguments):
            if problem:
                raise TransportError(problem)

    def _when_idle(self, act: Callable[[], None]) -> None:
        """Do something with the engine, unless it runs requests, which do it at their end."""
        if self._lock.acquire(blocking=False):
            try:
                if self._engine is not None and not self._engine.running:
                    act()
            finally:
                self._lock.release()

    def _check_lengths(
        self, submissions: Sequence[Submission], engine: Engine | AsyncEngine
    ) -> None:
        """Refuse a prompt that does not fit one step, where a block has to see it whole."""
        for submission in submissions:
            if submission.payload is not None:
                self._check_length(submission.prompt, engine)

    def _check_length(self, prompt: Mapping[str, Any], engine: Engine | AsyncEngine) -> None:
        budget, ids = engine.budget, prompt.get("prompt_token_ids")
        text = prompt.get("prompt") or ""
        if ids is None and len(text.encode()) > budget - _SPECIAL and self.tokenizer:
            ids = self.tokenizer(text)["input_ids"]
        if ids is not None and len(ids) > budget:
            raise PromptError(
                f"The prompt has {len(ids)} tokens, but a step of the engine has at most {budget}, "
                "and a block has to see its prompt whole. Build the model with "
                f"{engine.budget_name}={len(ids)} or more."
            )
