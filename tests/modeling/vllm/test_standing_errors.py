"""Errors in steps that the engine runs in the place of a block's loop."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from midstream.errors import InterventionError
from midstream.interleaving.locations import Location

SETTINGS = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}
A, B = "Rome is", "One two three"


def place(error: BaseException) -> str:
    """The line of the user's code that the error shows last."""
    return re.findall(r"line \d+, in [^\n]*\n +([^\n]*)", str(error))[-1]


@pytest.fixture
def core(llama: Any) -> Any:
    """The blocks of the engine's worker."""
    core = llama.vllm_entrypoint.llm_engine.engine_core.engine_core
    return core.model_executor.driver_worker.model_runner.blocks


def test_too_much_that_is_kept(llama: Any, core: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list that grows over the limit is an error at the line that reads, of its request alone."""
    limit = 3 * len(llama.tokenizer.encode(A)) * 128 * 4  # what the prompt takes for a moment
    monkeypatch.setattr(core, "limits", replace(core.limits, max_snapshot_bytes=limit))
    layer = llama.model.layers[1]
    with (
        pytest.raises(InterventionError, match=f"max_snapshot_bytes={limit}") as caught,
        llama.trace(**SETTINGS) as tracer,
    ):
        with tracer.invoke(A):
            rows = [].save()
            for _ in tracer.iter[:]:
                rows.append([layer.mlp.output, layer.output[0]])
        with tracer.invoke(B):
            few = [].save()
            for _ in tracer.iter[4:7]:
                few.append(layer.mlp.output)
    assert place(caught.value) == "rows.append([layer.mlp.output, layer.output[0]])"
    assert len(few) == 3


def test_a_place_that_a_step_does_not_get_to(llama: Any, core: Any) -> None:
    """A module that runs in some steps only is an error at the line that reads or edits it."""
    interleaver, module = core.interleaver, llama.model.layers[1].mlp
    hand_over, left = interleaver.hand_over, [5]

    def without(location: Location, value: Any, *args: Any, **kwargs: Any) -> Any:
        if location == Location("model.layers.1.mlp", "output"):
            left[0] -= 1
            if left[0] < 0:
                return value
        return hand_over(location, value, *args, **kwargs)

    vector = torch.ones(128)
    interleaver.hand_over = without
    try:
        with pytest.raises(InterventionError, match=r"mlp\.output.* did not run") as caught:
            with llama.trace(A, **SETTINGS) as tracer:
                for _ in tracer.iter[:]:
                    module.output[:] += vector
        assert place(caught.value) == "module.output[:] += vector"
        left[0] = 5
        with pytest.raises(InterventionError, match=r"mlp\.output.* did not run") as caught:
            with llama.trace(A, **SETTINGS) as tracer:
                rows = []
                for _ in tracer.iter[:]:
                    rows.append(module.output)
        assert place(caught.value) == "rows.append(module.output)"
    finally:
        del interleaver.hand_over


def test_a_loop_that_begins_late_beside_a_cache(llama: Any) -> None:
    """A block meets the mistakes of its loop itself, also if its cache recorded steps before."""
    layer = llama.model.layers[1]
    with pytest.raises(InterventionError, match="IndexError") as caught:
        with llama.trace(A, **SETTINGS) as tracer:
            cache = tracer.cache(modules=[layer.mlp])
            rows = []
            for _ in tracer.iter[3:]:
                rows.append(layer.output[5])
    assert place(caught.value) == "rows.append(layer.output[5])"
