"""vLLM's CPU worker with blocks beside its model."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.cpu.model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker

from midstream.modeling.vllm.engine import process
from midstream.modeling.vllm.engine.adapter import BlockRunner
from midstream.modeling.vllm.engine.cpu_linears import check_arguments
from midstream.modeling.vllm.engine.cpu_sampling import replace_kernels
from midstream.modeling.vllm.engine.worker import BlockWorkerMixin, refuse_other_runner


class CPUBlockRunner(BlockRunner, CPUModelRunner):  # type: ignore[misc]
    """vLLM's model runner on a CPU, with blocks."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model, and take out the kernels that do not run here, or not safely."""
        super().load_model(*args, **kwargs)
        replace_kernels(self)
        check_arguments(self.model)

    def finish_requests(self, scheduler_output: Any) -> None:
        """Drop requests; what those with blocks have left in the cache is wiped.

        The CPU's attention multiplies the unused rest of a cache block by a weight of zero, which
        leaves a NaN there a NaN: one block's would reach the next request that gets the memory.
        """
        gone = scheduler_output.finished_req_ids.union(scheduler_output.preempted_req_ids or ())
        for request_id in gone:
            index = self.req_states.req_id_to_index.get(request_id)
            if index is not None and request_id in self.blocks:
                self._wipe(index)
        super().finish_requests(scheduler_output)

    def _wipe(self, request: int) -> None:
        tables = self.block_tables
        groups = self.kv_cache_config.kv_cache_groups
        for group, table, count in zip(
            groups, tables.block_tables, tables.num_blocks.np[:, request], strict=True
        ):
            ids = table.gpu[request, : int(count)].long()
            for name in group.layer_names:
                cache = self.compilation_config.static_forward_context[name].kv_cache
                for part in cache if isinstance(cache, tuple) else (cache,):  # states are several
                    part[ids] = 0


class CPUBlockWorker(BlockWorkerMixin, CPUWorker):  # type: ignore[misc]
    """vLLM's CPU worker with blocks; a user's own `worker_cls` subclasses this."""

    def init_device(self) -> None:
        """Set up the device; the runner vLLM makes is replaced before it has loaded anything."""
        super().init_device()
        refuse_other_runner(self.model_runner, CPUModelRunner)
        self.model_runner = CPUBlockRunner(self.vllm_config, self.device)
        self.model_runner.client = process.client()
