"""vLLM's CPU worker with blocks beside its model."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.cpu.model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker

from midstream.modeling.vllm.engine import process
from midstream.modeling.vllm.engine.adapter import BlockRunner
from midstream.modeling.vllm.engine.cpu_sampling import replace_kernels
from midstream.modeling.vllm.engine.worker import BlockWorkerMixin, refuse_other_runner


class CPUBlockRunner(BlockRunner, CPUModelRunner):  # type: ignore[misc]
    """vLLM's model runner on a CPU, with blocks."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model, and take out the kernels that do not run here."""
        super().load_model(*args, **kwargs)
        replace_kernels(self)


class CPUBlockWorker(BlockWorkerMixin, CPUWorker):  # type: ignore[misc]
    """vLLM's CPU worker with blocks; a user's own `worker_cls` subclasses this."""

    def init_device(self) -> None:
        """Set up the device; the runner vLLM makes is replaced before it has loaded anything."""
        super().init_device()
        refuse_other_runner(self.model_runner, CPUModelRunner)
        self.model_runner = CPUBlockRunner(self.vllm_config, self.device)
        self.model_runner.client = process.client()
