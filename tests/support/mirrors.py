"""Engines in this process that send home at once whatever blocks read, however little it is."""

from __future__ import annotations

from typing import Any

from midstream.interleaving.copies import Copies
from midstream.interleaving.locations import Location
from midstream.modeling.vllm.engine.mirroring import Mirroring
from midstream.modeling.vllm.payloads import Mirrors


class Everything(Mirroring):
    """Does not wait until it has been seen what blocks save."""

    def made(self, location: Location, leaf: int, copies: Copies) -> None:
        """Send every copy home."""
        runs = [run for run in self._runs() if self.mirrors.is_trusted(run)]
        if runs:
            self.mirrors.add(copies.hull, frozenset(runs))


def mirror_everything(model: Any, least: int = 1, **bounds: int) -> Mirrors:
    """Have an engine in this process send everything home.

    Args:
        least, bounds: see ``Mirrors``.
    """
    core = model.vllm_entrypoint.llm_engine.engine_core.engine_core
    blocks = core.model_executor.driver_worker.model_runner.blocks
    mirrors = Mirrors(model._engine._owner, least=least, **bounds)
    interleaver = blocks.interleaver
    blocks.mirroring = interleaver.mirroring = Everything(lambda: interleaver.runs, mirrors)
    return mirrors
