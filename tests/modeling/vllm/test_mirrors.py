"""What blocks save is sent home while later steps run, and is the same as if it were not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

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
                for step in tracer.iter[:]:
                    for layer in model.model.layers:
                        rows.append(layer.output[0])
                        total = total + layer.output[1].sum()
                total.save()
                kept.append((rows, total))
    return kept


def test_rows_that_were_sent_in_time_are_those_that_are_sent_at_the_end(
    llama: Any, mirrors: Counting
) -> None:
    """From the second trace of a block on its rows leave with the steps; the values are the same."""
    first = read_all(llama, [A, B])
    assert mirrors.taken == 0
    second = read_all(llama, [A, B])
    assert mirrors.taken
    assert mirrors.over
    for (rows, total), (again, same) in zip(first, second, strict=True):
        assert len(rows) == len(again)
        assert all(map(torch.equal, rows, again))
        assert torch.equal(total, same)
