"""What fails on one of two ranks fails on both, alone, and nothing waits for ever."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from midstream.errors import InterventionError
from tests.modeling.vllm.parallel.checking import (
    LAYER,
    LONGER,
)
from tests.support.checkpoints import A, B, C
from tests.support.compare import assert_close
from tests.support.oracle import Change, Oracle, zero_mlp


def on_rank(rank: int) -> bool:
    """Whether a block runs on that rank; what no block should ask."""
    return torch.distributed.get_rank() == rank


def raises(model: Any) -> None:
    rows = model.get(LAYER).mlp.act_fn.output
    raise ValueError(f"no rows like {tuple(rows.shape)}")


def raises_on_one(rank: int) -> Callable[[Any], None]:
    def block(model: Any) -> None:
        model.get(LAYER).mlp.act_fn.output
        if on_rank(rank):
            raise MemoryError("nothing left here")
        model.get("model.layers.2").mlp.act_fn.output
        model.logits

    return block


def reads_elsewhere(model: Any) -> None:
    model.get(LAYER).mlp.act_fn.output
    model.get(f"model.layers.{2 + on_rank(1)}").mlp.act_fn.output


def ends_early_on_one(model: Any) -> None:
    model.get(LAYER).mlp.act_fn.output
    if on_rank(0):
        model.get("model.layers.2").output


def calls_on_one(model: Any) -> None:
    rows = model.get(LAYER).mlp.input
    if on_rank(0):
        model.get(LAYER).mlp(rows)


def calls_others(model: Any) -> None:
    rows = model.get(LAYER).mlp.input
    model.get(f"model.layers.{2 + on_rank(1)}").mlp(rows)


def asks_for_one(model: Any) -> None:
    model.get(LAYER).mlp.input
    model.lm_head.param("weight") if on_rank(1) else None


def loops(model: Any) -> None:
    model.get(LAYER).mlp.act_fn.output
    while True:
        pass


def loops_on_one(model: Any) -> None:
    model.get(LAYER).mlp.act_fn.output
    while on_rank(1):
        pass
    model.logits


def loops_with_calls(model: Any) -> None:
    rows = model.get(LAYER).mlp.input
    while True:
        model.get(LAYER).mlp(rows)


def is_late(model: Any) -> None:
    model.get("model.layers.2").mlp.output
    model.get(LAYER).mlp.output


def fails_when_begun(model: Any) -> None:
    if on_rank(1):
        raise MemoryError("nothing left here")


FAILURES: dict[str, tuple[Callable[[Any], None], str]] = {
    "raises": (raises, r"no rows like \(9, 256\)"),
    "raises on the first rank": (raises_on_one(0), "MemoryError: nothing left here"),
    "raises on the other": (raises_on_one(1), "failed on rank 1: MemoryError: nothing left"),
    "fails when it begins": (fails_when_begun, "failed on rank 1: MemoryError"),
    "reads elsewhere": (reads_elsewhere, "went different ways"),
    "ends early on one": (ends_early_on_one, "went different ways"),
    "calls on one": (calls_on_one, "On another rank this block"),
    "calls others": (calls_others, "On another rank this block"),
    "asks for one": (asks_for_one, "went different ways"),
    "loops": (loops, "block_timeout=1.5"),
    "loops on one": (loops_on_one, "block_timeout"),
    "loops with calls": (loops_with_calls, "block_timeout"),
    "is late": (is_late, "already ran past it"),
}


@pytest.mark.parametrize("kind", FAILURES)
def test_a_failure_is_one_requests(two: Any, hf: Oracle, kind: str) -> None:
    """A block that fails, on one rank or on all, fails alone, and nothing waits for ever.

    (F10, F12).
    """
    failing, text = FAILURES[kind]
    right = hf.generate(A, 6, changes=[zero_mlp(1)])

    with pytest.raises(InterventionError, match=text):
        with two.trace(**LONGER) as tracer:
            with tracer.invoke(C):
                failing(two)
            with tracer.invoke(A):
                tokens = [].save()
                for _ in tracer.all():
                    two.get(LAYER).mlp.output[:] = 0
                    tokens.append(int(two.samples))
    assert tokens == right.tokens


def test_a_failure_after_the_request_has_ended(two: Any) -> None:
    """What only the other rank meets when a loop over steps has ended is the request's error."""
    with pytest.raises(InterventionError, match="failed on rank 1: ValueError: too late"):
        with two.trace(C, **LONGER) as tracer:
            for _ in tracer.all():
                two.get(LAYER).output
            if on_rank(1):
                raise ValueError("too late")


def test_a_failure_in_a_block_that_waits_for_the_result(two: Any) -> None:
    """So is what it meets behind `tracer.result`."""
    with pytest.raises(InterventionError, match="failed on rank 1: ValueError: behind it"):
        with two.trace(C, **LONGER) as tracer:
            two.get(LAYER).output
            tracer.result
            if on_rank(1):
                raise ValueError("behind it")


def test_a_stop_and_a_skip_beside_others(two: Any, hf: Oracle) -> None:
    """One request ends early, one skips a module, and one goes on as it does alone."""
    value = torch.randn(9, 128, generator=torch.Generator().manual_seed(7))
    with two.trace(**LONGER) as tracer:
        with tracer.invoke(B):
            for step in tracer.iter[:6]:
                if step == 2:
                    two.samples
                    tracer.stop()
        with tracer.invoke(C, max_tokens=1):
            two.get(LAYER).mlp.skip(value)
            skipped = two.logits.save()
        with tracer.invoke(A):
            tokens = [].save()
            for _ in tracer.all():
                two.get(LAYER).mlp.output[:] = 0
                tokens.append(int(two.samples))
    stands_in = Change("mlp", lambda rows, start: value[: len(rows)], 1)
    assert_close(skipped, hf.run(C, [stands_in]).logits, hf.run(C).logits)
    assert tokens == hf.generate(A, 6, changes=[zero_mlp(1)]).tokens
    assert [len(r.outputs[0].token_ids) for r in tracer.result] == [3, 1, 6]
