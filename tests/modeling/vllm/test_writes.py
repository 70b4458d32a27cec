"""What a block writes has the effect that the same change has on HuggingFace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from midstream.errors import InterventionError
from tests.modeling.vllm.conftest import Neighbour, plain_tokens
from tests.support.changes import Change
from tests.support.checkpoints import EOS, LONG, A, B
from tests.support.compare import assert_close, relative_error
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

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 6}
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
    model.model.layers[1].output[0][:] += VECTOR


@edit(add_vector(1, VECTOR))
def add_a_vector_to_the_other_part(model: Any, tracer: Any) -> None:
    model.model.layers[1].output[1].add_(VECTOR)


@edit(add_vector(1, VECTOR, [1, 3]))
def add_a_vector_at_positions(model: Any, tracer: Any) -> None:
    model.model.layers[1].output[0][[1, 3]] += VECTOR


@edit(add_vector(1, VECTOR, [4]))
def add_a_vector_at_the_last_position(model: Any, tracer: Any) -> None:
    model.model.layers[1].output[0][-1] += VECTOR


@edit(add_vector(1, VECTOR, [0, 2]))
def add_a_vector_by_mask(model: Any, tracer: Any) -> None:
    mask = torch.tensor([True, False, True, False, False])
    model.model.layers[1].output[0][mask] += VECTOR


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


@edit(edit_logits(lambda logits: logits.index_fill(1, torch.tensor([77]), 1000.0)))
def edit_logits_in_place(model: Any, tracer: Any) -> None:
    model.logits[:, 77] = 1000.0


@edit(edit_logits(lambda logits: -logits))
def edit_logits_by_assignment(model: Any, tracer: Any) -> None:
    model.logits = -model.logits


@edit(edit_logits(lambda logits: -logits))
def edit_the_logits_processors_output(model: Any, tracer: Any) -> None:
    model.logits_processor.output = -model.logits_processor.output


# --- effects -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EDITS)
def test_edit_equals_huggingface(name: str, llama: Any, hf: Oracle) -> None:
    """Logits of the edited step and the tokens after it are HuggingFace's with the same change."""
    block, change = EDITS[name]

    def edited(model: Any, tracer: Any) -> dict[str, Any]:
        block(model, tracer)
        return {"logits": model.logits}

    trace = llama.trace(A, block=edited, **GREEDY)
    right = hf.generate(A, 6, changes=[change], when="prefill")
    clean = hf.generate(A, 6)
    assert_close(trace.saves["logits"], right.logits[:1], clean.logits[:1])
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
    right = oracle(name).generate(A, 6, changes=[zero_mlp(1)], when="prefill")
    clean = oracle(name).generate(A, 6)
    assert_close(logits, right.logits[:1], clean.logits[:1])
    assert list(tracer.result.outputs[0].token_ids) == right.tokens


def test_gpt2_stream_is_replaced_as_one_tensor(engine: Any, oracle: Any) -> None:
    """Where a layer returns the plain stream, that is what is assigned."""
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
    """The steps after the prefill run unedited, on the keys and values that it left."""
    with llama.trace(A, **GREEDY) as tracer:
        llama.model.layers[1].output[0][:] += 4 * VECTOR
    change = add_vector(1, 4 * VECTOR)
    tokens = {w: hf.generate(A, 6, changes=[change], when=w).tokens for w in ("prefill", "all")}
    assert tokens["prefill"] != tokens["all"]
    assert tokens["prefill"] != hf.generate(A, 6).tokens
    assert list(tracer.result.outputs[0].token_ids) == tokens["prefill"]


def test_edits_add_up(llama: Any, hf: Oracle) -> None:
    """Several edits in one block all land, a later one on what the earlier ones made."""
    with llama.trace(A, **GREEDY) as tracer:
        llama.model.layers[0].mlp.output[:] = 0
        llama.model.layers[1].output[0][[1, 3]] += VECTOR
        llama.model.layers[2].mlp.input *= 0.25
        llama.logits[:, int(llama.logits.argmax())] = -1000.0
        logits = llama.logits.save()
    changes = [zero_mlp(0), add_vector(1, VECTOR, [1, 3]), edit_mlp_input(2, lambda x: x * 0.25)]
    without = edit_logits(lambda x: x.index_fill(1, x.argmax(-1), -1000.0))
    right = hf.generate(A, 6, changes=[*changes, without], when="prefill")
    assert_close(logits, right.logits[:1], hf.run(A, changes).logits)
    assert list(tracer.result.outputs[0].token_ids) == right.tokens


def test_in_place_and_assigned_edits_are_alike(llama: Any) -> None:
    """Doubling a layer in place gives, bit for bit, the logits that assigning the double gives."""
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


