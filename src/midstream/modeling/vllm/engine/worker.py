"""vLLM's GPU worker with blocks beside its model."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from midstream.errors import EngineBuildError
from midstream.modeling.vllm import results
from midstream.modeling.vllm.engine import process
from midstream.modeling.vllm.engine.adapter import BlockRunner
from midstream.modeling.vllm.engine.edits import InstalledEdit, problem_of
from midstream.modeling.vllm.payloads import pack


class BlockWorkerMixin:
    """Mixed in before one of vLLM's workers."""

    model_runner: Any
    rank: int

    def __init__(self, *args: Any, **kwargs: Any):
        process.report_build_failures()
        process.enter()
        super().__init__(*args, **kwargs)

    def shutdown(self) -> None:
        """Let go of the model with vLLM's runner, so that its memory is free at once."""
        held = vars(self.model_runner) if getattr(self, "model_runner", None) else {}
        if "blocks" in held and held["blocks"].mirrors is not None:
            held["blocks"].mirrors.close()
        for name in ("blocks", "graphs", "_graph", "_prepared", "_kernels", "_active", "_rows"):
            held.pop(name, None)
        super().shutdown()  # type: ignore[misc]

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        """Run a step's forward."""
        with self._ending_with_its_stage():
            return super().execute_model(*args, **kwargs)  # type: ignore[misc]

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """Draw the step's tokens."""
        with self._ending_with_its_stage():
            return super().sample_tokens(*args, **kwargs)  # type: ignore[misc]

    @contextmanager
    def _ending_with_its_stage(self) -> Iterator[None]:
        """End the process of an earlier pipeline stage that fails.

        VLLM looks at what the last stage answers only, which would wait for this one.
        """
        try:
            yield
        except Exception:
            if self.model_runner.blocks.reports:
                raise
            traceback.print_exc()
            raise SystemExit(1) from None

    def midstream_live(self) -> int:
        """How many blocks, and parts of blocks that have not come, this rank holds."""
        blocks = self.model_runner.blocks
        return len(blocks) + len(blocks.commons)

    def midstream_messages(self) -> int:
        """How many messages this rank has sent to other stages of its pipeline for blocks."""
        pipeline = self.model_runner.pipeline
        return pipeline.sent if pipeline is not None else 0

    def midstream_bring(self, parts: list[tuple[int, bytes, int]]) -> None:
        """Take in what requests to come have in common, see ``Commons.bring``."""
        self.model_runner.blocks.commons.bring(parts)

    def midstream_drop(self, numbers: list[int]) -> None:
        """Forget such parts."""
        self.model_runner.blocks.commons.drop(numbers)

    def midstream_finish(self, data: bytes) -> bytes:
        """End blocks that wait for their requests' results.

        Args:
            data: the results, see ``results.write``.

        Returns:
            The blocks' records, packed, from the first rank.
        """
        blocks = self.model_runner.blocks
        records = blocks.finish(results.read(data))
        if not self._reports:
            return b""
        return pack(records, owner=self.model_runner.client, mirrors=blocks.mirrors)

    @property
    def _reports(self) -> bool:
        """Whether records leave from this rank: the first one of the last pipeline stage."""
        return bool(self.model_runner.blocks.reports and get_tp_group().rank_in_group == 0)

    def midstream_edits(self) -> int:
        """How many edits this rank holds for later requests."""
        return len(self.model_runner.blocks.edits)

    def midstream_install_edit(self, edit_id: int, label: str, block: bytes) -> str:
        """Install an edit, see ``InstalledEdits``; returns what is wrong with it, if anything."""
        blocks = self.model_runner.blocks
        edit = InstalledEdit(edit_id, label, block)
        return problem_of(lambda: blocks.edits.install(edit, blocks.resolve))

    def midstream_clear_edits(self, edit_ids: list[int]) -> None:
        """Forget edits; requests that run keep theirs."""
        self.model_runner.blocks.edits.clear(edit_ids)

    def midstream_put(self, name: str, data: bytes) -> str:
        """Keep an object for blocks, see ``Store``; returns what is wrong with it, if anything."""
        runner = self.model_runner
        store, resolve = runner.blocks.stored, runner.blocks.resolve
        return problem_of(lambda: store.put(name, data, runner.device, resolve))

    def midstream_remove(self, name: str) -> None:
        """Forget an object; requests that run keep theirs."""
        self.model_runner.blocks.stored.remove(name)

    def midstream_stored(self) -> list[str]:
        """Names of the objects this rank keeps."""
        return list(self.model_runner.blocks.stored.objects)

    def midstream_stats(self) -> dict[str, Any]:
        """What this rank has counted and what it holds, as plain data."""
        runner = self.model_runner
        blocks, graphs = runner.blocks, runner.graphs
        return runner.statistics.report(  # type: ignore[no-any-return]
            seconds=blocks.clock.total,
            blocks=len(blocks),
            caches=blocks.live_caches,
            graphs=graphs.report() if graphs is not None else {},
        )


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

    def determine_available_memory(self) -> int:
        """Bytes for the KV cache: what vLLM finds, without what is set aside for graphs."""
        available: int = super().determine_available_memory()
        if self.cache_config.kv_cache_memory_bytes:  # the user's number
            return available
        return available - int(self.model_runner.graph_bytes)

    def _make_model_runner(self) -> Any:
        if not self.use_v2_model_runner:
            raise EngineBuildError("vLLM picked its older model runner for these settings.")
        runner = GPUBlockRunner(self.vllm_config, self.device)
        runner.client = process.client()
        return runner
