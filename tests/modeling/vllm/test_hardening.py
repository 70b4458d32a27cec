"""What a block may try and cannot do to the engine or to other requests."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from midstream.errors import InterventionError
from tests.modeling.vllm.conftest import runner_of
from tests.support.checkpoints import A

SETTINGS: dict[str, Any] = {"temperature": 0.0, "max_tokens": 4}


class ExitingError(Exception):
    """An exception that ends Python when it is shown."""

    def __str__(self) -> str:
        raise SystemExit(1)


class HidingError(Exception):
    """An exception without its arguments."""

    @property
    def args(self) -> Any:  # type: ignore[override]
        raise KeyError("args")


def long_chain() -> Exception:
    error = None
    for number in range(3000):
        link = ValueError(number)
        link.__context__, error = error, link
    assert error is not None
    return error


def odd_notes() -> Exception:
    error = ValueError("noted")
    error.__notes__ = None  # type: ignore[assignment]
    return error


@pytest.mark.parametrize("make", [ExitingError, HidingError, long_chain, odd_notes])
def test_an_exception_that_cannot_be_shown_leaves_the_engine_alone(serving: Any, make: Any) -> None:
    """An exception may misbehave, or have a chain longer than Python's stack."""

    def block(model: Any, tracer: Any) -> None:
        raise make()

    with pytest.raises(InterventionError, match=r"Error"):
        serving.trace(A, block=block, **SETTINGS)


def test_an_edits_error_may_take_no_notes(serving: Any) -> None:
    """Which edit failed cannot be noted on it; the request still ends, and the engine goes on."""

    def block(model: Any, tracer: Any) -> None:
        raise odd_notes()

    serving.edit(block=block)
    try:
        with pytest.raises(InterventionError, match="noted"):
            serving.trace(A, block=lambda model, tracer: None, **SETTINGS)
    finally:
        serving.clear_edits()


@pytest.mark.parametrize("value", [10**7, -5])
@pytest.mark.parametrize(
    "path", ["", "model", "model.embed_tokens", "model.layers.0.self_attn.rotary_emb"]
)
@pytest.mark.parametrize("assigned", [True, False])
def test_an_index_outside_its_table_is_the_blocks_error(
    serving: Any, path: str, value: int, assigned: bool
) -> None:
    """Token ids and positions that the model cannot look up are refused where they are written."""

    def block(model: Any, tracer: Any) -> None:
        node = model.get(path)
        if assigned:
            node.input = torch.full_like(node.input, value)
        else:
            node.input[:] = value

    with pytest.raises(InterventionError, match=rf"was given {value}; it takes 0 to \d+"):
        serving.trace(A, block=block, **SETTINGS)


@pytest.mark.parametrize("name", ["tracer", "model"])
def test_blocks_share_no_state_through_the_engines_objects(serving: Any, name: str) -> None:
    """What all blocks of an engine use cannot be changed by one of them."""

    def block(model: Any, tracer: Any) -> None:
        if name == "tracer":
            tracer.stop = None
        else:
            model.get = None

    with pytest.raises(InterventionError, match="cannot be assigned"):
        serving.trace(A, block=block, **SETTINGS)


def test_nan_stays_with_its_request(serving: Any) -> None:
    """A NaN that a block has put into the cache is gone when another request gets the memory."""
    for _ in range(3):
        with serving.trace(A, temperature=0.0, max_tokens=2):
            serving.model.layers[0].mlp.output[:] = float("nan")
            logits = serving.logits.save()
    assert logits.isnan().all()


@pytest.mark.parametrize("ends_early", [True, False])
def test_a_draw_from_nan_is_a_token(
    serving: Any, monkeypatch: pytest.MonkeyPatch, ends_early: bool
) -> None:
    """A GPU's kernel may draw an id that is not there, also in steps after the block's end."""
    sampler = type(runner_of(serving).sampler)
    draw, wrong = sampler.sample, []

    def as_on_a_gpu(self: Any, logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sampled, processed = draw(self, logits, *args, **kwargs)
        rows = logits.isnan().any(-1)
        wrong.append(int(rows.sum()))
        return sampled.masked_fill(rows, logits.shape[-1] + 7), processed

    monkeypatch.setattr(sampler, "sample", as_on_a_gpu)
    with serving.trace(A, temperature=0.0, max_tokens=4, ignore_eos=True) as tracer:
        serving.model.layers[0].mlp.output[:] = float("nan")
        if not ends_early:
            for _ in tracer.iter[:4]:
                ids = serving.samples.save()
    assert wrong == [1, 1, 1, 1]
    assert tracer.result.outputs[0].token_ids == [0, 0, 0, 0]


def test_module_after_logits_is_refused_at_once_by_a_new_engine(llama: Any) -> None:
    """Before the engine has seen the order of modules it knows that all come before the logits.

    (O8).
    """
    interleaver = runner_of(llama).blocks.interleaver
    order = interleaver.order
    known = order.places, order.known
    order.places, order.known = {}, False
    try:
        with (
            pytest.raises(InterventionError, match="already ran past it.*logits.i0"),
            llama.trace(A, **SETTINGS),
        ):
            llama.logits
            llama.model.layers[0].output
    finally:
        order.places, order.known = known
