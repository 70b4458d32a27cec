"""Blocks on a pipeline of two GPUs, with vLLM's default compile and CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.modeling.vllm.parallel.blocks import carrying
from tests.support.checkpoints import A, B, C, checkpoint
from tests.support.compare import assert_close, relative_error
from tests.support.device import TOLERANCE
from tests.support.oracle import Oracle, edit_layer, zero_mlp

pytestmark = pytest.mark.gpu

GREEDY = {"temperature": 0.0, "max_tokens": 1}


@pytest.fixture(scope="module", params=[False, True], ids=["graphs", "eager"])
def pipe(request: pytest.FixtureRequest) -> Iterator[Any]:
    """T-LLAMA in fp32 on two GPUs."""
    from midstream import VLLM

    with VLLM(
        str(checkpoint("T-LLAMA", with_tokenizer=True)),
        pipeline_parallel_size=2,
        enforce_eager=request.param,
        dispatch=True,
        dtype="float32",
        max_model_len=512,
        gpu_memory_utilization=0.1,
    ) as model:
        yield model


@pytest.fixture(scope="module")
def hf() -> Oracle:
    """HuggingFace on the same checkpoint."""
    return Oracle(checkpoint("T-LLAMA", with_tokenizer=True))


def test_reads(pipe: Any, hf: Oracle) -> None:
    """The stream of every layer and the logits are HuggingFace's."""
    with pipe.trace(C, **GREEDY):
        pairs = [layer.output for layer in pipe.model.layers].save()
        logits = pipe.logits.save()
    right = hf.reads(C, layers=range(4))
    for i, (hidden, residual) in enumerate(pairs):
        assert_close(hidden + residual, right[f"residual.{i}"], hidden, TOLERANCE)
    assert_close(logits, right["logits"], right["logits"].roll(1, -1))


def test_writes(pipe: Any, hf: Oracle) -> None:
    """Writes on both stages, one of them of the other's value, have HuggingFace's effect."""
    with pipe.trace(A, **GREEDY):
        early = sum(pipe.model.layers[0].output)
        pipe.model.layers[1].mlp.output[:] = 0
        pipe.model.layers[3].output[0][:] += 2 * early
        logits = pipe.logits.save()
    early = hf.reads(A)["residual.0"]
    late = edit_layer(3, lambda rows: rows + 2 * early)
    assert_close(logits, hf.run(A, [zero_mlp(1), late]).logits, hf.run(A, [late]).logits)


def test_concurrent_requests_equal_their_solo_runs(pipe: Any) -> None:
    """Requests that carry values from the last stage to the first in each step do not mix."""
    settings: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
    alone = {
        i: pipe.trace(prompt, block=carrying(3.0), max_tokens=4 + 3 * i, **settings)
        for i, prompt in enumerate((A, B, C))
    }
    with pipe.trace(**settings) as tracer:
        for i, prompt in enumerate((A, B, C)):
            with tracer.invoke(prompt, max_tokens=4 + 3 * i):
                carried, logits = None, [].save()
                for _ in tracer.iter[:]:
                    if carried is not None:
                        pipe.model.layers[0].output[0][:] += 3.0 * carried
                    carried = pipe.model.layers[3].mlp.output[-1:].clone()
                    logits.append(pipe.logits)
    for i, solo in alone.items():
        assert len(logits[i]) == 4 + 3 * i
        for got, right in zip(logits[i], solo.saves["logits"], strict=True):
            assert relative_error(got, right) < 10 * TOLERANCE
    assert not torch.equal(alone[0].saves["logits"][0], alone[1].saves["logits"][0])
