"""What a block writes has the effect that the same change has on HuggingFace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.changes import Change
from tests.support.checkpoints import A
from tests.support.compare import assert_close, relative_error
from tests.support.device import DEVICE
from tests.support.oracle import (
    Oracle,
    add_vector,
    edit_layer,
    edit_logits,
    edit_mlp_input,
    edit_module,
    replace_layer,
    scale_layer,
    zero_mlp,
)

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 4}
VECTOR = torch.randn(128, generator=torch.Generator().manual_seed(1)) * 3
ROWS = torch.randn(len(A), 128, generator=torch.Generator().manual_seed(2)) * 3
Block = Callable[[Any, Any], Any]
EDITS: dict[str, tuple[Block, Change]] = {}


def edit(change: Change) -> Callable[[Block], Block]:
    """Register a block with the change of HuggingFace's forward that it must equal."""

    def register(block: Block) -> Block:
        EDITS[block.__name__] = (block, change)
        return block

    return register


@edit(zero_mlp(2))
def zero_an_mlp_in_place(model: Any, tracer: Any) -> None:
    model.model.layers[2].mlp.output[:] = 0


@edit(zero_mlp(2))
def zero_an_mlp_by_assignment(model: Any, tracer: Any) -> None:
    mlp = model.model.layers[2].mlp
    mlp.output = torch.zeros_like(mlp.output)


@edit(scale_layer(1, 3.0))
def scale_a_layer_in_place(model: Any, tracer: Any) -> None:
    for part in model.model.layers[1].output:
        part *= 3.0


@edit(scale_layer(1, 3.0))
def scale_a_layer_by_assignment(model: Any, tracer: Any) -> None:
    layer = model.model.layers[1]
    layer.output = tuple(3.0 * part for part in layer.output)


@edit(replace_layer(1, ROWS))
def replace_a_layer(model: Any, tracer: Any) -> None:
    model.model.layers[1].output = (ROWS, torch.zeros_like(ROWS))


@edit(replace_layer(1, ROWS))
def replace_a_layer_unread(model: Any, tracer: Any) -> None:
    model.model.layers[1].output = [torch.zeros_like(ROWS), ROWS]


@edit(add_vector(1, VECTOR))
def add_a_vector(model: Any, tracer: Any) -> None:
    model.model.layers[1].output[0][:] += VECTOR.to(DEVICE)


@edit(add_vector(1, VECTOR))
def add_a_vector_to_the_other_part(model: Any, tracer: Any) -> None:
    model.model.layers[1].output[1].add_(VECTOR)


@edit(add_vector(1, VECTOR, [1, 3]))
def add_a_vector_at_positions(model: Any, tracer: Any) -> None:
    model.model.layers[1].output[0][[1, 3]] += VECTOR.to(DEVICE)


@edit(add_vector(1, VECTOR, [4]))
def add_a_vector_at_the_last_position(model: Any, tracer: Any) -> None:
    model.model.layers[1].output[0][-1] += VECTOR.to(DEVICE)


@edit(add_vector(1, VECTOR, [0, 2]))
def add_a_vector_by_mask(model: Any, tracer: Any) -> None:
    mask = torch.tensor([True, False, True, False, False])
    model.model.layers[1].output[0][mask] += VECTOR.to(DEVICE)


@edit(edit_layer(0, lambda rows: rows.index_fill(1, torch.tensor([7, 50]), 0.0)))
def zero_features_of_the_stream(model: Any, tracer: Any) -> None:
    for part in model.model.layers[0].output:
        part[:, [7, 50]] = 0


@edit(edit_mlp_input(2, lambda rows: rows * 0.25))
def edit_an_input_in_place(model: Any, tracer: Any) -> None:
    model.model.layers[2].mlp.input.mul_(0.25)


@edit(edit_mlp_input(2, lambda rows: rows * 0.25))
def edit_an_input_by_assignment(model: Any, tracer: Any) -> None:
    mlp = model.model.layers[2].mlp
    mlp.input = mlp.input * 0.25


@edit(edit_mlp_input(2, lambda rows: rows * 0.25))
def edit_all_inputs_by_assignment(model: Any, tracer: Any) -> None:
    mlp = model.model.layers[2].mlp
    (rows,), kwargs = mlp.inputs
    mlp.inputs = ((rows * 0.25,), kwargs)


@edit(edit_module("model.layers.2.self_attn", lambda rows: -rows, "input"))
def edit_a_keyword_input_by_assignment(model: Any, tracer: Any) -> None:
    attention = model.model.layers[2].self_attn
    args, kwargs = attention.inputs
    attention.inputs = (args, {**kwargs, "hidden_states": -kwargs["hidden_states"]})


@edit(edit_module("model.layers.2.self_attn", lambda rows: -rows, "input"))
def edit_a_keyword_input_in_place(model: Any, tracer: Any) -> None:
    model.model.layers[2].self_attn.inputs[1]["hidden_states"].neg_()


@edit(edit_module("model.layers.1.self_attn.o_proj", lambda rows: rows.flip(1), "input"))
def edit_what_enters_the_output_projection(model: Any, tracer: Any) -> None:
    projection = model.model.layers[1].self_attn.o_proj
    projection.input = projection.input.flip(1)


@edit(edit_module("model.embed_tokens", lambda rows: rows * 2.0))
def edit_the_embeddings(model: Any, tracer: Any) -> None:
    model.model.embed_tokens.output *= 2.0


@edit(edit_module("model.norm", lambda rows: rows.flip(1)))
def edit_the_final_norm(model: Any, tracer: Any) -> None:
    norm = model.model.norm
    norm.output = (norm.output[0].flip(1), norm.output[1])


