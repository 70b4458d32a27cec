"""What a block reads is what HuggingFace's forward of the same checkpoint has at that place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch

from midstream.errors import InterventionError, OutOfOrderError
from midstream.interleaving.structure import flatten
from tests.modeling.vllm.conftest import Neighbour, plain_tokens
from tests.support.checkpoints import CHECKPOINTS, B, C
from tests.support.compare import GUARD, assert_close, relative_error
from tests.support.oracle import Oracle

NAMES = tuple(CHECKPOINTS)
GREEDY = {"temperature": 0.0, "max_tokens": 1}
TOLERANCE = 1e-4
Oracles = Callable[[str], Oracle]


# --- every location --------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_every_location_equals_huggingface(name: str, engine: Any, oracle: Oracles) -> None:
    """At the first, a middle and the last layer, and around them, all is as on HuggingFace."""
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


# --- the residual stream and the rows --------------------------------------------------------


@pytest.mark.parametrize("name", ["T-LLAMA", "T-QWEN3"])
def test_residual_stream_at_every_layer(name: str, engine: Any, oracle: Oracles) -> None:
    """The stream leaving a layer is the sum of its pair; the first element alone is not it."""
    model = engine(name)
    with model.trace(C, **GREEDY):
        pairs = [layer.output for layer in model.model.layers].save()
    right = oracle(name).reads(C, layers=range(4))
    for i, (hidden, residual) in enumerate(pairs):
        assert_close(hidden + residual, right[f"residual.{i}"], hidden, tol=1e-5)


def test_residual_stream_of_gpt2(engine: Any, oracle: Oracles) -> None:
    """A layer that adds its stream up itself returns the plain stream."""
    model = engine("T-GPT2")
    with model.trace(C, **GREEDY):
        streams = [layer.output for layer in model.transformer.h].save()
    right = oracle("T-GPT2").reads(C)
    for i, stream in enumerate(streams):
        assert_close(stream, right[f"residual.{i}"], right[f"residual.{(i + 1) % 4}"], tol=1e-5)


@pytest.mark.parametrize("ids", [[7], B, C, [5 + i % 90 for i in range(130)]])
def test_rows_are_the_tokens_of_the_prompt(llama: Any, ids: list[int]) -> None:
    """There is one row per prompt token, in order, and one row of logits."""
    with llama.trace(ids, **GREEDY):
        given = llama.model.embed_tokens.input.save()
        stream = sum(llama.model.layers[1].output).save()
        logits, samples = llama.logits.save(), llama.samples.save()
    assert given.tolist() == ids
    assert stream.shape == (len(ids), 128)
    assert logits.shape == (1, 128)
    assert samples.shape == (1, 1)


def test_sampled_token_is_the_one_the_request_goes_on_with(llama: Any) -> None:
    """`model.samples` is the id in the request's output, and greedily the likeliest of `logits`."""
    with llama.trace(B, **GREEDY) as tracer:
        logits, samples = llama.logits.save(), llama.samples.save()
    assert samples.tolist() == [tracer.result.outputs[0].token_ids] == [[int(logits.argmax())]]


def test_logits_have_the_size_of_the_vocabulary(engine: Any, oracle: Oracles) -> None:
    """A vocabulary that vLLM pads is served without the padding."""
    model = engine("T-GPT2")
    with model.trace(B, **GREEDY):
        last = model.transformer.ln_f.output[-1:].save()
        logits = model.logits.save()
        called = model.logits_processor(model.lm_head, last).save()
    right = oracle("T-GPT2").run(B).logits
    assert logits.shape == (1, 101)
    assert_close(logits, right, right.roll(1, -1))
    assert_close(called, right, right.roll(1, -1))


# --- a value is the block's own --------------------------------------------------------------


def test_kept_value_equals_its_clone(llama: Any, hf: Oracle) -> None:
    """A read kept as it is holds what it held when it was read, bit for bit what a clone holds."""
    with llama.trace(C, **GREEDY):
        plain, cloned = ([], [])
        for layer in llama.model.layers:
            plain.append(layer.output)
            cloned.append(tuple(x.clone() for x in layer.output))
        plain, cloned = plain.save(), cloned.save()
    assert len(plain) == 4
    for kept, copied in zip(flatten(plain)[0], flatten(cloned)[0], strict=True):
        assert torch.equal(kept, copied)
    # The norm of the next layer adds the pair up where its second element lies.
    right = hf.reads(C, layers=range(4))
    for i in range(3):
        stream, kept = right[f"residual.{i}"], plain[i][1]
        assert_close(kept, right[f"model.layers.{i}.output"][1], stream)


