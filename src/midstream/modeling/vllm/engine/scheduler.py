"""The one file that touches vLLM's scheduler: records go home, failed blocks end their requests."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.request_queue import FCFSRequestQueue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import RequestStatus

from midstream.modeling.vllm.engine import process
from midstream.modeling.vllm.wire import (
    FAILED,
    KEY,
    RECORDS,
    STOP_REASON,
    STOPPED_BEFORE_TOKEN,
)

_AHEAD = 1 << 40  # of priorities, which are small numbers, the lowest first

process.report_build_failures()
process.enter()  # a started process imports this as it reads vLLM's configuration


class BlockSchedulerMixin:
    """Mixed in before one of vLLM's schedulers."""

    def __init__(self, *args: Any, **kwargs: Any):
        process.enter()
        super().__init__(*args, **kwargs)
        self._traced: set[str] = set()

    def add_request(self, request: Any) -> None:
        """Queue a request, remembering those with a block.

        Where requests have priorities, one with a block goes before all without: behind another it
        could be given the rest of that one's step, and be split.
        """
        params = request.sampling_params
        if params is not None and KEY in (params.extra_args or {}):
            self._traced.add(request.request_id)
            request.priority -= _AHEAD
        super().add_request(request)  # type: ignore[misc]

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Plan a step. A prompt with a block is planned whole: the block has to see all of it.

        It goes to the head of the queue, and while one is there the step splits no prompt that has
        not begun. A plain prompt behind it waits for a step at most as long as it does.
        """
        if not self._has_whole_prompt_first():
            return super().schedule(*args, **kwargs)  # type: ignore[misc]
        config = self.scheduler_config  # type: ignore[attr-defined]
        before = config.enable_chunked_prefill, config.long_prefill_token_threshold
        config.enable_chunked_prefill, config.long_prefill_token_threshold = False, 0
        try:
            return super().schedule(*args, **kwargs)  # type: ignore[misc]
        finally:
            config.enable_chunked_prefill, config.long_prefill_token_threshold = before

    def _has_whole_prompt_first(self) -> bool:
        """Move new requests with a block to the head of the queue; whether one is there now."""
        if not self._traced:
            return False
        waiting = self.waiting  # type: ignore[attr-defined]
        found = [request for request in waiting if self._must_be_whole(request)]
        if found and isinstance(waiting, FCFSRequestQueue):
            waiting.remove_requests(found)
            waiting.prepend_requests(reversed(found))
        return bool(found) and self._must_be_whole(waiting.peek_request())

    def _must_be_whole(self, request: Any) -> bool:
        """Whether a block is to see the request's prompt; one that comes back has seen it."""
        return request.request_id in self._traced and request.num_output_tokens == 0

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Update the requests, end those whose block did, and send records on."""
        records, ended, waiting = getattr(model_runner_output, KEY, (b"", [], []))
        dropped = [request for request, how in ended if how == STOPPED_BEFORE_TOKEN]
        scores = {request: _drop_token(model_runner_output, request) for request in dropped}
        outputs = super().update_from_output(  # type: ignore[misc]
            scheduler_output, model_runner_output
        )
        for request, how in ended:
            self._end(request, how, scores.get(request), outputs)
        closed = sorted(self._traced.intersection(scheduler_output.finished_req_ids))
        self._traced.difference_update(closed)
        if records or closed:
            message = {"records": records, "closed": closed, "waiting": waiting}
            _send(outputs, 0, EngineCoreOutput(RECORDS, [], kv_transfer_params=message))
        return outputs

    def _end(
        self, request_id: str, how: str, scores: Any, outputs: dict[int, EngineCoreOutputs]
    ) -> None:
        """Finish a request, unless it is finished already."""
        status = RequestStatus.FINISHED_ERROR if how == FAILED else RequestStatus.FINISHED_STOPPED
        for request in self.finish_requests([request_id], status):  # type: ignore[attr-defined]
            output = EngineCoreOutput(
                request_id,
                [],
                new_prompt_logprobs_tensors=scores,
                finish_reason=request.get_finished_reason(),
                stop_reason=None if how == FAILED else STOP_REASON,
            )
            _send(outputs, request.client_index, output)


def _drop_token(output: Any, request_id: str) -> Any:
    """Take back the token a step drew for a request.

    Returns:
        The scores of its prompt, if it asked for them: without a token vLLM sends no output that
        could carry them.
    """
    index = output.req_id_to_index.get(request_id)
    if index is not None and output.sampled_token_ids:
        output.sampled_token_ids[index] = []
    return output.prompt_logprobs_dict.pop(request_id, None)


def _send(outputs: dict[int, EngineCoreOutputs], client: int, output: EngineCoreOutput) -> None:
    if client not in outputs:
        outputs[client] = EngineCoreOutputs()
    outputs[client].outputs = [*outputs[client].outputs, output]


class BlockScheduler(BlockSchedulerMixin, Scheduler):  # type: ignore[misc]
    """vLLM's scheduler, with blocks."""


class AsyncBlockScheduler(BlockSchedulerMixin, AsyncScheduler):  # type: ignore[misc]
    """vLLM's asynchronous scheduler, with blocks."""


class PickScheduler:
    """Makes the scheduler that fits the engine's configuration."""

    def __new__(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        """Choose by `async_scheduling`, which vLLM settles late."""
        asynchronous = vllm_config.scheduler_config.async_scheduling
        kind = AsyncBlockScheduler if asynchronous else BlockScheduler
        return kind(vllm_config, *args, **kwargs)
