"""A block that takes too much fails for its own request; others go on as they were."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from midstream import VLLM
from midstream.errors import InterventionError, LimitExceededError
from midstream.modeling.vllm.limits import GIB, Limits, size_of
from midstream.modeling.vllm.payloads import OnDevice
from tests.conftest import TINY
from tests.modeling.vllm.conftest import Neighbour, live, place, plain_tokens, runner_of
from tests.support.checkpoints import A, B, C, checkpoint
from tests.support.device import ON_GPU

SETTINGS: dict[str, Any] = {"temperature": 0.0, "max_tokens": 4}
LIMITS = {"block_timeout": 0.6, "max_save_bytes": 100_000, "max_snapshot_bytes": 40_000}


@pytest.fixture(scope="module")
def own() -> Iterator[Any]:
    """An engine on T-LLAMA with narrow limits."""
    with VLLM(str(checkpoint("T-LLAMA", with_tokenizer=True)), **TINY, **LIMITS) as model:
        model.dispatch()
        yield model


@pytest.fixture(scope="module")
def usual(own: Any) -> list[int]:
    """What it generates without a block."""
    return plain_tokens(own)


@pytest.fixture
def narrow(own: Any, usual: list[int]) -> Iterator[Any]:
    """That engine; afterwards it must hold no block and generate what it always did."""
    yield own
    assert live(own) == [0]
    assert plain_tokens(own) == usual


def python_loop(model: Any) -> None:
    while True:  # loops
        pass


def torch_loop(model: Any) -> None:
    value = torch.zeros(64)
    while True:
        value = value + 1


def module_loop(model: Any) -> None:
    hidden = model.model.layers[1].output[0]
    while True:
        model.model.norm(hidden)


def stubborn_loop(model: Any) -> None:
    while True:
        try:
            python_loop(model)
        except BaseException:  # noqa: BLE001
            time.sleep(0.001)


def clause_loop(model: Any) -> None:
    try:
        model.model.layers[1].output
    finally:
        python_loop(model)


def reading_loop(model: Any) -> None:
    while True:
        model.model.layers[1].output


LOOPS = [python_loop, torch_loop, module_loop, stubborn_loop, clause_loop, reading_loop]


@pytest.mark.parametrize("loop", LOOPS)
def test_an_endless_block_ends_its_request_only(loop: Callable[[Any], None], narrow: Any) -> None:
    """Requests beside it, traced and plain, generate what they do without it (O20)."""
    expected = plain_tokens(narrow, C, max_tokens=4), plain_tokens(narrow, B, max_tokens=12)
    neighbour = Neighbour(narrow, B, max_tokens=12)
    begun = time.monotonic()
    with (
        pytest.raises(InterventionError, match=r"^LimitExceededError: .*block_timeout=0\.6 s") as e,
        narrow.trace(**SETTINGS) as tracer,
    ):
        with tracer.invoke(A):
            narrow.model.layers[0].output
            loop(narrow)
        with tracer.invoke(C):
            read = narrow.model.layers[2].output[0].save()
    assert time.monotonic() - begun < 20
    assert isinstance(e.value.__cause__, LimitExceededError)
    assert list(tracer.result[1].outputs[0].token_ids) == expected[0]
    assert tracer.result[0].outputs[0].finish_reason == "error"
    assert read.shape == (9, 128)
    assert neighbour.tokens() == expected[1]


def test_the_error_shows_the_line(narrow: Any) -> None:
    """Where the block was when its time was up is in the traceback."""
    with pytest.raises(InterventionError) as caught, narrow.trace(A, **SETTINGS):
        python_loop(narrow)
    first = re.escape(place(__file__, "loops"))
    assert re.search(rf"{first}|line {int(first.split()[-1]) + 1}", str(caught.value))


def test_steps_count_each_for_itself(narrow: Any) -> None:
    """A block may take its time in every step again."""
    with narrow.trace(A, temperature=0.0, max_tokens=4, ignore_eos=True) as tracer:
        steps = []
        for step in tracer.iter[:4]:
            narrow.logits
            time.sleep(0.25)
            steps.append(step)
        steps.save()
    assert steps == [0, 1, 2, 3]


def test_an_engine_in_this_process_waits_for_a_sleep(narrow: Any) -> None:
    """A wait in C is not interrupted in the caller's own process: the block fails after it."""
    with pytest.raises(InterventionError, match="block_timeout"), narrow.trace(A, **SETTINGS):
        time.sleep(1.2)
        print("not reached")


