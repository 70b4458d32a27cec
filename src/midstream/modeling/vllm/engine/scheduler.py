"""The one file that touches vLLM's scheduler: records go home, failed blocks end their requests."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import RequestStatus

from midstream.modeling.vllm.engine import process
from midstream.modeling.vllm.wire import KEY, RECORDS

process.report_build_failures()
process.enter()  # a started process imports this as it reads vLLM's configuration


class BlockSchedulerMixin:
    """Mixed in before one of vLLM's schedulers."""

    def __init__(self, *args: Any, **kwargs: Any):
        process.enter()
        super().__init__(*args, **kwargs)
        self._traced: set[str] = set()

    def add_request(self, request: Any) -> None:
        """Queue a request, remembering those with a block."""
        super().add_request(request)  # type: ignore[misc]
        params = request.sampling_params
        if params is not None and KEY in (params.extra_args or {}):
            self._traced.add(request.request_id)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Update the requests, end those whose block failed, and send records on."""
        outputs = super().update_from_output(  # type: ignore[misc]
            scheduler_output, model_runner_output
        )
        records, failed = getattr(model_runner_output, KEY, (b"", []))
        closed = sorted(self._traced.intersection(scheduler_output.finished_req_ids))
        self._traced.difference_update(closed)
        if failed:
            self._end(failed, outputs)
        if records or closed:
            _send(
                outputs,
                0,
                EngineCoreOutput(
                    RECORDS,
                    [],
                    kv_transfer_params={
                        "records": records,
                        "closed": closed,
                    },
                ),
            )
        return outputs

    def _end(self, request_ids: list[str], outputs: dict[int, EngineCoreOutputs]) -> None:
        for request in self.finish_requests(  # type: ignore[attr-defined]
            request_ids, RequestStatus.FINISHED_ERROR
        ):
            _send(
                outputs,
                request.client_index,
                EngineCoreOutput(
                    request.request_id, [], finish_reason=request.get_finished_reason()
                ),
            )


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