def test_value_given_out_is_not_the_engines_tensor(llama: Any, hf: Oracle) -> None:
    """What is written into the engine's tensor after a read does not reach the block's value."""
    layers, live = _root(llama).model.layers, []
    hooks = [
        layers[1].register_forward_hook(lambda *call: live.append(call[-1][1])),
        layers[2].register_forward_pre_hook(lambda *call: live.append(live[0].zero_())),
    ]
    try:
        with llama.trace(C, **GREEDY):
            kept = llama.model.layers[1].output[1].save()
            later = llama.model.layers[2].inputs[0][2].save()
    finally:
        for hook in hooks:
            hook.remove()
    assert_close(kept, hf.reads(C, layers=[1])["model.layers.1.output"][1], later)


def _root(model: Any) -> Any:
    """The module vLLM runs, in this process."""
    core = model.vllm_entrypoint.llm_engine.engine_core.engine_core
    return core.model_executor.driver_worker.model_runner.model


def test_two_reads_of_a_visit_are_one_value(llama: Any) -> None:
    """Reading a location again in the same visit gives the same object."""
    with llama.trace(B, **GREEDY):
        first = llama.model.layers[1].mlp.output
        again = llama.model.layers[1].mlp.output
        same = (first is again).save()
        args, _ = llama.model.layers[2].inputs
        same_input = (llama.model.layers[2].input is args[0]).save()
    assert same is True
    assert same_input is True


def test_containers_of_a_value_are_the_blocks_own(llama: Any, hf: Oracle) -> None:
    """Emptying the dict of arguments that a block was given changes nothing for the model."""
    with llama.trace(B, **GREEDY):
        _, kwargs = llama.model.layers[1].self_attn.inputs
        kwargs.clear()
        logits = llama.logits.save()
    right = hf.run(B).logits
    assert_close(logits, right, right.roll(1, -1))


def test_input_is_the_first_argument(llama: Any) -> None:
    """`.input` is the first positional argument, and the first keyword where there is none."""
    layer = llama.model.layers[2]
    with llama.trace(B, **GREEDY):
        outer, first = layer.inputs.save(), layer.input.save()
        inner, keyword = layer.self_attn.inputs.save(), layer.self_attn.input.save()
    (args, kwargs), (inner_args, inner_kwargs) = outer, inner
    assert kwargs == {}
    assert torch.equal(first, args[0])
    assert first.tolist() == [0, 1, 2]
    assert inner_args == ()
    assert list(inner_kwargs) == ["positions", "hidden_states"]
    assert torch.equal(keyword, inner_kwargs["positions"])


def test_shared_module_is_one_location(llama: Any) -> None:
    """The rotary embedding of all layers is served at the first; the others have passed it."""
    rotary = llama.model.layers[3].self_attn.rotary_emb
    with llama.trace(B, **GREEDY):
        q, _ = rotary.output
        there = llama.model.layers[0].self_attn.attn.inputs[0][0]
        same = torch.equal(q, there).save()
    assert rotary is llama.model.layers[0].self_attn.rotary_emb
    assert same is True
    with pytest.raises(InterventionError) as failure, llama.trace(B, **GREEDY):
        llama.model.layers[2].output
        llama.model.layers[3].self_attn.rotary_emb.output
    assert isinstance(failure.value.__cause__, OutOfOrderError)


# --- calling modules -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["T-LLAMA", "T-QWEN3"])
def test_logit_lens(name: str, engine: Any, oracle: Oracles) -> None:
    """Norm and head, called on any layer's stream, give what HuggingFace's give."""
    model, reference = engine(name), oracle(name)
    with model.trace(C, **GREEDY):
        lens = []
        for layer in model.model.layers:
            stream = sum(layer.output)
            lens.append(model.logits_processor(model.lm_head, model.model.norm(stream)))
        lens.save()
    streams = reference.reads(C, layers=())
    for i, logits in enumerate(lens):
        stream = streams[f"residual.{i}"]
        with torch.no_grad():
            right = reference.model.lm_head(reference.model.model.norm(stream))
            without_norm = reference.model.lm_head(stream)
        assert_close(logits, right, without_norm)


