"""The client of one vLLM engine: builds it, sends requests with blocks, takes records back."""

from __future__ import annotations

import gc
import itertools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from midstream.errors import EngineDeadError, MidstreamError, UnsupportedError
from midstream.modeling.vllm import bootstrap
from midstream.modeling.vllm.building import build, new_owner
from midstream.modeling.vllm.commons import Commons
from midstream.modeling.vllm.ending import PATIENCE, Ending
from midstream.modeling.vllm.interrupts import held
from midstream.modeling.vllm.ledger import Ledger, Outcome, Submission
from midstream.modeling.vllm.payloads.segments import discard, remaining
from midstream.modeling.vllm.results import write
from midstream.modeling.vllm.stats import Stats

_PATIENCE = 60.0  # seconds an engine in this process may step without closing a finished request
_DEAD = (
    "The engine ended while it ran this trace. What its process printed is above; the next trace "
    "builds a new engine."
)


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
        self._ledger = Ledger()
        self._sequences = self._ledger.sequences
        self._owner = new_owner()
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
            self._ledger.forget(list(self._sequences))

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
        commons = Commons(submissions)
        try:
            with held():
                if commons.to_bring:
                    self.llm.collective_rpc("midstream_bring", args=(commons.to_bring,))
                self._add_all(submissions, commons)
            self._until_closed()
            if not all(outcome.is_complete for outcome in self._outcomes.values()):
                self._drop(commons)
        except BaseException as error:
            if self._has_died(error):
                raise EngineDeadError(_DEAD) from error
            if self._sequences and not self.broken:  # Ctrl-C above all: leave no request behind
                self._abort()
            self._drop(commons)
            raise
        return list(self._outcomes.values())

    def _drop(self, commons: Commons) -> None:
        """Have the workers forget what requests that never came had in common."""
        if commons.to_bring and not self.broken:
            self.llm.collective_rpc("midstream_drop", args=(commons.numbers,))

    def _add_all(self, submissions: Sequence[Submission], commons: Commons) -> None:
        """Give vLLM the requests."""
        salt = f"midstream-{os.urandom(8).hex()}"
        with bootstrap.environment(bootstrap.runner_variables(self._vllm)):
            for submission in submissions:
                commons.tell(submission)
                self._add(submission, salt)

    def _add(self, submission: Submission, salt: str) -> None:
        """Give vLLM one request."""
        name = f"trace-{next(self._names)}"
        prompt, params = submission.loaded(self._kind, f"{salt}-{name}")
        request = self._core.add_request(name, prompt, params, lora_request=submission.lora)
        outcome = self._outcomes[name] = Outcome.of(submission.payload, params.n)
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
        self._ledger.close([i for i, (found, _) in self._sequences.items() if not found.expected])
        self._until_closed()
        self.broken = False

    def _until_closed(self) -> None:
        deadline = time.monotonic() + _PATIENCE
        while True:
            if self._ledger.waiting:  # before a step: the engine may have none left to make
                self._give_results()
            if all(map(self._ledger.is_closed, self._sequences)):
                return
            outputs = self._step()
            for output in outputs:
                if output.finished and output.request_id in self._outcomes:
                    self._outcomes[output.request_id].output = output
            if outputs or self._core.has_unfinished_requests():
                deadline = time.monotonic() + _PATIENCE
            elif time.monotonic() > deadline:
                missing = sorted(i for i in self._sequences if not self._ledger.is_closed(i))
                raise MidstreamError(f"The engine did not close the requests {missing}.")

    def _step(self) -> Any:
        """One step of the engine."""
        return self._undisturbed(self._core.step)

    def _give_results(self) -> None:
        """Send the blocks that wait for it what their requests ended with; theirs come back.

        A request without an output, of which no sequence runs any more, was aborted.
        """
        ended = self._ledger.closed | self._ledger.waiting
        running = {id(outcome) for i, (outcome, _) in self._sequences.items() if i not in ended}
        for outcome in self._outcomes.values():
            outcome.aborted = outcome.output is None and id(outcome) not in running
        found = self._ledger.results()
        if not found:
            return
        call = partial(self._core.collective_rpc, "midstream_finish", args=(write(found),))
        for records in self._undisturbed(call):
            self._ledger.take_records(records)
        self._ledger.close(found)

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
                others = self._ledger.without_messages(outputs)
                return process_outputs(others, *more, **keywords)

        return without_records

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
