"""`tracer.cache()` in the engine: many modules at once, over a request's steps, then home."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import pytest
import torch

from midstream.errors import InterventionError, NotInTraceError, UnboundSaveWarning
from midstream.interleaving.caches import Cache
from tests.modeling.vllm.conftest import Neighbour, line_of, plain_tokens, runner_of
from tests.support.checkpoints import A, B, C
from tests.support.oracle import Oracle, assert_close

pytestmark = pytest.mark.usefixtures("serving")

GREEDY = {"temperature": 0.0, "ignore_eos": True}


def test_all_modules(llama: Any, hf: Oracle) -> None:
    """Every called module of the forward and the head is there, equal to HuggingFace's (C70)."""
    right = hf.reads(A)
    with llama.trace(A, max_tokens=1, **GREEDY) as tracer:
        cache = tracer.cache(include_inputs=True)
    assert isinstance(cache, Cache)
    for path in ("model.embed_tokens", "model.layers.0.mlp", "model.layers.3.self_attn.o_proj"):
        got, expected = cache[path].output, right[f"{path}.output"]
        pairs = zip(got, expected, strict=True) if isinstance(got, tuple) else [(got, expected)]
        for a, b in pairs:
            if b is not None:
                assert_close(a, b, b.roll(1, 0))
    stream = sum(cache.model.layers[1].output)
    assert_close(stream, right["residual.1"], right["residual.2"])
    assert_close(cache["logits_processor"].output, right["logits"], right["logits"].roll(1, -1))
    assert cache["model.layers.2"].input.tolist() == list(range(len(A)))
    called = {path.rpartition(".")[0] for path in right if path.endswith(".output")}
    assert called - {"lm_head"} <= {*cache.keys(), *cache.aliases}


def test_steps_go_on_after_the_block(llama: Any, hf: Oracle) -> None:
    """One value a step, to the end of the request, though the block had nothing else to do.

    (C70, C71).
    """
    right = hf.generate(A, 4)
    whole = hf.reads([*A, *right.tokens[:3]])["residual.2"]
    with llama.trace(A, max_tokens=4, **GREEDY) as tracer:
        cache = tracer.cache(modules=[llama.model.layers[2], "lm_head"])
    steps = cache["model.layers.2"].output
    assert cache.keys() == ["model.layers.2"]
    assert [len(hidden) for hidden, _ in steps] == [len(A), 1, 1, 1]
    assert_close(torch.cat([sum(pair) for pair in steps]), whole, whole.roll(1, 0))


def test_edits_and_loops_beside_a_cache(llama: Any) -> None:
    """What a loop edits is recorded as edited, in its step, and the block can read the cache.

    (C70).
    """
    with llama.trace(A, max_tokens=4, **GREEDY) as tracer:
        cache = tracer.cache(["model.layers.1.mlp"])
        for _ in tracer.iter[2:3]:
            llama.model.layers[1].mlp.output[:] = 5.0
        seen = len(cache["model.layers.1.mlp"].output).save()
    got = cache["model.layers.1.mlp"].output
    assert seen == 2
    assert [bool((part == 5.0).all()) for part in got] == [False, False, True, False]


def test_each_request_has_its_own(llama: Any) -> None:
    """Requests of one trace come home with a list of caches, each equal to that alone."""
    prompts = [A, B, C]
    with llama.trace(max_tokens=2, **GREEDY) as together:
        for prompt in prompts:
            with together.invoke(prompt):
                cache = together.cache("model.layers.1.mlp")
    several = cache
    for got, prompt in zip(several, prompts, strict=True):
        with llama.trace(prompt, max_tokens=2, **GREEDY) as tracer:
            cache = tracer.cache("model.layers.1.mlp")
        alone = cache["model.layers.1.mlp"].output
        for a, b in zip(got["model.layers.1.mlp"].output, alone, strict=True):
            assert_close(a, b, b.flip(-1))


def test_other_requests_are_not_touched(llama: Any) -> None:
    """A plain request beside a cache of everything keeps its tokens."""
    alone = plain_tokens(llama, B, max_tokens=8)
    other = Neighbour(llama, B, max_tokens=8)
    with llama.trace(A, max_tokens=4, **GREEDY) as tracer:
        cache = tracer.cache(include_inputs=True)
    assert other.tokens() == alone
    assert len(cache["model.layers.0.mlp"].output) == 4


def test_inputs_only_and_a_dtype(llama: Any) -> None:
    """What to record and in what precision can be chosen."""
    with llama.trace(A, max_tokens=1, **GREEDY) as tracer:
        cache = tracer.cache(
            "model.layers.1.mlp", dtype=torch.bfloat16, include_output=False, include_inputs=True
        )
    assert cache["model.layers.1.mlp"].input.dtype == torch.bfloat16
    with pytest.raises(KeyError, match="include_output=True"):
        cache["model.layers.1.mlp"].output