def test_called_modules_are_not_traced(llama: Any, hf: Oracle) -> None:
    """A call is no visit: the locations of the called modules still give the model's own pass."""
    right = hf.reads(C)
    with llama.trace(C, **GREEDY):
        stream = sum(llama.model.layers[0].output)
        called = llama.model.norm(stream).save()
        logits_called = llama.logits_processor(llama.lm_head, called).save()
        mlp_called = llama.model.layers[3].mlp(stream).save()
        neurons = llama.model.layers[3].mlp.act_fn.output.save()
        normed = llama.model.norm.output[0].save()
        processed = llama.logits_processor.output.save()
    assert_close(normed, right["model.norm.output"][0], called)
    assert_close(processed, right["logits"], logits_called[-1:])
    assert_close(neurons, right["model.layers.3.mlp.act_fn.output"], neurons.roll(1, 0))
    assert mlp_called.shape == (len(C), 128)


def test_called_module_leaves_the_blocks_value_alone(llama: Any) -> None:
    """A kernel that works in place does not change the value it was called on."""
    with llama.trace(C, **GREEDY):
        hidden, residual = llama.model.layers[1].output
        before = (hidden.clone(), residual.clone()).save()
        llama.model.norm(hidden, residual)
        after = (hidden, residual).save()
        logits = llama.logits.save()
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[1], after[1])
    with llama.trace(C, **GREEDY):
        clean = llama.logits.save()
    assert torch.equal(logits, clean)


def test_head_cannot_be_called_by_itself(llama: Any) -> None:
    """The refusal of vLLM to run its head alone is the block's error."""
    refused = pytest.raises(InterventionError, match=r"RuntimeError: .*sampler")
    with refused as failure, llama.trace(B, **GREEDY):
        llama.lm_head(llama.model.norm.output[0])
    assert type(failure.value.__cause__) is RuntimeError


@pytest.mark.parametrize("path", ["", "model", "model.layers.1", "model.layers.1.self_attn.attn"])
def test_attention_cannot_be_called(llama: Any, path: str) -> None:
    """What uses the cache of the whole step is refused before it runs; the batch is unharmed."""
    alone = plain_tokens(llama, B, max_tokens=6)
    other = Neighbour(llama, B, max_tokens=6)

    def block(model: Any, tracer: Any) -> None:
        rows = model.model.layers[1].output[0]
        model.get(path)(torch.arange(40), rows.repeat(8, 1), rows.repeat(8, 1))

    where = path.replace(".", r"\.") or "model"
    refused = rf"UnsupportedError: '{where}' cannot be called in a block: it contains attention"
    with pytest.raises(InterventionError, match=refused):
        llama.trace(C, block=block, **GREEDY)
    assert other.tokens() == alone


def test_parameters_can_be_read(llama: Any, hf: Oracle) -> None:
    """A module's parameters are those of the checkpoint."""
    with llama.trace(B, **GREEDY):
        head = llama.lm_head.weight.save()
        gain = llama.model.norm.weight.save()
    assert torch.equal(head, hf.model.lm_head.weight)
    assert torch.equal(gain, hf.model.model.norm.weight)


def test_output_of_a_module_after_something_inside_it(llama: Any, hf: Oracle) -> None:
    """In every step a block may read inside a module and then go on to the module's own output."""
    right = hf.reads(C, layers=[1, 2])
    for _ in range(2):
        with llama.trace(C, **GREEDY):
            neurons = llama.model.layers[1].mlp.act_fn.output
            inner = llama.model.layers[1].mlp.output.save()
            outer = llama.model.layers[1].output.save()
            trunk = llama.model.output.save()
        assert torch.equal(inner, outer[0])
        assert_close(outer, right["model.layers.1.output"], right["model.layers.2.output"])
        assert_close(trunk, right["model.output"], right["model.norm.output"][1])
