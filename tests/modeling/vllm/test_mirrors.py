"""What blocks save is sent home while later steps run, and is the same as if it were not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from midstream.errors import InterventionError
from midstream.modeling.vllm.engine.mirroring import writes_are_seen
from midstream.modeling.vllm.limits import Limits
from midstream.modeling.vllm.payloads import Mirrors, segments
from tests.modeling.vllm.conftest import runner_of
from tests.support.checkpoints import A, B

GREEDY = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True}


class Counting(Mirrors):
    """Writes every step's copies, however few, and counts what is sent."""

    def __init__(self, owner: str, **settings: Any):
        super().__init__(owner, least=1, **settings)
        self.taken = 0
        self.over: dict[str, int] = {}

    def add(self, *args: Any, **kwargs: Any) -> Any:
        """Count a copy."""
        spot = super().add(*args, **kwargs)
        self.taken += spot is not None
        return spot

    def release(self, owners: Any) -> dict[str, int]:
        """Note the segments that are over."""
        found = super().release(owners)
        self.over.update(found)
        return found


@pytest.fixture
def mirrors(llama: Any) -> Iterator[Counting]:
    """The engine's mirrors, for steps of any size."""
    blocks = runner_of(llama).blocks
    before = blocks.mirroring
    counting = Counting(llama._engine._owner)
    blocks.mirror_to(counting)
    yield counting
    counting.close()
    blocks.mirroring = blocks.interleaver.mirroring = before
    assert segments.remaining(llama._engine._owner) == []


def read_all(model: Any, prompts: Any) -> list[Any]:
    """Each request's rows of all layers in all steps, and a sum that is computed."""
    with model.trace(**GREEDY) as tracer:
        kept = [].save()
        for prompt in prompts:
            with tracer.invoke(prompt):
                rows = [].save()
                total = 0
                for _ in tracer.iter[:]:
                    for layer in model.model.layers:
                        rows.append(layer.output[0])
                        total = total + layer.output[1].sum()
                total.save()
                kept.append((rows, total))
    return kept


def test_rows_leave_from_the_second_trace_on(llama: Any, mirrors: Counting) -> None:
    """It is learned from the first what blocks of the code save; the values are the same."""
    first = read_all(llama, [A, B])
    assert mirrors.taken == 0
    second = read_all(llama, [A, B])
    # each layer's first tensor, in each step; what is only summed up stays in the engine
    assert mirrors.taken == GREEDY["max_tokens"] * len(llama.model.layers)
    assert len(mirrors.over) == GREEDY["max_tokens"]
    for (rows, total), (again, same) in zip(first, second, strict=True):
        assert len(rows) == len(again)
        assert all(map(torch.equal, rows, again))
        assert torch.equal(total, same)


def test_requests_of_different_lengths(llama: Any, mirrors: Counting) -> None:
    """A segment stays until the last request with rows in it has gone home."""
    for _ in range(2):
        with llama.trace(temperature=0.0, ignore_eos=True) as tracer:
            kept = [].save()
            for prompt, tokens in ((A, 2), (B, 7), (A, 4)):
                with tracer.invoke(prompt, max_tokens=tokens):
                    rows = [].save()
                    for _ in tracer.iter[:]:
                        rows.append(llama.model.layers[1].output[0])
                    kept.append(rows)
    assert [len(rows) for rows in kept] == [2, 7, 4]
    assert mirrors.taken
    assert torch.equal(kept[0][0], kept[2][0])
    for one, two in zip(kept[0], kept[2], strict=False):
        assert torch.allclose(one, two, atol=1e-5)


def test_a_block_that_only_computes_sends_nothing(llama: Any, mirrors: Counting) -> None:
    """What it read is let go of in the engine."""
    for _ in range(2):
        with llama.trace(A, **GREEDY) as tracer:
            sums = [].save()
            for _ in tracer.iter[:]:
                sums.append(llama.model.layers[0].output[0].sum())
    assert len(sums) == GREEDY["max_tokens"]
    assert mirrors.taken == 0


def test_what_a_block_changes_comes_home_changed(llama: Any, mirrors: Counting) -> None:
    """In the step and in a later one, and what the model goes on with is not touched by that."""
    for _ in range(2):
        with llama.trace(A, **GREEDY) as tracer:
            rows = [].save()
            for _ in tracer.iter[:]:
                rows.append(llama.model.layers[1].output[0])
                rows[0].add_(1)
    assert mirrors.taken
    with llama.trace(A, temperature=0.0, max_tokens=1):
        right = llama.model.layers[1].output[0].save()
    assert torch.allclose(rows[0], right + GREEDY["max_tokens"], atol=1e-4)
    assert len(rows) == GREEDY["max_tokens"]


def test_a_block_that_fails_leaves_no_segment(llama: Any, mirrors: Counting) -> None:
    """Nor do those beside it lose what they have saved."""
    for _ in range(2):
        with pytest.raises(InterventionError, match="index"):
            with llama.trace(**GREEDY) as tracer:
                for number in (0, 1):
                    with tracer.invoke(A):
                        rows = [].save()
                        for step in tracer.iter[:]:
                            rows.append(llama.model.layers[1].output[0])
                            if number == 1 and step == 3:
                                rows[99]
    assert mirrors.taken


def cached(model: Any, prompts: Any, **settings: Any) -> list[Any]:
    """Each request's cache of all layers."""
    with model.trace(**GREEDY) as tracer:
        caches = [].save()
        for prompt in prompts:
            with tracer.invoke(prompt):
                caches.append(tracer.cache(model.model.layers, **settings))
    return caches


@pytest.mark.parametrize(
    "settings", [{}, {"include_inputs": True}, {"dtype": torch.bfloat16}, {"device": None}], ids=str
)
def test_caches(llama: Any, mirrors: Counting, settings: dict[str, Any]) -> None:
    """What was recorded is the same whether it left with the steps or at the end."""
    found = cached(llama, [A, B], **settings)
    assert bool(mirrors.taken) == ("device" not in settings)
    blocks = runner_of(llama).blocks
    blocks.mirroring, mirroring = None, blocks.mirroring
    blocks.interleaver.mirroring = None
    right = cached(llama, [A, B], **settings)
    blocks.mirroring = blocks.interleaver.mirroring = mirroring
    for one, two in zip(found, right, strict=True):
        assert one.keys() == two.keys()
        for path in two:
            assert repr(one[path].output) == repr(two[path].output)
            if "include_inputs" in settings:
                assert repr(one[path].inputs) == repr(two[path].inputs)


def test_a_cache_that_is_too_large_is_refused(
    llama: Any, mirrors: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bytes count though nobody has looked at them, and none of them is left."""
    monkeypatch.setattr(runner_of(llama).blocks, "limits", Limits(max_save_bytes=5000))
    with pytest.raises(InterventionError, match="max_save_bytes=5000; 'cache' alone"):
        with llama.trace(A, **GREEDY) as tracer:
            cache = tracer.cache(llama.model.layers)
    assert mirrors.taken


@pytest.mark.parametrize(
    ("source", "seen"),
    [
        ("rows.append(x.output[0])", True),
        ("x.output[0].data.zero_()", False),
        ("[row.data.zero_() for row in rows]", False),
        ("rows.append(x.view(dtype).imag)", False),
    ],
)
def test_code_whose_writes_no_version_tells_of(source: str, seen: bool) -> None:
    """Its rows go home at the end, also where it writes inside a comprehension."""
    assert writes_are_seen(compile(source, "block", "exec")) is seen
