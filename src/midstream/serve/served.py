"""What a server serves: one engine, its edits and the traces that run."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.responses import Response

from midstream.modeling.vllm import prompts
from midstream.modeling.vllm.asynchronous.engine import AsyncEngine
from midstream.modeling.vllm.asynchronous.flight import Flight
from midstream.modeling.vllm.data import Request
from midstream.modeling.vllm.ledger import Outcome, Submission
from midstream.modeling.vllm.limits import Limits
from midstream.modeling.vllm.outputs import attach_new_saves
from midstream.modeling.vllm.remote import outcomes, tree
from midstream.modeling.vllm.remote.wire import (
    FRAMES,
    EditCall,
    EditInfo,
    Versions,
    decode,
)
from midstream.modeling.vllm.wire import Payload
from midstream.serve import asked, calls, reports
from midstream.serve.access import Access, Owner
from midstream.serve.flags import Bounds
from midstream.serve.installed import Installed
from midstream.serve.problems import Problem, of_error
from midstream.serve.replies import InParts
from midstream.serve.traces import Trace, Traces
from midstream.tracing.shipping import Opened

logger = logging.getLogger(__name__)


@dataclass
class Ready:
    """A trace that was found to be in order."""

    submissions: list[Submission]
    what: str
    stream: bool
    background: bool


class Served:
    """An engine as clients use it over HTTP.

    Args:
        model: the `VLLM` on an asynchronous engine.
        access: the keys.
        bounds: what is taken.
        limits: what blocks may take.

    Attributes:
        state: the state of vLLM's app, once that is there.
        vocabulary: how many token ids the model has.
    """

    def __init__(self, model: Any, access: Access, bounds: Bounds, limits: Limits):
        self.access, self.bounds, self._limits = access, bounds, limits
        self._model = model
        self.engine: AsyncEngine = model._async_engine
        self.installed = Installed(bounds.most_edits)
        self.traces = Traces(bounds.most_traces, bounds.keep_seconds)
        self.call = self.engine.call
        self.state: Any = None
        self.about = self._about()
        config = self.engine.llm.model_config
        self.vocabulary = int(config.get_vocab_size())
        words = self._model.tokenizer.get_vocab() if self._model.tokenizer else ()
        self._longest_text = config.max_model_len * max(map(len, words), default=0)

    def _about(self) -> dict[str, Any]:
        config = self.engine.llm.model_config
        return {
            "model": self._model.repo,
            "versions": {**msgspec.structs.asdict(Versions()), "vllm": self._model._vllm.version},
            "tree": tree.write(self._model.tree.root),
            "taps": list(self._model.taps),
            "code": self.bounds.code,
            "limits": {
                **dataclasses.asdict(self._limits),
                "max_model_len": config.max_model_len,
                "max_prompt_tokens": self.engine.budget,
                "max_traces_per_key": self.bounds.most_traces,
                "max_edits_per_key": self.bounds.most_edits,
                "max_body_bytes": self.bounds.max_body,
            },
        }

    def refuse_if_dead(self) -> None:
        """Refuse everything once the engine has ended; the server ends too then.

        Raises:
            Problem: it has.
        """
        if self.engine.broken or self.engine.llm is None:
            raise Problem(503, "The engine has ended, and the server with it.")

    # What clients ask for.

    async def prepare(self, body: bytes, is_json: bool, owner: Owner) -> Ready:
        """Look at a trace before anything of it runs.

        Raises:
            Problem: something in it is wrong, or this key may not do it.
            ValueError: it is no trace.
        """
        call: Any
        call, requests = calls.text_call(body) if is_json else calls.trace_call(body)
        if not self.bounds.code and any(request.block or request.common for request in requests):
            raise Problem(403, "This server runs no blocks of clients (--no-code): choose edits.")
        edits = calls.chosen_edits(requests, lambda names: self.installed.chosen(owner, names))
        found = [self._submission(*pair) for pair in zip(requests, edits, strict=True)]
        what = dict.fromkeys(request.where for request in requests)
        return Ready(found, "; ".join(what)[:200], call.stream, call.background)

    def _submission(self, request: Request, edits: list[int]) -> Submission:
        stream = bool(request.settings.get("stream_saves"))
        payload = Payload(request.block, request.keep, edits, stream=stream)
        has_blocks = bool(payload.block or payload.edits)
        prompt = dict(request.prompt)
        if self._longest_text:
            asked.check_text(prompt, self._longest_text)
        if "messages" in prompt:
            prompt = prompts.single(prompt["messages"], self._tokenizer())
        if has_blocks:
            self.check_length(prompt)
        return Submission(
            prompt,
            calls.sampling(request.settings),
            payload if has_blocks else None,
            self._adapter(request.settings.get("lora_request")),
            request.common,
            request.where,
        )

    def _tokenizer(self) -> Any:
        """The tokenizer, with the server's own chat template if it was given one."""
        tokenizer = self._model.tokenizer
        template = self.state.args.chat_template if self.state is not None else None
        if tokenizer is None or template is None:
            return tokenizer
        from vllm.renderers.chat_utils import load_chat_template

        return _Templated(tokenizer, load_chat_template(template))

    def check_length(self, prompt: Mapping[str, Any]) -> None:
        """Refuse a prompt that does not fit one step: a block has to see it whole.

        Raises:
            PromptError: it does not.
        """
        self._model._check_length(prompt, self.engine)

    def _adapter(self, name: str | None) -> Any:
        if name is None:
            return None
        known = self.state.openai_serving_models.lora_requests
        if name not in known:
            there = ", ".join(map(repr, known)) or "none"
            raise Problem(400, f"No adapter is called '{name}'; there are: {there}.")
        return known[name]

    def start(self, ready: Ready, owner: Owner) -> Trace:
        """Begin to run a trace.

        Raises:
            Problem: the owner has too many.
        """
        return self.traces.start(
            owner, len(ready.submissions), ready.what, lambda: self._run(ready)
        )

    async def _run(self, ready: Ready) -> Sequence[Outcome]:
        from vllm.sampling_params import RequestOutputKind

        return await self._landed(
            Flight(self.engine, ready.submissions, RequestOutputKind.FINAL_ONLY)
        )

    async def _landed(self, flight: Flight) -> Sequence[Outcome]:
        try:
            return await flight.wait()
        except asyncio.CancelledError:
            self.engine.spawn(flight.abort())
            raise

    async def reply(self, trace: Trace, *, packed: bool) -> Response:
        """The answer with what a finished trace brought home; it counts until that is sent.

        Raises:
            Problem: it is being sent already.
            Exception: what kept the trace from running.
        """
        self.traces.take(trace)
        try:
            found = await self._found(trace)
            parts = await asyncio.to_thread(_written, trace.id, found, packed)
        except BaseException:
            self.traces.forget(trace)
            raise
        kind = FRAMES if packed else "application/json"
        return InParts(parts, kind, lambda: self.traces.forget(trace))

    async def _found(self, trace: Trace) -> Sequence[Outcome]:
        assert trace.task is not None
        if trace.task.cancelled():
            raise Problem(404, "The trace was cancelled.")
        found = trace.task.result()
        for text in reports.failures(found):
            self.traces.note(trace.owner, text)
        return found

    async def events(self, ready: Ready, owner: Owner) -> AsyncIterator[bytes]:
        """A trace as server-sent events: "output" as text grows, then "reply", or "error"."""
        from vllm.sampling_params import RequestOutputKind

        latest, flights = reports.Latest(), []

        async def run() -> Sequence[Outcome]:
            kind = RequestOutputKind.CUMULATIVE
            flights.append(Flight(self.engine, ready.submissions, kind, latest.put))
            try:
                return await self._landed(flights[0])
            finally:
                latest.end()

        trace = self.traces.start(owner, len(ready.submissions), ready.what, run)
        try:
            yield reports.event("started", msgspec.json.encode({"id": trace.id}))
            while (each := await latest.get()) is not None:
                attach_new_saves(flights[0].requests[each[0]], each[1])
                yield reports.event("output", reports.output(*each))
            assert trace.task is not None
            await asyncio.wait([trace.task])
            found = await self._found(trace)
            yield reports.event("reply", await asyncio.to_thread(reports.packed, trace.id, found))
            yield b""  # waits until the client has taken it, so that the trace counts until then
        except Exception as error:  # noqa: BLE001  # the status has been sent; the stream tells it
            self.traces.note(owner, repr(error))
            yield reports.event("error", bytes(of_error(error).response().body))
        finally:
            self.traces.forget(trace)

    async def install(self, body: bytes, is_json: bool, owner: Owner) -> EditInfo:
        """Install an edit.

        Raises:
            Problem: something in it is wrong, or this key may not do it.
            TransportError: a worker could not take it in.
        """
        if not self.bounds.code and not owner.admin:
            raise Problem(403, "On this server admin keys alone install edits (--no-code).")
        if is_json:
            text: calls.TextEdit = calls.from_json(body, calls.TextEdit)
            name, block = text.name, calls.text_block(text.code)
        else:
            calls.versions(body)
            call = decode(body, EditCall, "edit")
            name, block = call.name, call.block
        if name is not None and not 0 < len(name) <= 200:
            raise Problem(400, "name: 1 to 200 characters.", param="name")
        Opened(block)  # reads the versions; its values stay bytes
        edit = await self.installed.install(self.call, owner, name, block)
        return EditInfo(edit.id, edit.name, everywhere=owner.admin)

    async def page_state(self, owner: Owner) -> dict[str, Any]:
        """What the page shows to an owner."""
        stats = await self.engine.stats()
        edits = self.installed.listed(owner)
        return {
            "model": self._name(),
            "load": reports.load(stats, self.engine.llm),
            "traces": [
                {"id": t.id, "what": t.what, "started": t.started, "mine": t.owner.id == owner.id}
                for t in self.traces.running(owner)
            ],
            "edits": [{**msgspec.structs.asdict(e), "clear": e.mine or owner.admin} for e in edits],
            "errors": [{"at": m.at, "text": m.text} for m in self.traces.recent(owner)[:20]],
        }

    def _name(self) -> str:
        """What clients call the model."""
        names = self.state.args.served_model_name if self.state is not None else None
        return str(names[0] if names else self._model.repo)

    def log(self, error: BaseException) -> None:
        """Log an error that is the server's."""
        logger.error("midstream: a request failed", exc_info=error)


def _written(name: str, found: Sequence[Outcome], packed: bool) -> Sequence[bytes | memoryview]:
    return outcomes.write(name, found) if packed else [reports.as_json(found)]


class _Templated:
    """A tokenizer with another chat template."""

    def __init__(self, tokenizer: Any, template: str):
        self._tokenizer, self._template = tokenizer, template

    def apply_chat_template(self, messages: Any, **how: Any) -> Any:
        """As the tokenizer's own."""
        return self._tokenizer.apply_chat_template(messages, chat_template=self._template, **how)
