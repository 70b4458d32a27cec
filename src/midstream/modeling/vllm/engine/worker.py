"""vLLM's GPU worker with blocks beside its model."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from midstream.errors import EngineBuildError
from midstream.modeling.vllm.engine import process
from midstream.modeling.vllm.engine.adapter import BlockRunner


class BlockWorkerMixin:
    """Mixed in before one of vLLM's workers."""

    model_runner: Any

    def __init__(self, *args: Any, **kwargs: Any):
        process.report_build_failures()
        process.enter()
        super().__init__(*args, **kwargs)

    def shutdown(self) -> None:
        """Let go of the model with vLLM's runner, so that its memory is free at once."""
        held = vars(self.model_runner) if getattr(self, "model_runner", None) else {}
        for name in ("blocks", "_kernels", "_active", "_rows"):
            held.pop(name, None)
        super().shutdown()  # type: ignore[misc]

    def midstream_live(self) -> int:
        """How many blocks, and parts of blocks that have not come, this rank holds."""
        blocks = self.model_runner.blocks
        return len(blocks) + len(blocks.commons)

    def midstream_bring(self, parts: list[tuple[int, bytes, int]]) -> None:
        """Take in what requests to come have in common, see ``Commons.bring``."""
        self.model_runner.blocks.commons.bring(parts)

    def midstream_drop(self, numbers: list[int]) -> None:
        """Forget such parts."""
        self.model_runner.blocks.commons.drop(numbers)


def refuse_other_runner(runner: object, expected: type) -> None:
    """Refuse a runner midstream does not work with.

    Raises:
        EngineBuildError: naming its class.
    """
    if type(runner) is not expected:
        raise EngineBuildError(
            f"vLLM made a {type(runner).__module__}.{type(runner).__name__} to run the model; "
            f"midstream works with {expected.__module__}.{expected.__name__} only. Leave out what "
            "selects another runner."
        )


class GPUBlockRunner(BlockRunner, GPUModelRunner):  # type: ignore[misc]
    """vLLM's model runner with blocks."""


class BlockWorker(BlockWorkerMixin, Worker):  # type: ignore[misc]
    """vLLM's GPU worker with blocks; a user's own `worker_cls` subclasses this."""

    def _make_model_runner(self) -> Any:
        if not self.use_v2_model_runner:
            raise EngineBuildError("vLLM picked its older model runner for these settings.")
        runner = GPUBlockRunner(self.vllm_config, self.device)
        runner.client = process.client()
        return runner