@edit(edit_module("model.norm", lambda rows: rows.flip(1)))
def edit_the_models_own_output(model: Any, tracer: Any) -> None:
    model.output = model.output.flip(1)


@edit(edit_logits(lambda logits: logits.index_fill(1, torch.tensor([77]), 1000.0)))
def edit_logits_in_place(model: Any, tracer: Any) -> None:
    model.logits[:, 77] = 1000.0


@edit(edit_logits(lambda logits: -logits))
def edit_logits_by_assignment(model: Any, tracer: Any) -> None:
    model.logits = -model.logits


@edit(edit_logits(lambda logits: -logits))
def edit_the_logits_processors_output(model: Any, tracer: Any) -> None:
    model.logits_processor.output = -model.logits_processor.output


@pytest.mark.parametrize("name", EDITS)
def test_edit_equals_huggingface(name: str, llama: Any, hf: Oracle) -> None:
    """Logits of the edited step and the tokens after it are HuggingFace's with the same change.

    (O6, B1, B6, B17, C62, C65, case 66, case 67).
    """
    block, change = EDITS[name]

    def edited(model: Any, tracer: Any) -> dict[str, Any]:
        block(model, tracer)
        return {"logits": model.logits}

    trace = llama.trace(A, block=edited, **GREEDY)
    right = hf.generate(A, 4, changes=[change], when="prefill")
    assert_close(trace.saves["logits"], right.logits[:1], hf.run(A).logits)
    assert list(trace.result.outputs[0].token_ids) == right.tokens


@pytest.mark.parametrize(
    ("name", "path"), [("T-GPT2", "transformer.h"), ("T-QWEN3", "model.layers")]
)
def test_edits_of_other_architectures(name: str, path: str, engine: Any, oracle: Any) -> None:
    """An MLP zeroed in place has HuggingFace's effect on these too."""
    model = engine(name)
    with model.trace(A, **GREEDY) as tracer:
        model.get(path)[1].mlp.output[:] = 0
        logits = model.logits.save()
    right = oracle(name).generate(A, 4, changes=[zero_mlp(1)], when="prefill")
    assert_close(logits, right.logits[:1], oracle(name).run(A).logits)
    assert list(tracer.result.outputs[0].token_ids) == right.tokens


def test_gpt2_stream_is_replaced_as_one_tensor(engine: Any, oracle: Any) -> None:
    """Where a layer returns the plain stream, that is what is assigned (B22)."""
    model = engine("T-GPT2")
    with model.trace(A, **GREEDY):
        model.transformer.h[1].output = ROWS
        logits = model.logits.save()
    right, clean = oracle("T-GPT2").run(A, [replace_layer(1, ROWS)]), oracle("T-GPT2").run(A)
    assert_close(logits, right.logits, clean.logits)


def test_edit_of_the_demo_model(demo_engine: Any, demo_oracle: Oracle) -> None:
    """On SmolLM2 the probabilities after an edit are HuggingFace's with the same change."""
    model = demo_engine
    ids = model.tokenizer("The capital of France is")["input_ids"]
    with model.trace(ids, temperature=0.0, max_tokens=1):
        model.model.layers[11].mlp.output[:] = 0
        logits = model.logits.save()
    right, clean = demo_oracle.run(ids, [zero_mlp(11)]), demo_oracle.run(ids)
    assert_close(logits, right.logits, clean.logits)


def test_edit_without_a_loop_acts_in_the_prefill_only(llama: Any, hf: Oracle) -> None:
    """The steps after the prefill run unedited, on the keys and values that it left (C52)."""
    with llama.trace(A, **GREEDY) as tracer:
        llama.model.layers[1].output[0][:] += 4 * VECTOR.to(DEVICE)
    change = add_vector(1, 4 * VECTOR)
    tokens = {w: hf.generate(A, 4, changes=[change], when=w).tokens for w in ("prefill", "all")}
    assert tokens["prefill"] != tokens["all"]
    assert tokens["prefill"] != hf.generate(A, 4).tokens
    assert list(tracer.result.outputs[0].token_ids) == tokens["prefill"]


def test_edits_add_up(llama: Any, hf: Oracle) -> None:
    """Several edits in one block all land, a later one on what the earlier ones made."""
    with llama.trace(A, **GREEDY) as tracer:
        llama.model.layers[0].mlp.output[:] = 0
        llama.model.layers[1].output[0][[1, 3]] += VECTOR.to(DEVICE)
        llama.model.layers[2].mlp.input *= 0.25
        llama.logits[:, int(llama.logits.argmax())] = -1000.0
        logits = llama.logits.save()
    changes = [zero_mlp(0), add_vector(1, VECTOR, [1, 3]), edit_mlp_input(2, lambda x: x * 0.25)]
    without = edit_logits(lambda x: x.index_fill(1, x.argmax(-1), -1000.0))
    right = hf.generate(A, 4, changes=[*changes, without], when="prefill")
    assert_close(logits, right.logits[:1], hf.run(A, changes).logits)
    assert list(tracer.result.outputs[0].token_ids) == right.tokens


def test_in_place_and_assigned_edits_are_alike(llama: Any) -> None:
    """Doubling a layer in place gives, bit for bit, the logits that assigning the double gives.

    (A32, C62, case 6).
    """
    layer = llama.model.layers[1]
    with llama.trace(A, **GREEDY):
        clean = llama.logits.save()
    with llama.trace(A, **GREEDY):
        for part in layer.output:
            part *= 2
        in_place = llama.logits.save()
    with llama.trace(A, **GREEDY):
        layer.output = tuple(2 * part for part in layer.output)
        assigned = llama.logits.save()
    assert torch.equal(in_place, assigned)
    assert relative_error(in_place, clean) > 1e-2
