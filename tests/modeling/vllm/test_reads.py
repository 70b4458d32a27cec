"""What a block reads is what HuggingFace's forward of the same checkpoint has at that place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest

from midstream.interleaving.structure import flatten
from tests.support.checkpoints import CHECKPOINTS, B, C
from tests.support.compare import GUARD, assert_close, relative_error
from tests.support.device import TOLERANCE
from tests.support.oracle import Oracle

NAMES = tuple(CHECKPOINTS)
GREEDY = {"temperature": 0.0, "max_tokens": 1}
Oracles = Callable[[str], Oracle]


@pytest.mark.parametrize("name", NAMES)
def test_every_location_equals_huggingface(name: str, engine: Any, oracle: Oracles) -> None:
    """At the first, a middle and the last layer, and around them, all is as on HuggingFace.

    (B1, B18, B20, B21, B24, B25, B36).
    """
    keys = list(_keys(oracle(name)))
    got = engine(name).trace(C, block=_reading(keys), **GREEDY).saves
    assert got.keys() == set(keys)
    assert len(keys) > 100
    right = oracle(name).reads(C)
    for key in keys:
        _assert_location(got[key], right[key], key)


def test_locations_of_the_demo_model(demo_engine: Any, demo_oracle: Oracle) -> None:
    """On SmolLM2, for a text, these locations and the stream of all thirty layers are right too."""
    text = "The capital of France is"
    keys = list(_keys(demo_oracle, all_layers=True))
    got = demo_engine.trace(text, block=_reading(keys), **GREEDY).saves
    right = demo_oracle.reads(demo_engine.tokenizer(text)["input_ids"])
    for key in right.keys() & got.keys():
        _assert_location(got[key], right[key], key)
    for i in range(30):
        hidden, residual = got[f"model.layers.{i}.output"]
        assert_close(hidden + residual, right[f"residual.{i}"], hidden, TOLERANCE)


def _reading(keys: list[str]) -> Callable[..., Any]:
    """A block that reads locations, given in the order in which the model reaches them."""
    return lambda model, tracer: {
        key: model.logits if key == "logits" else model.get(key) for key in keys
    }


def _assert_location(got: Any, right: Any, key: str) -> None:
    """Every tensor of a location is right; with its rows in another order it would not be."""
    leaves = zip(flatten(got)[0], flatten(right)[0], strict=True)
    for leaf, expected in leaves:
        if expected is None:
            assert leaf is None, key
            continue
        rows = 0 if len(expected) > 1 else -1
        assert_close(leaf, expected, expected.flip(rows), TOLERANCE)


@pytest.mark.parametrize("name", NAMES)
def test_layers_are_told_apart(name: str, oracle: Oracles) -> None:
    """The same location of another layer differs by far, so that the tests above see a mix-up."""
    oracle_ = oracle(name)
    right = oracle_.reads(C)
    first, *others = oracle_.checked_layers
    for module, call in oracle_.architecture.calls(others[0]).items():
        at = [oracle_.architecture.layer_path(layer, module) for layer in (first, *others)]
        values = [flatten(right[f"{path}.output"])[0][0] for path in at]
        for one, other in pairwise(values):
            assert relative_error(one, other) > GUARD * TOLERANCE, (module, call)


def _keys(oracle: Oracle, *, all_layers: bool = False) -> Iterator[str]:
    """Keys of `Oracle.reads`, in the order in which the model reaches the locations.

    They are those of the checked layers and around the layers; with `all_layers` also those of the
    other layers themselves, without what is inside them.
    """
    *trunk, norm = oracle.architecture.ends
    layers = [
        oracle.architecture.layer_path(i, module)
        for i in (range(oracle.layer_count) if all_layers else oracle.checked_layers)
        for module in _called(oracle.architecture.calls(i))
        if i in oracle.checked_layers or not module
    ]
    paths = [path for path in (*trunk, *layers, norm) if path not in oracle.shared]
    yield from _nested(paths)
    yield from ("logits_processor.output", "logits")


def _called(modules: Any) -> list[str]:
    """Modules of a layer as they are called: the table has the norms of q and k at its end."""
    names = list(modules)
    late = [name for name in names if name.endswith(("q_norm", "k_norm"))]
    names = [name for name in names if name not in late]
    at = names.index("self_attn.qkv_proj") + 1 if late else 0
    return names[:at] + late + names[at:]


def _nested(paths: list[str]) -> Iterator[str]:
    """A module's inputs, what it calls, its output."""
    inside: list[str] = []
    for path in paths:
        while inside and inside[-1] and not path.startswith(f"{inside[-1]}."):
            yield f"{inside.pop()}.output"
        yield from (f"{path}.{kind}".strip(".") for kind in ("inputs", "input"))
        inside.append(path)
    yield from (f"{path}.output".strip(".") for path in reversed(inside))


@pytest.mark.parametrize("name", ["T-LLAMA", "T-QWEN3"])
def test_residual_stream_at_every_layer(name: str, engine: Any, oracle: Oracles) -> None:
    """The stream leaving a layer is the sum of its pair; the first element alone is not it.

    (B16, B25, case 3).
    """
    model = engine(name)
    with model.trace(C, **GREEDY):
        pairs = [layer.output for layer in model.model.layers].save()
    right = oracle(name).reads(C, layers=range(4))
    for i, (hidden, residual) in enumerate(pairs):
        assert_close(hidden + residual, right[f"residual.{i}"], hidden, tol=1e-5)


def test_residual_stream_of_gpt2(engine: Any, oracle: Oracles) -> None:
    """A layer that adds its stream up itself returns the plain stream (B22)."""
    model = engine("T-GPT2")
    with model.trace(C, **GREEDY):
        streams = [layer.output for layer in model.transformer.h].save()
    right = oracle("T-GPT2").reads(C)
    for i, stream in enumerate(streams):
        assert_close(stream, right[f"residual.{i}"], right[f"residual.{(i + 1) % 4}"], tol=1e-5)


@pytest.mark.parametrize("ids", [[7], B, C, [5 + i % 90 for i in range(130)]])
def test_rows_are_the_tokens_of_the_prompt(llama: Any, ids: list[int]) -> None:
    """There is one row per prompt token, in order, and one row of logits (B6, B7, B9)."""
    with llama.trace(ids, **GREEDY):
        given = llama.model.embed_tokens.input.save()
        stream = sum(llama.model.layers[1].output).save()
        logits, samples = llama.logits.save(), llama.samples.save()
    assert given.tolist() == ids
    assert stream.shape == (len(ids), 128)
    assert logits.shape == (1, 128)
    assert samples.shape == (1, 1)


def test_sampled_token_is_the_one_the_request_goes_on_with(llama: Any) -> None:
    """`model.samples` is the id in the request's output, and greedily the likeliest of `logits`.

    (B6).
    """
    with llama.trace(B, **GREEDY) as tracer:
        logits, samples = llama.logits.save(), llama.samples.save()
    assert samples.tolist() == [tracer.result.outputs[0].token_ids] == [[int(logits.argmax())]]


def test_logits_have_the_size_of_the_vocabulary(engine: Any, oracle: Oracles) -> None:
    """A vocabulary that vLLM pads is served without the padding (case 10)."""
    model = engine("T-GPT2")
    with model.trace(B, **GREEDY):
        last = model.transformer.ln_f.output[-1:].save()
        logits = model.logits.save()
        called = model.logits_processor(model.lm_head, last).save()
    right = oracle("T-GPT2").run(B).logits
    assert logits.shape == (1, 101)
    assert_close(logits, right, right.roll(1, -1))
    assert_close(called, right, right.roll(1, -1))