def test_next_layer_reads_what_was_written(llama: Any, hf: Oracle) -> None:
    """The stream between layers is one value, and a stream that is set arrives bit for bit."""
    layers = llama.model.layers
    with llama.trace(A, **GREEDY):
        leaving, entering = [].save(), [].save()
        for i in range(3):
            leaving.append(sum(layers[i].output))
            entering.append(layers[i + 1].input_layernorm.output[1])
    with llama.trace(A, **GREEDY):
        layers[1].output = (ROWS, torch.zeros_like(ROWS))
        arrived = layers[2].input_layernorm.output[1].save()
        logits = llama.logits.save()
    assert all(map(torch.equal, leaving, entering))
    assert torch.equal(arrived, ROWS)
    assert not torch.equal(arrived, entering[1])
    assert_close(logits, hf.run(A, [replace_layer(1, ROWS)]).logits, hf.run(A).logits)


def test_steering_by_the_norm_of_the_stream(llama: Any) -> None:
    """A vector scaled by the norm of the whole stream moves each row by that share of it."""
    layers = llama.model.layers
    with llama.trace(A, **GREEDY):
        hidden, residual = layers[1].output
        old = (hidden + residual).save()
        half = old.norm(dim=-1, keepdim=True) * 0.5
        hidden += VECTOR / VECTOR.norm() * half
        mlp_half = (hidden.norm(dim=-1) / old.norm(dim=-1)).save()
        new = layers[2].input_layernorm.output[1].save()
    share = (new - old).norm(dim=-1) / old.norm(dim=-1)
    assert_close(share, torch.full((len(A),), 0.5), mlp_half)


def test_value_read_after_a_write_is_what_was_written(llama: Any) -> None:
    """In the same visit a location reads back as it was written, in place and by assignment."""
    with llama.trace(A, **GREEDY):
        mlp = llama.model.layers[1].mlp
        mlp.output = ROWS
        assigned = mlp.output.clone().save()
        mlp.output[2] = 5.0
        in_place = mlp.output.clone().save()
        residual = llama.model.layers[1].output[0].save()
    right = ROWS.clone()
    right[2] = 5.0
    assert torch.equal(assigned, ROWS)
    assert torch.equal(in_place, right)
    assert torch.equal(residual, right)


def test_replacement_is_taken_as_it_is_when_assigned(llama: Any) -> None:
    """What happens to the assigned tensor afterwards is not an edit any more."""
    with llama.trace(A, **GREEDY):
        rows = ROWS.clone()
        llama.model.layers[1].mlp.output = rows
        rows.zero_()
        arrived = llama.model.layers[1].output[0].save()
    assert torch.equal(arrived, ROWS)


@pytest.mark.parametrize("convert", [torch.Tensor.double, torch.Tensor.half, torch.Tensor.long])
def test_replacement_is_converted_to_the_models_dtype(llama: Any, convert: Any) -> None:
    """A replacement of another dtype lands as the engine's own."""
    rows = convert(ROWS)
    with llama.trace(A, **GREEDY):
        llama.model.layers[1].mlp.output = rows
        arrived = llama.model.layers[1].output[0].save()
    assert arrived.dtype == torch.float32
    assert torch.equal(arrived, rows.float())


def test_replacement_need_not_be_contiguous(llama: Any) -> None:
    """A transposed view, an expanded row and the served rows in another order land as they are."""
    columns = ROWS.T.contiguous().T
    with llama.trace(A, **GREEDY):
        layers = llama.model.layers
        layers[0].mlp.output = columns
        transposed = layers[0].output[0].save()
        layers[1].mlp.output = ROWS[2].expand(5, 128)
        expanded = layers[1].output[0].save()
        before = layers[2].mlp.output.clone().save()
        layers[2].mlp.output = layers[2].mlp.output.flip(0)
        flipped = layers[2].output[0].save()
    assert torch.equal(transposed, ROWS)
    assert torch.equal(expanded, ROWS[2].repeat(5, 1))
    assert torch.equal(flipped, before.flip(0))
    assert not torch.equal(flipped, before)


def test_writes_that_leave_no_trace_in_pytorch_land(llama: Any, hf: Oracle) -> None:
    """On a CPU, writes through numpy and through `.data` are edits too."""
    with llama.trace(A, **GREEDY):
        llama.model.layers[1].mlp.output.numpy()[:] = 0
        llama.model.layers[2].mlp.output.data.zero_()
        logits = llama.logits.save()
    right, half = hf.run(A, [zero_mlp(1), zero_mlp(2)]), hf.run(A, [zero_mlp(1)])
    assert_close(logits, right.logits, half.logits)


def test_reading_changes_nothing(llama: Any) -> None:
    """A block that reads every layer leaves the logits bit for bit as a block that reads none."""
    with llama.trace(A, **GREEDY):
        logits = llama.logits.save()
    with llama.trace(A, **GREEDY) as tracer:
        for layer in llama.model.layers:
            layer.input, layer.mlp.inputs, layer.output
        after = llama.logits.save()
    assert torch.equal(logits, after)
    assert list(tracer.result.outputs[0].token_ids) == plain_tokens(llama, A, max_tokens=6)


