"""The client of one vLLM engine: builds it, sends requests with blocks, takes records back."""

from __future__ import annotations

import gc
import itertools
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from midstream.errors import EngineDeadError, MidstreamError, UnsupportedError
from midstream.modeling.vllm import bootstrap
from midstream.modeling.vllm.building import build
from midstream.modeling.vllm.ending import PATIENCE, Ending
from midstream.modeling.vllm.interrupts import held
from midstream.modeling.vllm.payloads import Record, unpack
from midstream.modeling.vllm.payloads.segments import discard, owner_id, sweep
from midstream.modeling.vllm.wire import KEY, RECORDS

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
        output: vLLM's finished `RequestOutput`; None if the request was aborted.
        record: what its block left; None if it ended before the block began.
    """

    output: Any = None
    record: Record | None = None


class Engine:
    """One vLLM engine with blocks.

    Args:
        repo: checkpoint folder or repository id.
        settings: vLLM's engine arguments.
        vllm: the installed vLLM.

    Raises:
        EngineBuildError: the engine did not come up; the text holds the root cause.
    """

    def __init__(self, repo: str, settings: Mapping[str, Any], vllm: bootstrap.Installed):
        self._vllm = vllm
        self._in_process = bootstrap.in_process()
        self._running = False
        self.broken = False
        self._names = itertools.count()
        self._outcomes: dict[str, Outcome] = {}
        self._closed: set[str] = set()
        self._owner = owner_id(tag=next(_TAGS))
        sweep()  # of clients that were killed
        self.llm = build(repo, dict(settings), vllm, self._owner)
        self._core = self.llm.llm_engine
        self._ending = Ending(self._core.engine_core)
        processor = self._core.output_processor
        processor.process_outputs = self._taking_records(processor.process_outputs)

    @property
    def budget(self) -> int:
        """Most tokens the engine runs in one step."""
        return int(self._core.vllm_config.scheduler_config.max_num_batched_tokens)

    def run(self, prompt: Any, params: Any, block: bytes, lora: Any = None) -> Outcome:
        """Run one request with a block, until its record is in.

        Raises:
            EngineDeadError: the engine's process ended.
            UnsupportedError: called while this thread is already running a trace.
        """
        if self._running:
            raise UnsupportedError("A trace inside a trace is not supported.")
        self._running = True
        try:
            return self._run(prompt, self._with_block(prompt, params, block), lora)
        finally:
            self._running = False
            self._outcomes.clear()
            self._closed.clear()

    def _with_block(self, prompt: dict[str, Any], params: Any, block: bytes) -> Any:
        """Sampling parameters that carry the block and keep its KV cache to itself."""
        from vllm.sampling_params import RequestOutputKind

        params = params.clone()
        params.output_kind = RequestOutputKind.FINAL_ONLY  # as vLLM's own `generate` does
        params.extra_args = {**(params.extra_args or {}), KEY: block}
        params.skip_reading_prefix_cache = True
        salt = f"midstream-{os.urandom(8).hex()}"
        prompt["cache_salt"] = f"{prompt['cache_salt']}-{salt}" if "cache_salt" in prompt else salt
        return params

    def _run(self, prompt: Any, params: Any, lora: Any) -> Outcome:
        name, request, outcome = f"trace-{next(self._names)}", "", Outcome()
        try:
            with held():
                with bootstrap.environment(bootstrap.runner_variables(self._vllm)):
                    request = self._core.add_request(name, prompt, params, lora_request=lora)
                self._outcomes[request] = outcome
            self._until_closed(name, request, outcome)
        except BaseException as error:
            if self._has_died(error):
                raise EngineDeadError(_DEAD) from error
            if request and not self.broken:  # Ctrl-C above all: leave no request behind
                self._abort(name, request, outcome)
            raise
        return outcome

    def _has_died(self, error: BaseException) -> bool:
        """Whether the engine cannot go on after an error; vLLM's own do not end a step halfway."""
        from vllm.v1.engine.exceptions import EngineDeadError as VLLMEngineDeadError

        self.broken = self.broken or isinstance(error, VLLMEngineDeadError)
        return self.broken and isinstance(error, Exception)

    def _abort(self, name: str, request: str, outcome: Outcome) -> None:
        """End a request early; a second Ctrl-C meanwhile gives the engine up."""
        self.broken = True
        self._core.abort_request([name])
        # vLLM's output side may have finished it already, and then tells the engine nothing
        self._core.engine_core.abort_requests([request])
        self._until_closed(name, request, outcome)
        self.broken = False

    def _until_closed(self, name: str, request: str, outcome: Outcome) -> None:
        deadline = time.monotonic() + _PATIENCE
        while request not in self._closed:
            outputs = self._step()
            for output in outputs:
                if output.request_id == name and output.finished:
                    outcome.output = output
            if outputs or self._core.has_unfinished_requests():
                deadline = time.monotonic() + _PATIENCE
            elif time.monotonic() > deadline:
                raise MidstreamError(f"The engine did not close the request '{request}'.")

    def _step(self) -> Any:
        """One step of the engine, which in this process must not be left halfway."""
        if not self._in_process:
            return self._core.step()
        with held():
            try:
                return self._core.step()
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
        self._closed.update(message["closed"])
        for record in unpack(message["records"]) if message["records"] else ():
            outcome = self._outcomes.get(record.request_id)
            if outcome is not None:
                outcome.record = record

    def close(self) -> None:
        """End the engine's processes and free what this one holds of it; twice is no error."""
        llm, self.llm = self.llm, None
        if llm is None:
            return
        self._core = None
        self._ending(llm.llm_engine.engine_core, 1.0 if self.broken else PATIENCE)
        del llm
        gc.collect()
        discard(self._owner)
