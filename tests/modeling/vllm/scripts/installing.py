"""Edits and stored objects in an engine that has a process of its own."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import torch

from midstream import VLLM
from midstream.errors import EngineDeadError, TransportError
from tests.modeling.vllm.scripts.reporting import TINY, reported
from tests.support.checkpoints import A, B, checkpoint

GREEDY = {"temperature": 0.0, "ignore_eos": True}


class Scale(torch.nn.Module):
    """A module of the program's own, which the engine's process cannot import."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.tensor(factor))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows * self.factor


class Unbuildable:
    """What can be sent but not rebuilt."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


def main() -> None:
    with VLLM(str(checkpoint("T-LLAMA", with_tokenizer=True)), **TINY) as model:
        for scene in SCENES:
            scene(model)


def counts(model: Any) -> list[Any]:
    calls = ("midstream_live", "midstream_edits", "midstream_stored")
    return [model.vllm_entrypoint.collective_rpc(call)[0] for call in calls]


def tokens(outputs: list[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def halve(model: Any) -> Any:
    """An edit with a stored module: it halves the stream after layer 1 in every step."""
    scale = model.put("scale", Scale(0.5))
    with model.edit(name="halve") as (tracer, edit):
        norms = [].save()
        for _ in tracer.all():
            hidden, residual = model.model.layers[1].output
            hidden[:], residual[:] = scale(hidden), scale(residual)
            norms.append(float(hidden.norm()))
    return edit


def installed(model: Any) -> None:
    with reported("installed") as facts:
        halve(model)
        outputs = model.generate([A, B], max_tokens=6, **GREEDY)
        facts["tokens"] = tokens(outputs)
        facts["norms"] = [len(output.saves["norms"]) for output in outputs]
        facts["counts"] = counts(model)


def refused(model: Any) -> None:
    with reported("refused") as facts:
        value = Unbuildable()
        try:
            with model.edit():
                value
        except TransportError as error:
            facts["text"] = str(error)
        facts["counts"] = counts(model)


def cleared_in_between(model: Any) -> None:
    """Another thread's request runs on with an edit that is cleared meanwhile."""
    with reported("cleared") as facts:
        found: list[list[int]] = []
        thread = threading.Thread(
            target=lambda: found.extend(tokens(model.generate(A, max_tokens=200, **GREEDY)))
        )
        thread.start()
        while not model._engine.running:
            time.sleep(0.01)
        time.sleep(1.0)
        start = time.monotonic()
        model.clear_edits()
        facts["waited"] = time.monotonic() - start
        facts["still_running"] = thread.is_alive()
        thread.join()
        facts["tokens"] = found[0]
        facts["counts"] = counts(model)
        facts["clean"] = tokens(model.generate(A, max_tokens=6, **GREEDY))[0]


def engine_ended(model: Any) -> None:
    """What was installed is gone with the engine."""
    with reported("ended") as facts:
        edit = halve(model)
        with model.edit(name="exit"):
            os._exit(3)
        try:
            model.generate(A, max_tokens=2, **GREEDY)
        except EngineDeadError as error:
            facts["text"] = str(error)
        facts["left"] = [len(model.edits), len(model.stored), edit.cleared]
        facts["clean"] = tokens(model.generate(A, max_tokens=6, **GREEDY))[0]
        facts["counts"] = counts(model)


class Exiting(torch.nn.Module):
    """Ends every process but the client that it is brought to."""

    client = os.getpid()

    def __setstate__(self, state: Any) -> None:
        """Rebuild it, or do not."""
        if os.getpid() != self.client:
            os._exit(3)
        super().__setstate__(state)


def engine_ended_in_a_call(model: Any) -> None:
    """The engine dies while it takes in an object, and has no answer."""
    with reported("ended_in_a_call") as facts:
        try:
            model.put("exiting", Exiting())
        except EngineDeadError as error:
            facts["text"] = str(error)
        facts["left"] = [len(model.stored), model.dispatched]


SCENES = (installed, refused, cleared_in_between, engine_ended, engine_ended_in_a_call)

if __name__ == "__main__":
    main()