def test_a_stopped_and_a_failed_block_bring_theirs_home(llama: Any) -> None:
    """What was recorded up to there is bound, as other saves are."""
    with llama.trace(A, max_tokens=5, **GREEDY) as tracer:
        cache = tracer.cache("model.layers.1.mlp")
        for step in tracer.iter[:5]:
            if step == 2:
                tracer.stop()
            llama.logits
    assert len(cache["model.layers.1.mlp"].output) <= 3
    with pytest.raises(InterventionError, match=r"^ZeroDivisionError"):
        with llama.trace(A, max_tokens=5, **GREEDY) as tracer:
            failed = tracer.cache("model.layers.1.mlp")
            llama.model.layers[2].output
            1 / 0
    assert failed["model.layers.1.mlp"].output.shape == (len(A), 128)


def test_a_late_cache_is_refused(llama: Any) -> None:
    """It has to be opened first (G41)."""
    with pytest.raises(InterventionError, match=r"^ValueError: `tracer\.cache\(\)` has to be"):
        with llama.trace(A, max_tokens=1, **GREEDY) as tracer:
            llama.model.layers[2].output
            cache = tracer.cache()


@pytest.mark.parametrize("modules", [3, [3]])
def test_a_cache_of_what_is_no_module_is_refused(llama: Any, modules: Any) -> None:
    """It says what it takes and what it got."""
    with pytest.raises(InterventionError, match="takes modules and their paths; got int"):
        with llama.trace(A, **GREEDY) as tracer:
            cache = tracer.cache(modules=modules)


def test_a_cache_outside_a_block_is_refused(llama: Any) -> None:
    """There is no forward to record there."""
    with pytest.raises(NotInTraceError, match=r"tracer\.cache\(\)"):
        llama.trace(A).cache()


def test_a_cache_without_a_name_warns(llama: Any) -> None:
    """A bare `tracer.cache(...)` records nothing, and says so once at its line, in an invoke too.

    (C70).
    """
    with pytest.warns(UnboundSaveWarning, match=r"write `cache = tracer\.cache\(") as caught:
        with llama.trace(A, max_tokens=1, **GREEDY) as tracer:
            tracer.cache("model.layers.1.mlp")  # alone
            rows = len(llama.model.layers[1].output[0]).save()
    assert [(w.filename, w.lineno) for w in caught] == [(__file__, line_of(__file__, "alone"))]
    assert rows == len(A)
    with pytest.warns(UnboundSaveWarning, match=r"write `cache = both\.cache\(") as caught:
        with llama.trace(max_tokens=1, **GREEDY) as both:
            with both.invoke(A):
                both.cache("model.layers.1.mlp")  # in an invoke
            with both.invoke(B):
                cache = both.cache("model.layers.1.mlp")
    assert [w.lineno for w in caught] == [line_of(__file__, "in an invoke")]
    assert cache["model.layers.1.mlp"].output.shape == (len(B), 128)


def test_a_cache_without_a_name_can_be_an_error(llama: Any) -> None:
    """With warnings as errors nothing is run or installed, and no trace function stays."""
    before = sys.gettrace()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UnboundSaveWarning, match="nothing is recorded"):
            with llama.edit() as (tracer, _):
                tracer.cache("model.layers.1.mlp")
    assert llama.edits == ()
    assert sys.gettrace() is before


def test_a_cache_that_is_held_does_not_warn(llama: Any) -> None:
    """One in a list comes home with it, and other objects may have a `cache` of their own."""

    class Shelf:
        def cache(self, value: int) -> None:
            self.value = value

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with llama.trace(A, max_tokens=1, **GREEDY) as tracer:
            held = [tracer.cache("model.layers.1.mlp")].save()
            shelf = Shelf()
            shelf.cache(3)
            seen = shelf.value
            seen.save()
    assert held[0]["model.layers.1.mlp"].output.shape == (len(A), 128)
    assert seen == 3


def test_nothing_is_left_in_the_engine(llama: Any) -> None:
    """When the trace is over, neither recorders nor modules' replaced forwards remain."""
    with llama.trace(A, max_tokens=2, **GREEDY) as tracer:
        cache = tracer.cache()
    runner = runner_of(llama)
    assert runner.blocks.interleaver._recording == {}
    assert [name for name, m in runner.model.named_modules() if "forward" in vars(m)] == []
    assert len(cache) > 20