# --- samples -----------------------------------------------------------------------------------


def force_in_place(model: Any, tracer: Any) -> None:
    model.samples[:] = 99


def force_by_assignment(model: Any, tracer: Any) -> None:
    model.samples = torch.tensor([[99]])


def force_in_another_dtype(model: Any, tracer: Any) -> None:
    model.samples = torch.tensor([[99]], dtype=torch.int32)


@pytest.mark.parametrize("force", [force_in_place, force_by_assignment, force_in_another_dtype])
def test_forced_token(force: Block, llama: Any, hf: Oracle) -> None:
    """The request goes on from the forced token as HuggingFace does."""
    result = llama.trace(A, block=force, **GREEDY).result
    right, clean = hf.generate(A, 6, force={0: 99}), hf.generate(A, 6)
    assert list(result.outputs[0].token_ids) == right.tokens
    assert right.tokens[1:] != clean.tokens[1:]


def test_forced_end_ends_the_request(llama: Any) -> None:
    """The end-of-sequence token, forced, ends the request as a drawn one does."""
    with llama.trace(A, **GREEDY) as tracer:
        llama.samples[:] = EOS
    completion = tracer.result.outputs[0]
    assert completion.finish_reason == "stop"
    assert len(completion.token_ids) == 1


def test_forced_token_outside_the_vocabulary(serving: Any) -> None:
    """It is this request's ValueError, naming the id and the limits."""
    text = r"ValueError: model\.samples was given token id {}; the model's ids run from 0 to 127"
    for token in (128, -1):
        refused = pytest.raises(InterventionError, match=text.format(token))
        with refused as failure, serving.trace(A, **GREEDY):
            serving.samples = torch.tensor([[token]])
        assert type(failure.value.__cause__) is ValueError
        assert f"{__file__}" in str(failure.value)
        with refused as failure, serving.trace(A, **GREEDY):
            serving.samples[:] = token  # in place
        assert f'File "{__file__}", line {_line("# in place")}' in str(failure.value)


# --- replacements that do not fit --------------------------------------------------------------

MISFITS: dict[str, tuple[Any, str, str]] = {
    "too few rows": (torch.zeros(3, 128), "[3, 128]", "[5, 128]"),
    "too many rows": (torch.zeros(6, 128), "[6, 128]", "[5, 128]"),
    "other width": (torch.zeros(5, 127), "[5, 127]", "[5, 128]"),
    "one more axis": (torch.zeros(1, 5, 128), "[1, 5, 128]", "[5, 128]"),
    "a pair": ((torch.zeros(5, 128), None), "([5, 128], None)", "[5, 128]"),
    "a number": (0.0, "float", "[5, 128]"),
}


@pytest.mark.parametrize("case", MISFITS)
def test_misfit_is_an_error_at_the_users_line(case: str, serving: Any) -> None:
    """A replacement of another shape is a ValueError on its line, with both shapes."""
    value, got, expected = MISFITS[case]
    with pytest.raises(InterventionError) as failure, serving.trace(A, **GREEDY):
        before = serving.model.layers[1].mlp.input.save()
        serving.model.layers[1].mlp.output = value  # this line
    text = str(failure.value)
    where = "model.model.layers.1.mlp.output.i0"
    assert text.startswith(f"ValueError: {where} was assigned {got}")
    assert expected in text.splitlines()[0]
    assert f'File "{__file__}", line {_line("# this line")}' in text
    assert type(failure.value.__cause__) is ValueError
    assert before.shape == (5, 128)


def test_misfit_of_a_pair_and_of_an_input(serving: Any) -> None:
    """One tensor for a pair, and a first argument of another shape, are refused alike."""
    pair = pytest.raises(
        InterventionError, match=r"assigned \[5, 128\].*\(\[5, 128\], \[5, 128\]\)"
    )
    with pair, serving.trace(A, **GREEDY):
        serving.model.layers[1].output = ROWS
    rows = pytest.raises(InterventionError, match=r"assigned \[4, 128\].*\[5, 128\]")
    with rows, serving.trace(A, **GREEDY):
        serving.model.layers[1].mlp.input = ROWS[:4]


def test_misfit_can_be_caught_in_the_block(llama: Any, hf: Oracle) -> None:
    """The ValueError is raised at the assignment, so the block can go on from it."""
    with llama.trace(A, **GREEDY):
        text = ""
        try:
            llama.model.layers[1].mlp.output = ROWS[:2]
        except ValueError as error:
            text = str(error).save()
        llama.model.layers[1].mlp.output = ROWS * 0
        logits = llama.logits.save()
    assert "[2, 128]" in text
    assert_close(logits, hf.run(A, [zero_mlp(1)]).logits, hf.run(A).logits)


