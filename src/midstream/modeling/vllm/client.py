"""The client of one vLLM engine: builds it, sends requests with blocks, takes records back."""

from __future__ import annotations

import copy
import gc
import itertools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import torch

from midstream.errors import EngineDeadError, MidstreamError, UnsupportedError
from midstream.modeling.vllm import bootstrap
from midstream.modeling.vllm.building import build
from midstream.modeling.vllm.commons import Commons
from midstream.modeling.vllm.ending import PATIENCE, Ending
from midstream.modeling.vllm.interrupts import held
from midstream.modeling.vllm.payloads import Record, unpack
from midstream.modeling.vllm.payloads.segments import discard, owner_id, remaining, sweep
from midstream.modeling.vllm.results import Result, of_output, write
from midstream.modeling.vllm.stats import Stats
from midstream.modeling.vllm.wire import EDIT, KEY, RECORDS, Payload

_TAGS = itertools.count()  # tell this process's engines apart
_PATIENCE = 60.0  # seconds an engine in this process may step without closing a finished request
_DEAD = (
    "The engine ended while it ran this trace. What its process printed is above; the next trace "
    "builds a new engine."
)


@dataclass
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
    """

    expected: int = 0
    edited: bool = False
    output: Any = None
    records: list[Record | None] = field(default_factory=list)
    edits: list[dict[int, Record]] = field(default_factory=list)

    def has_all_of(self, index: int) -> bool:
        """Whether all records of a sequence are in."""
        return (self.records[index] is not None) + len(self.edits[index]) == self.expected

    @property
    def is_complete(self) -> bool:
        """Whether all records are in."""
        return all(map(self.has_all_of, range(len(self.records))))


@dataclass(frozen=True)
class Submission:
    """One request to run: vLLM's prompt, sampling parameters and adapter, and what blocks need.

    Without a payload it is plain vLLM's, its KV cache shared like any other's. `common` is what its
    block shares with others that are submitted with it.
    """

    prompt: dict[str, Any]
    params: Any
    payload: Payload | None
    lora: Any = None
    common: bytes = b""


class Engine:
    """One vLLM engine with blocks.

    Args:
        repo: checkpoint folder or repository id.
        settings: vLLM's engine arguments.
        vllm: the installed vLLM.
        invariant: whether it is to use batch-invariant kernels.

    Raises:
        EngineBuildError: the engine did not come up; the text holds the root cause.
    """

    def __init__(
        self,
        repo: str,
        settings: Mapping[str, Any],
        vllm: bootstrap.Installed,
        *,
        invariant: bool = False,
    ):
        self._vllm = vllm
        self._in_process = bootstrap.in_process()
        self._running = False
        self.broken = False
        self._names = itertools.count()
        self._outcomes: dict[str, Outcome] = {}
        self._sequences: dict[str, tuple[Outcome, int]] = {}
        self._closed: set[str] = set()
        self._waiting: set[str] = set()
        self._owner = owner_id(tag=next(_TAGS))
        sweep()  # of clients that were killed
        self.llm = build(repo, dict(settings), vllm, self._owner, invariant=invariant)
        from vllm.sampling_params import RequestOutputKind

        self._kind = RequestOutputKind.FINAL_ONLY
        self._core = self.llm.llm_engine
        self._ending = Ending(self._core.engine_core)
        processor = self._core.output_processor
        processor.process_outputs = self._taking_records(processor.process_outputs)

    @property
    def budget(self) -> int:
        """Most tokens the engine runs in one step."""
        return int(getattr(self._core.vllm_config.scheduler_config, self.budget_name))

    @property
    def budget_name(self) -> str:
        """The engine argument that sets it."""
        less = self._core.vllm_config.scheduler_config.max_num_scheduled_tokens
        return "max_num_batched_tokens" if less is None else "max_num_scheduled_tokens"

    def stats(self) -> Stats:
        """What the engine has done and what it holds.

        Raises:
            EngineDeadError: the engine's process has ended.
        """
        from vllm.v1.engine.exceptions import EngineDeadError as VLLMEngineDeadError

        try:
            ranks = self.llm.collective_rpc("midstream_stats")
        except VLLMEngineDeadError as error:
            raise EngineDeadError(
                "The engine has ended; the next trace builds a new one."
            ) from error
        return Stats.of(ranks, len(remaining(self._owner)))

    def run(self, submissions: Sequence[Submission]) -> list[Outcome]:
        """Run requests with their blocks, until the last record is in.

        Raises:
            EngineDeadError: the engine's process ended.
            UnsupportedError: called while this thread is already running a trace.
        """
        if self._running:
            raise UnsupportedError("A trace inside a trace is not supported.")
        self._running = True
        try:
            return self._run(submissions)
        finally:
            self._running = False
            self._outcomes.clear()
            self._sequences.clear()
            self._closed.clear()
            self._waiting.clear()

    @property
    def running(self) -> bool:
        """Whether it is running requests."""
        return self._running

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of every worker, between requests.

        Raises:
            EngineDeadError: the engine's process ended.
            UnsupportedError: called while this thread is running requests.
        """
        if self._running:
            raise UnsupportedError("The engine cannot be changed while it runs a trace.")
        try:
            with held():
                found: list[Any] = self.llm.collective_rpc(method, args=arguments)
        except BaseException as error:
            if self._has_died(error):
                raise EngineDeadError(_DEAD) from error
            raise
        return found

    def _run(self, submissions: Sequence[Submission]) -> list[Outcome]:
        commons: Commons | None = None
        try:
            with held():
                commons = Commons(self.llm.collective_rpc, submissions)
                self._add_all(submissions, commons)
            self._until_closed()
            if not all(outcome.is_complete for outcome in self._outcomes.values()):
                commons.drop()
        except BaseException as error:
            if self._has_died(error):
                raise EngineDeadError(_DEAD) from error
            if self._sequences and not self.broken:  # Ctrl-C above all: leave no request behind
                self._abort()
            if commons is not None and not self.broken:
                commons.drop()
            raise
        return list(self._outcomes.values())

    def _add_all(self, submissions: Sequence[Submission], commons: Commons) -> None:
        """Give vLLM the requests."""
        salt = f"midstream-{os.urandom(8).hex()}"
        with bootstrap.environment(bootstrap.runner_variables(self._vllm)):
            for submission in submissions:
                if submission.payload is not None:
                    submission.payload.common = commons.number(submission)
                self._add(submission, salt)

    def _add(self, submission: Submission, salt: str) -> None:
        """Give vLLM one request."""
        name = f"trace-{next(self._names)}"
        params, prompt = copy.copy(submission.params), dict(submission.prompt)
        params.output_kind = self._kind
        if submission.payload is not None:
            _load(params, prompt, submission.payload, f"{salt}-{name}")
        request = self._core.add_request(name, prompt, params, lora_request=submission.lora)
        payload = submission.payload or Payload()
        outcome = self._outcomes[name] = Outcome(
            expected=bool(payload.block) + len(payload.edits),
            edited=bool(payload.edits),
            records=[None] * params.n,
            edits=[{} for _ in range(params.n)],
        )
        ids = [request] if params.n == 1 else [f"{index}_{request}" for index in range(params.n)]
        self._sequences.update({i: (outcome, index) for index, i in enumerate(ids)})

    def _has_died(self, error: BaseException) -> bool:
        """Whether the engine cannot go on after an error; vLLM's own do not end a step halfway."""
        from vllm.v1.engine.exceptions import EngineDeadError as VLLMEngineDeadError

        dead = isinstance(error, VLLMEngineDeadError) or self._ending.has_begun
        self.broken = self.broken or dead
        return self.broken and isinstance(error, Exception)

    def _abort(self) -> None:
        """End the requests early; a second Ctrl-C meanwhile gives the engine up."""
        self.broken = True
        self._core.abort_request(list(self._outcomes))
        # vLLM's output side may have finished them already, and then tells the engine nothing
        self._core.engine_core.abort_requests(list(self._sequences))
        # of requests without a block no word comes
        self._closed.update(i for i, (found, _) in self._sequences.items() if not found.expected)
        self._until_closed()
        self.broken = False

    def _until_closed(self) -> None:
        deadline = time.monotonic() + _PATIENCE
        while True:
            if self._waiting:  # before a step: the engine may have none left to make
                self._give_results()
            if all(map(self._is_closed, self._sequences)):
                return
            outputs = self._step()
            for output in outputs:
                if output.finished and output.request_id in self._outcomes:
                    self._outcomes[output.request_id].output = output
            if outputs or self._core.has_unfinished_requests():
                deadline = time.monotonic() + _PATIENCE
            elif time.monotonic() > deadline:
                missing = sorted(i for i in self._sequences if not self._is_closed(i))
                raise MidstreamError(f"The engine did not close the requests {missing}.")

    def _is_closed(self, sequence: str) -> bool:
        """Whether nothing more comes of a sequence: the engine says so, or all of it is here."""
        if sequence in self._closed:
            return True
        outcome, index = self._sequences[sequence]
        return outcome.output is not None and outcome.has_all_of(index)

    def _step(self) -> Any:
        """One step of the engine."""
        return self._undisturbed(self._core.step)

    def _give_results(self) -> None:
        """Send the blocks that wait for it what their requests ended with; theirs come back.

        VLLM's output of a request is in before its block is known to wait. Where there is none
        though none of its sequences runs any more, the request was aborted.
        """
        ended = self._closed | self._waiting
        running = {id(outcome) for i, (outcome, _) in self._sequences.items() if i not in ended}
        found: dict[str, Result | None] = {}
        for i in sorted(self._waiting):
            outcome, index = self._sequences[i]
            if outcome.output is not None:
                found[i] = of_output(outcome.output, index)
            elif id(outcome) not in running:
                found[i] = None
        if not found:
            return
        call = partial(self._core.collective_rpc, "midstream_finish", args=(write(found),))
        for records in self._undisturbed(call):
            self._take_records(records)
        self._closed.update(found)
        self._waiting.difference_update(found)

    def _undisturbed(self, call: Callable[[], Any]) -> Any:
        """Have the engine do something, which in this process must not be left halfway."""
        if not self._in_process:
            return call()
        with held():
            try:
                return call()
            except BaseException:
                self.broken = True
                raise

    def _taking_records(self, process_outputs: Any) -> Any:
        """VLLM's output processing, after our own outputs have been taken out."""

        def without_records(outputs: list[Any], *more: Any, **keywords: Any) -> Any:
            with held():
                for output in outputs:
                    if output.request_id == RECORDS:
                        self._take(output.kv_transfer_params)
                others = [output for output in outputs if output.request_id != RECORDS]
                return process_outputs(others, *more, **keywords)

        return without_records

    def _take(self, message: dict[str, Any]) -> None:
        waiting = self._sequences.keys() & message["waiting"]
        self._waiting.update(waiting)
        self._closed.update(i for i in message["closed"] if i not in waiting)
        self._take_records(message["records"])

    def _take_records(self, records: bytes) -> None:
        for record in unpack(records) if records else ():
            if record.request_id in self._sequences:
                outcome, index = self._sequences[record.request_id]
                if EDIT in record.extra:
                    outcome.edits[index][record.extra[EDIT]] = record
                else:
                    outcome.records[index] = record

    def close(self) -> None:
        """End the engine's processes and free what this one holds of it; twice is no error."""
        llm, self.llm = self.llm, None
        if llm is None:
            return
        self._core = None
        self._ending(llm.llm_engine.engine_core, 1.0 if self.broken else PATIENCE)
        del llm
        gc.collect()
        if torch.cuda.is_initialized():  # never by midstream, but by an engine in this process
            torch.cuda.empty_cache()
        discard(self._owner)


def _load(params: Any, prompt: dict[str, Any], payload: Payload, salt: str) -> None:
    """Put what blocks need into a request, and keep its KV cache to itself."""
    params.extra_args = {**(params.extra_args or {}), KEY: msgspec.msgpack.encode(payload)}
    params.skip_reading_prefix_cache = True
    prompt["cache_salt"] = f"{prompt['cache_salt']}-{salt}" if "cache_salt" in prompt else salt