def test_the_budget_of_a_step(narrow: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that are in time one by one, but not together, fail when the step's time is up."""
    assert runner_of(narrow).blocks.clock.step == 240.0
    monkeypatch.setattr(runner_of(narrow).blocks.clock, "step", 0.5)
    with (
        pytest.raises(InterventionError, match="blocks of one step together.* 0.5 s"),
        narrow.trace(**SETTINGS) as tracer,
    ):
        for ids in (A, B, C, A):
            with tracer.invoke(ids):
                time.sleep(0.3)
    reasons = [result.outputs[0].finish_reason for result in tracer.result]
    assert set(reasons) == {"length", "error"}


def test_saves_over_the_limit(narrow: Any) -> None:
    """The request fails with the sizes and the name of the largest save; others keep theirs.

    (O20).
    """
    with (
        pytest.raises(InterventionError, match="max_save_bytes=100000; 'big' alone has 120000"),
        narrow.trace(**SETTINGS) as tracer,
    ):
        with tracer.invoke(A):
            small = torch.zeros(10).save()
            big = torch.zeros(30_000).save()
        with tracer.invoke(B):
            rows = narrow.model.layers[2].output[0].save()
    assert rows.shape == (3, 128)
    assert set(tracer.saves) == {"rows"}


def test_an_error_of_the_block_goes_before_its_saves(narrow: Any) -> None:
    """A block that fails, and saved too much, shows why it failed."""
    with pytest.raises(InterventionError, match="^ZeroDivisionError"), narrow.trace(A, **SETTINGS):
        big = torch.zeros(30_000).save()
        1 / 0


def test_values_that_a_block_keeps(narrow: Any) -> None:
    """Holding more than the limit fails at the line that reads; what was let go does not count.

    (O20).
    """
    settings = {"temperature": 0.0, "max_tokens": 15, "ignore_eos": True}
    with narrow.trace(A, **settings) as tracer:
        for _ in tracer.all():
            for layer in narrow.model.layers:
                layer.output  # four layers of 19 rows, 1 kB each: 78 kB, none of it held
    assert len(tracer.result.outputs[0].token_ids) == 15
    with (
        pytest.raises(InterventionError, match=r"max_snapshot_bytes=40000") as caught,
        narrow.trace(A, **settings) as tracer,
    ):
        kept = []
        for _ in tracer.all():
            for layer in narrow.model.layers:
                hidden, stream = layer.output  # keeps
                kept.append((hidden.detach()[:1], stream if ON_GPU else stream.numpy()))
    assert place(__file__, "keeps") in str(caught.value)
    assert 2 < len(tracer.result.outputs[0].token_ids) < 15


def test_a_cache_counts(narrow: Any) -> None:
    """What `tracer.cache` keeps is held by the block, also when the block itself has ended."""
    with (
        pytest.raises(InterventionError, match="max_snapshot_bytes=40000"),
        narrow.trace(A, temperature=0.0, max_tokens=30, ignore_eos=True) as tracer,
    ):
        cache = tracer.cache(modules=list(narrow.model.layers)).save()
    assert 2 < len(tracer.result.outputs[0].token_ids) < 30


def test_a_block_may_let_go_and_go_on(narrow: Any) -> None:
    """The error is an ordinary one, raised where the value is read."""
    with narrow.trace(A, temperature=0.0, max_tokens=12, ignore_eos=True) as tracer:
        kept, cleared = [], 0
        for _ in tracer.all():
            try:
                for layer in narrow.model.layers:
                    kept.append(layer.output)
            except RuntimeError:
                kept.clear()
                cleared += 1
        cleared.save()
    assert cleared in (1, 2)
    assert len(tracer.result.outputs[0].token_ids) == 12


def test_the_usual_limits(llama: Any) -> None:
    """Without arguments an engine has the documented ones."""
    blocks = runner_of(llama).blocks
    assert blocks.limits == Limits(30.0, 2 * GIB, 2 * GIB)
    assert blocks.clock.block == 30.0
    assert "limits" not in llama._settings.get("additional_config", {}).get("midstream", {})


@pytest.mark.parametrize("name", sorted(LIMITS))
def test_limits_are_numbers_above_zero(name: str) -> None:
    """Anything else is refused when the model is made."""
    path = str(checkpoint("T-LLAMA", with_tokenizer=True))
    for value in (0, -1, float("nan")):
        with pytest.raises(ValueError, match=f"{name}=.*above zero"):
            VLLM(path, **{name: value})
    for value in ("1", None, True):
        with pytest.raises(TypeError, match=f"{name}=.*not a number"):
            VLLM(path, **{name: value})
    with pytest.raises(TypeError, match=f"Did you mean '{name}'"):
        VLLM(path, **{f"{name}s": 1})


def test_sizes() -> None:
    """Numbers count eight bytes, text its length, and what is shared once."""
    tensor = torch.zeros(10, 3, dtype=torch.float16)
    assert size_of(tensor) == 60
    assert size_of(tensor[:1].expand(100, 3)) == 600  # as it travels
    assert size_of([tensor, {"same": tensor}, (tensor,)]) == 64
    assert size_of(np.zeros(5)) == 40
    assert size_of([1, 2.0, True]) == 24
    assert size_of([1, "abc", None]) == 19
    assert size_of(OnDevice(tensor, "cuda")) == 60
    assert size_of(Limits()) == 8 * len(dataclasses.fields(Limits))
    circle: list[Any] = [b"1234"]
    circle.append(circle)
    assert size_of(circle) == 4
