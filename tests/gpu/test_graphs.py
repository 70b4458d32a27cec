"""Decode steps as CUDA graphs with breaks, on a GPU in bf16."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.gpu

COUNT = 31
GREEDY = {"temperature": 0.0, "max_tokens": COUNT, "ignore_eos": True}
PROMPT = [504, 3575, 282, 4649, 314, 7042, 30, 378, 3575, 282]
LAYERS = (4, 15, 29)


def engine(**settings: Any) -> Any:
    """An engine of vLLM's defaults on the demo model."""
    from midstream import VLLM
    from midstream.demo import demo_model

    return VLLM(
        str(demo_model()),
        dispatch=True,
        dtype="bfloat16",
        max_model_len=512,
        gpu_memory_utilization=0.1,
        **settings,
    )


@pytest.fixture(scope="module")
def tapped() -> Iterator[Any]:
    """Graphs with breaks, as by default."""
    with engine() as model:
        yield model


@pytest.fixture(scope="module")
def eager() -> Iterator[Any]:
    """None: every step with a block inside the forward is eager."""
    with engine(max_graphs=0) as model:
        yield model


def prompt(index: int, length: int) -> list[int]:
    """A prompt of its own for each index."""
    return [(7919 * (index + 1) + 31 * i) % 40000 + 300 for i in range(length)]


def streams(model: Any, ids: list[int], **settings: Any) -> tuple[list[int], torch.Tensor]:
    """A request's tokens, and its residual stream at some layers, [steps, layers, width]."""
    with model.trace(ids, **{**GREEDY, **settings}) as tracer:
        rows = [].save()
        for _ in tracer.iter[1:]:
            rows.append([sum(model.model.layers[i].output)[-1] for i in LAYERS])
    return list(tracer.result.outputs[0].token_ids), stacked(rows)


def stacked(rows: list[list[torch.Tensor]]) -> torch.Tensor:
    """All rows as one tensor in fp32 on the CPU."""
    return torch.stack([torch.stack([part.float().cpu() for part in row]) for row in rows])


def whole(model: Any, ids: list[int], first: int) -> torch.Tensor:
    """The same from one prompt that is run at once."""
    with model.trace(ids, temperature=0.0, max_tokens=1):
        found = [sum(model.model.layers[i].output) for i in LAYERS]
        rows = torch.stack(found, dim=1)[first:].save()
    return rows.float().cpu()


def cosines(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Cosine of each row."""
    return torch.nn.functional.cosine_similarity(a, b, dim=-1)


def test_values_that_are_kept_over_many_steps(tapped: Any) -> None:
    """Rows of 30 steps are the 30 rows of the whole text, each time of 20; another's are not."""
    before = tapped.stats()
    right = None
    for _ in range(20):
        tokens, rows = streams(tapped, PROMPT)
        if right is None:
            right = whole(tapped, PROMPT + tokens[:-1], len(PROMPT))
            assert cosines(right[1:], right[:-1]).median() < 0.99
        assert rows.shape == right.shape
        assert cosines(rows, right).min() > 0.995
        assert cosines(rows, right).median() > 0.999
    after = tapped.stats()
    assert after.steps["tapped"] - before.steps["tapped"] >= 20 * (COUNT - 1) - 2
    assert after.graphs["wrong_guesses"] == before.graphs["wrong_guesses"]


def forced(model: Any, tokens: list[int], how: str) -> torch.Tensor:
    """The streams while the tokens are given, with something written on the way."""
    with model.trace(PROMPT, **GREEDY) as tracer:
        rows = [].save()
        for step in tracer.iter[:]:
            if step:
                layers = model.model.layers
                if how == "steer":
                    layers[2].output[0][:] += 4.0
                elif how == "replace":
                    layers[2].mlp.output = layers[2].mlp.output * 3
                elif how == "input":
                    layers[3].input_layernorm.input = layers[3].input_layernorm.input * 2
                elif how == "busy":
                    scale = float(layers[2].output[0].norm().item())
                    torch.cuda.synchronize()
                    layers[2].output[0][:] += torch.ones(1 << 20, device="cuda")[:576] / (1 + scale)
                elif how == "turning":
                    layers[2].output
                    layers[3 + step % 3].output[0][:] *= 1.1
                rows.append([sum(layers[i].output)[-1] for i in LAYERS[1:]])
            model.samples[:] = tokens[step]
    return torch.stack([torch.stack([part.float().cpu() for part in row]) for row in rows])


@pytest.mark.parametrize("how", ["none", "steer", "replace", "input", "busy", "turning"])
def test_writes_are_those_of_eager_steps(tapped: Any, eager: Any, how: str) -> None:
    """Writes in replays have the effect they have in eager steps; a clean request follows."""
    tokens, clean = streams(tapped, PROMPT)
    before = tapped.stats().graphs
    for _ in range(2):
        mine, its = forced(tapped, tokens, how), forced(eager, tokens, how)
        assert cosines(mine, its).min() > 0.99
        assert cosines(mine, its).median() > 0.999
    after = tapped.stats().graphs
    assert after["replays"] > before["replays"]
    assert (after["wrong_guesses"] > before["wrong_guesses"]) == (how == "turning")
    if how in ("steer", "replace"):
        assert cosines(mine, clean[:, 1:]).median() < 0.99
    again, rows = streams(tapped, PROMPT)
    assert again == tokens
    assert cosines(rows, clean).min() > 0.999


@pytest.mark.parametrize("count", [1, 3, 8, 64, 300])
def test_batches(tapped: Any, count: int) -> None:
    """Requests of different lengths, some of them plain, each have their own rows."""
    ids = [prompt(i, 5 + i % 23) for i in range(count)]
    with tapped.trace() as tracer:
        for i in range(count):
            with tracer.invoke(ids[i], temperature=0.0, max_tokens=6 + i % 7, ignore_eos=True):
                rows = [].save()
                for _ in tracer.iter[1:]:
                    rows.append([sum(tapped.model.layers[k].output)[-1] for k in LAYERS])
    results = tracer.result if count > 1 else [tracer.result]
    for i in sorted({0, count // 3, count // 2, count - 1}):
        tokens = list(results[i].outputs[0].token_ids)
        saved = rows[i] if count > 1 else rows
        right = whole(tapped, ids[i] + tokens[:-1], len(ids[i]))
        assert cosines(stacked(saved), right).median() > 0.999
        assert cosines(stacked(saved), right).min() > 0.99


def _resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_memory_does_not_grow(tapped: Any) -> None:
    """After 2,000 traces neither the GPU nor the engine's process holds more than after 200."""
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    held = []
    for _turn in range(10):
        for _ in range(200):
            with tapped.trace(PROMPT, temperature=0.0, max_tokens=3, ignore_eos=True) as tracer:
                for _ in tracer.iter[:]:
                    row = tapped.model.layers[15].output[0][-1].save()
        held.append((torch.cuda.mem_get_info()[0], sum(_resident(int(pid)) for pid in children)))
        assert row.shape == (576,)
    print([(free >> 20, resident >> 20) for free, resident in held])
    assert held[0][0] - held[-1][0] < 64 << 20
    assert held[-1][1] - held[1][1] < 64 << 20
    assert tapped.stats().live_blocks == 0