def _line(mark: str) -> int:
    """Number of the first line of this file that ends with a mark."""
    with open(__file__) as file:
        return next(i for i, line in enumerate(file, 1) if line.rstrip().endswith(mark))


# --- others in the same batch ------------------------------------------------------------------


def misfit(model: Any, tracer: Any) -> None:
    model.model.layers[1].mlp.output = torch.zeros(3, 128)


def out_of_vocabulary(model: Any, tracer: Any) -> None:
    model.samples[:] = 4711


def everything(model: Any, tracer: Any) -> None:
    model.model.embed_tokens.output[:] = 1.0
    model.model.layers[0].mlp.input = ROWS
    for part in model.model.layers[1].output:
        part[:] = 9.0
    model.model.layers[2].output = (ROWS, ROWS)
    model.logits[:] = float("nan")
    model.logits = torch.zeros(1, 128)
    model.samples[:] = 3


@pytest.mark.parametrize("block", [misfit, out_of_vocabulary, everything])
def test_neighbour_keeps_its_tokens(block: Block, llama: Any) -> None:
    """A request in the same batch gets exactly the tokens it gets alone."""
    alone = plain_tokens(llama, B, max_tokens=8)
    other = Neighbour(llama, B, max_tokens=8)
    try:
        llama.trace(A, block=block, **GREEDY)
        failed = False
    except InterventionError:
        failed = True
    assert other.tokens() == alone
    assert len(A) + len(B) in other.widths  # both prompts were in one step
    assert failed == (block is not everything)


def test_traced_request_is_alone_in_its_rows(llama: Any, hf: Oracle) -> None:
    """Beside another request a block reads and edits its own rows, with the effect it has alone."""
    other = Neighbour(llama, B, max_tokens=8)
    with llama.trace(A, **GREEDY) as tracer:
        given = llama.model.embed_tokens.input.save()
        llama.model.layers[1].output[0][[1, 3]] += VECTOR
        logits = llama.logits.save()
    other.tokens()
    right = hf.generate(A, 6, changes=[add_vector(1, VECTOR, [1, 3])], when="prefill")
    assert len(A) + len(B) in other.widths
    assert given.tolist() == A
    assert_close(logits, right.logits[:1], hf.run(B).logits)
    assert list(tracer.result.outputs[0].token_ids) == right.tokens


# --- the prefix cache --------------------------------------------------------------------------


def _cached(model: Any, ids: list[int]) -> tuple[list[int], int]:
    """Tokens of a plain request, and how many of its prompt's tokens came from the cache."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=8)
    prompt = {"prompt_token_ids": ids}
    (output,) = model.vllm_entrypoint.generate([prompt], params, use_tqdm=False)
    return list(output.outputs[0].token_ids), output.num_cached_tokens


def _steer(model: Any, ids: list[int]) -> Any:
    with model.trace(ids, temperature=0.0, max_tokens=8) as tracer:
        model.model.layers[0].output[0][:] += 10 * VECTOR
        rows = len(model.model.layers[1].output[0]).save()
    return list(tracer.result.outputs[0].token_ids), tracer.result.num_cached_tokens, rows


def test_steered_prompt_stays_out_of_the_prefix_cache(llama: Any, hf: Oracle) -> None:
    """Before and after a steered run, plain requests with its prompt get what they always do."""
    shared = [(3 * i) % 100 + 10 for i in range(64)]
    first, other = [*shared, 3], [*shared, 4, 5]
    steered_first, _, _ = _steer(llama, first)
    clean, cached = _cached(llama, first)
    assert cached == 0
    assert clean == hf.generate(first, 8).tokens != steered_first
    steered, cached, rows = _steer(llama, first)
    assert (steered, cached, rows) == (steered_first, 0, 65)
    change = add_vector(0, 10 * VECTOR)
    assert steered == hf.generate(first, 8, changes=[change], when="prefill").tokens
    assert _cached(llama, first) == (clean, 64)  # the plain run's own blocks, from before
    assert _cached(llama, other) == (hf.generate(other, 8).tokens, 64)


def test_prompt_in_the_cache_is_traced_whole(llama: Any) -> None:
    """A block sees every row of a prompt that plain requests have left in the prefix cache."""
    ids = LONG[:64]
    plain_tokens(llama, ids)
    assert _cached(llama, ids)[1] > 0
    with llama.trace(ids, temperature=0.0, max_tokens=1):
        first = sum(llama.model.layers[2].output).save()
    with llama.trace(ids, temperature=0.0, max_tokens=1):
        second = sum(llama.model.layers[2].output).save()
    assert first.shape == (64, 128)
    assert torch.equal(first, second)
