"""Two ranks on two GPUs: whole reads and writes over NCCL, with vLLM's compile and graphs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from midstream import VLLM
from midstream.errors import InterventionError
from tests.gpu.test_reads import compared, cosine, folder, read_all, tensors
from tests.support.checkpoints import A, C
from tests.support.oracle import Oracle, edit_module

pytestmark = pytest.mark.gpu

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 1}
LAYER = "model.layers.1"


@pytest.fixture(scope="module", params=["compiled", "eager"])
def two(request: pytest.FixtureRequest) -> Iterator[tuple[Any, Oracle]]:
    """T-LLAMA in bf16 on two GPUs, and HuggingFace in fp32."""
    settings = {"dtype": "bfloat16", "max_model_len": 512, "gpu_memory_utilization": 0.1}
    path = folder("T-LLAMA")
    eager = request.param == "eager"
    with VLLM(
        str(path), dispatch=True, tensor_parallel_size=2, enforce_eager=eager, **settings
    ) as model:
        yield model, Oracle(path)


def test_every_location(two: tuple[Any, Oracle]) -> None:
    """Each tensor of each location is whole and points where HuggingFace's does."""
    model, oracle = two
    right = compared(oracle)
    got = read_all(model, list(right))
    for path, value in right.items():
        for mine, theirs in zip(tensors(got[path]), tensors(value), strict=True):
            assert mine.shape == theirs.shape, path
            assert cosine(mine, theirs) > 0.999, path
            assert cosine(mine.roll(mine.shape[-1] // 4, -1), theirs) < 0.99, path


def test_a_head_and_neurons(two: tuple[Any, Oracle]) -> None:
    """One head's columns and some neurons, cut, have HuggingFace's effect on the logits."""
    model, oracle = two
    with model.trace(A, **GREEDY):
        model.get(LAYER).self_attn.o_proj.input[:, 64:128] = 0
        model.get(LAYER).mlp.act_fn.output[:, 100:200] = 0
        logits = model.logits.save()
    changes = [
        edit_module(
            f"{LAYER}.{name}",
            lambda rows, columns=columns: rows.index_fill(1, columns, 0.0),
            "input",
        )
        for name, columns in (
            ("self_attn.o_proj", torch.arange(64, 128)),
            ("mlp.down_proj", torch.arange(100, 200)),
        )
    ]
    right, clean = oracle.run(A, changes).logits, oracle.run(A).logits
    assert cosine(logits.float().cpu(), right) > 0.999
    assert cosine(clean, right) < 0.99


def test_generation_beside_graphs(two: tuple[Any, Oracle]) -> None:
    """Twenty repeats of a steered generation give the same tokens, and plain steps between them."""
    model, _ = two

    def block(model: Any, tracer: Any) -> dict[str, Any]:
        rows = []
        for _ in tracer.iter[:8]:
            model.get(LAYER).mlp.act_fn.output[:, ::2] *= 1.5
            rows.append(model.get(LAYER).self_attn.qkv_proj.output[0][-1])
        return {"rows": torch.stack(rows)}

    settings = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}
    traces = [model.trace(C, block=block, **settings) for _ in range(20)]
    first = traces[0]
    for other in traces[1:]:
        assert other.result.outputs[0].token_ids == first.result.outputs[0].token_ids
        assert torch.equal(other.saves["rows"], first.saves["rows"])


def test_whole_parameters(two: tuple[Any, Oracle]) -> None:
    """Fused and divided parameters are HuggingFace's, in its order."""
    model, oracle = two
    with model.trace(A, **GREEDY):
        fused = model.get(LAYER).self_attn.qkv_proj.param("weight").clone().save()
        down = model.get(LAYER).mlp.down_proj.param("weight").clone().save()
        head = model.lm_head.param("weight").clone().save()
    layer = oracle.model.get_submodule(LAYER)
    parts = (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj)
    right = torch.cat([part.weight for part in parts])
    assert torch.equal(fused.cpu(), right.bfloat16())
    assert torch.equal(down.cpu(), layer.mlp.down_proj.weight.bfloat16())
    assert torch.equal(head.cpu(), oracle.model.lm_head.weight.bfloat16())


@pytest.mark.parametrize("rank", [0, 1])
def test_memory_that_runs_out_on_one_rank(two: tuple[Any, Oracle], rank: int) -> None:
    """The request fails on both ranks with that error, and the next trace works."""
    model, _ = two
    with pytest.raises(InterventionError, match="OutOfMemoryError"):
        with model.trace(C, temperature=0.0, max_tokens=4):
            rows = model.get(LAYER).mlp.act_fn.output
            if torch.distributed.get_rank() == rank:
                torch.empty(1 << 44, dtype=torch.uint8, device=rows.device)
            model.get("model.layers.2").mlp.act_fn.output
    with model.trace(C, **GREEDY):
        shape = model.get(LAYER).mlp.act_fn.output.shape.save()
    assert tuple(shape) == (len(C), 256)
