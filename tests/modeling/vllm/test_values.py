"""What a block has read is its own, and there is one value for a location in a visit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from midstream.errors import InterventionError, OutOfOrderError
from midstream.interleaving.structure import flatten
from tests.support.checkpoints import CHECKPOINTS, B, C
from tests.support.compare import assert_close
from tests.support.oracle import Oracle

NAMES = tuple(CHECKPOINTS)
GREEDY = {"temperature": 0.0, "max_tokens": 1}
Oracles = Callable[[str], Oracle]


def test_kept_value_equals_its_clone(llama: Any, hf: Oracle) -> None:
    """A read kept as it is holds what it held when it was read, bit for bit what a clone holds.

    (O5, A32, B13, B26, case 1).
    """
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
    """What is written into the engine's tensor after a read does not reach the block's value.

    (O5, B26).
    """
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
    """`.input` is the first positional argument, and the first keyword where there is none.

    (B1, B20).
    """
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
    """The rotary embedding of all layers is served at the first; the others have passed it.

    (A47, B29).
    """
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
