"""Inside the forwards of vLLM's models: reads, writes and skips as HuggingFace has them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from midstream.errors import InterventionError, OutOfOrderError, SourceNotAvailableError
from midstream.interleaving.copies import Rows
from midstream.interleaving.interleaver import Interleaver
from midstream.interleaving.node import Tree
from midstream.interleaving.run import Run
from tests.modeling.vllm.conftest import Neighbour, line_of, place, plain_tokens, runner_of
from tests.support.changes import Change
from tests.support.checkpoints import A, B
from tests.support.compare import assert_close
from tests.support.device import DEVICE
from tests.support.oracle import Oracle, edit_module, zero_mlp

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 4}
VECTOR = torch.randn(128, generator=torch.Generator().manual_seed(1)) * 3
Block = Callable[[Any], Any]


def test_source_is_printed_before_anything_runs(llama: Any) -> None:
    """The tree that users hold has vLLM's forwards, with true lines and the operations' names.

    (B5).
    """
    from vllm.model_executor.models.llama import LlamaAttention

    text, first = inspect.getsourcelines(LlamaAttention.forward)
    at = next(i for i, line in enumerate(text) if "self.attn(" in line)
    shown = str(llama.model.layers[1].self_attn.source).splitlines()
    row = next(i for i, line in enumerate(shown) if line.startswith("self_attn_0 "))
    assert shown[row].split(maxsplit=3)[1:] == ["->", str(first + at), text[at].strip()]
    assert shown[row + 1].split() == ["attn_output_0", "->", "+"]
    assert "maybe_fused_act_quant_0 ->" in str(llama.model.layers[1].mlp.source)
    assert "self_model_0   ->" in str(llama.source)
    assert llama.get("model.layers.1.self_attn.source.self_attn_0").path == (
        "model.layers.1.self_attn.source.self_attn_0"
    )


def test_reads_equal_huggingface(llama: Any, hf: Oracle) -> None:
    """Operations give the rows that HuggingFace has there, those of a called function too (B3)."""
    with llama.trace(A, **GREEDY) as tracer:
        layer = llama.model.layers[2]
        query, key = layer.self_attn.source.self_rotary_emb_0.output
        heads = layer.self_attn.source.attn_output_0.output
        attention = layer.self_attn.source.self_o_proj_0.output[0]
        activated = layer.mlp.source.maybe_fused_act_quant_0.source.act_fn_0.output
        down = layer.mlp.source.self_down_proj_0.input
        third = sum(llama.model.source.layer_0[3].output)
        got = [query, key, heads, attention, activated, down, third].save()
    reads, where = hf.reads(A), "model.layers.2"
    query, key, _ = reads[f"{where}.self_attn.attn.inputs"][0]
    activated = reads[f"{where}.mlp.act_fn.output"]
    right = [query, key, reads[f"{where}.self_attn.attn.output"]]
    right += [reads[f"{where}.self_attn.output"], activated, activated, reads["residual.3"]]
    assert_close(got, right, [value.flip(0) for value in right])
    assert list(tracer.result.outputs[0].token_ids) == hf.generate(A, 4).tokens


EDITS: dict[str, tuple[Block, Change]] = {}


def edit(change: Change) -> Callable[[Block], Block]:
    """Register a block with the change of HuggingFace's forward that it must equal."""

    def register(block: Block) -> Block:
        EDITS[block.__name__] = (block, change)
        return block

    return register


HALVED_HEADS = edit_module("model.layers.1.self_attn.o_proj", lambda rows: rows * 0.5, "input")


@edit(HALVED_HEADS)
def halve_heads_in_place(model: Any) -> None:
    model.model.layers[1].self_attn.source.self_attn_0.output.mul_(0.5)


@edit(HALVED_HEADS)
def halve_heads_by_assignment(model: Any) -> None:
    heads = model.model.layers[1].self_attn.source.attn_output_0
    heads.output = heads.output * 0.5


@edit(HALVED_HEADS)
def halve_heads_as_an_input(model: Any) -> None:
    projection = model.model.layers[1].self_attn.source.self_o_proj_0
    projection.input = projection.input * 0.5


@edit(HALVED_HEADS)
def halve_heads_by_skip(model: Any) -> None:
    attention = model.model.layers[1].self_attn
    attention.source.attn_output_0.skip(attention.attn.output * 0.5)


@edit(zero_mlp(2))
def skip_an_mlp(model: Any) -> None:
    layer = model.model.layers[2]
    layer.source.self_mlp_0.skip(torch.zeros_like(layer.source.self_mlp_0.input))


@edit(zero_mlp(2))
def skip_an_activation(model: Any) -> None:
    activation = model.model.layers[2].mlp.source.maybe_fused_act_quant_0
    activation.skip(torch.zeros(activation.inputs[0][1].shape[0], 256))


@edit(zero_mlp(2))
def zero_inside_a_called_function(model: Any) -> None:
    model.model.layers[2].mlp.source.maybe_fused_act_quant_0.source.act_fn_0.output[:] = 0


@pytest.mark.parametrize("name", EDITS)
def test_edit_equals_huggingface(name: str, llama: Any, hf: Oracle) -> None:
    """Edits and skips in every step have HuggingFace's effect, beside a request that has none.

    (B3).
    """
    block, change = EDITS[name]

    def edited(model: Any, tracer: Any) -> dict[str, Any]:
        for step in tracer.iter[:4]:
            block(model)
            if step == 0:
                logits = model.logits
        return {"logits": logits}

    alone = plain_tokens(llama, B, max_tokens=8)
    right, clean = hf.generate(A, 4, changes=[change]), hf.run(A).logits
    trace = llama.trace(A, block=edited, **GREEDY)
    assert_close(trace.saves["logits"], right.logits[:1], clean)
    assert list(trace.result.outputs[0].token_ids) == right.tokens
    other = Neighbour(llama, B, max_tokens=8)
    trace = llama.trace(A, block=edited, **GREEDY)
    assert other.tokens() == alone
    assert len(A) + len(B) in other.widths  # both prompts were in one step
    assert_close(trace.saves["logits"], right.logits[:1], clean)
    assert list(trace.result.outputs[0].token_ids) == right.tokens


def test_gpt2_stream_between_attention_and_mlp(engine: Any, oracle: Any) -> None:
    """A sum that no module returns is a location: GPT-2's stream after attention."""
    model, hf = engine("T-GPT2"), oracle("T-GPT2")
    with model.trace(A, **GREEDY) as tracer:
        model.transformer.h[2].source.self_ln_1_0.output
        stream = model.transformer.h[2].source.hidden_states_1.output
        stream += VECTOR.to(DEVICE)
        changed = model.transformer.h[2].ln_2.input.save()
        activated = model.transformer.h[2].mlp.source.self_act_0.output.shape.save()
        logits = model.logits.save()
    change = edit_module("transformer.h.2.attn.c_proj", lambda rows: rows + VECTOR)
    right, clean = hf.generate(A, 4, changes=[change], when="prefill"), hf.run(A).logits
    before = hf.reads(A)["transformer.h.2.ln_2.input"]
    assert_close(changed, before + VECTOR, before)
    assert activated[0] == len(A)
    assert_close(logits, right.logits[:1], clean)
    assert list(tracer.result.outputs[0].token_ids) == right.tokens


def want_everything(interleaver: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Have every forward of every step run instrumented; the paths of those that did."""
    sources, ran = interleaver.sources, []
    prepare = sources._prepare

    def prepared(owner: str, value: Any) -> Any:
        found = prepare(owner, value)
        if found is not None:
            ran.append(owner)
        return found

    paths = list(interleaver.modules)
    monkeypatch.setattr(sources, "_prepare", prepared)
    monkeypatch.setattr(sources, "begin_step", lambda: sources.wanted.update(paths))
    monkeypatch.setattr(interleaver, "_paths_to_replace", lambda: paths)
    return ran


def refused(interleaver: Any) -> list[str]:
    """Modules whose forward could not be instrumented."""
    prepared = interleaver.sources._prepared
    return [path for path, (_, instrumented) in prepared.items() if instrumented is None]


@pytest.mark.parametrize("name", ["T-LLAMA", "T-QWEN3", "T-GPT2"])
def test_all_forwards_instrumented(
    name: str, engine: Any, oracle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With every forward instrumented at once the tokens are HuggingFace's."""
    model = engine(name)
    interleaver = runner_of(model).blocks.interleaver
    ran = want_everything(interleaver, monkeypatch)

    def block(model: Any, tracer: Any) -> None:
        for _ in tracer.iter[:4]:
            model.output

    tokens = list(model.trace(A, block=block, **GREEDY).result.outputs[0].token_ids)
    assert tokens == oracle(name).generate(A, 4).tokens
    assert len(set(ran)) > 40
    assert len(ran) >= 4 * len(set(ran))
    assert refused(interleaver) == []


@pytest.mark.parametrize("name", ["T-LLAMA", "T-QWEN3", "T-GPT2"])
def test_forwards_of_huggingface(name: str, oracle: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decorated forwards and functions chosen at run time work too: HuggingFace's own model."""
    hf = oracle(name).model
    tree = Tree(hf)
    interleaver, got = Interleaver(tree.modules), []
    ran = want_everything(interleaver, monkeypatch)
    layer = "transformer.h.2.attn" if name == "T-GPT2" else "model.layers.2.self_attn"

    def block() -> None:
        attention = tree.root.get(f"{layer}.source.attention_interface_1")
        got.append(attention.source.nn_functional_softmax_0.output)
        got.append(attention.output[1])

    ids = torch.tensor([A])
    for _ in range(2):
        run = Run(block)
        with torch.inference_mode():
            right = hf(ids, use_cache=False).logits
            interleaver.begin_step([run])
            with interleaver.phase({run: Rows(0, len(A))}, (len(A),)):
                logits = hf(ids, use_cache=False).logits
            interleaver.finish_step()
        assert run.error is None
        assert torch.equal(logits, right)
        assert torch.equal(got[-2], got[-1])
        assert torch.allclose(got[-1].sum(-1), torch.ones(()))
    assert layer in ran
    assert len(set(ran)) > 30
    assert refused(interleaver) == []


def test_operation_named_outside_the_block(llama: Any, hf: Oracle) -> None:
    """Operations and sources are captured as modules are, and used in helper functions."""
    heads = llama.model.layers[1].self_attn.source.self_attn_0
    inside = llama.model.layers[2].mlp.source
    loop = llama.model.source.layer_0[3]

    def half(operation: Any) -> Any:
        operation.output.mul_(0.5)
        return operation.output

    with llama.trace(A, **GREEDY):
        llama.model.layers[0].output
        halved = half(heads).save()
        down = inside.self_down_proj_0.input.shape.save()
        same = llama.model.layers[3].output[0].save()
        last = loop.output[0].save()
        logits = llama.logits.save()
    assert down == (len(A), 256)
    assert torch.equal(last, same)
    assert_close(logits, hf.run(A, [HALVED_HEADS]).logits, hf.run(A).logits)


def test_passed_operation(serving: Any) -> None:
    """An operation that the step has passed is refused at once, at the user's line (O8, G34)."""
    with pytest.raises(InterventionError) as failure, serving.trace(A, **GREEDY):
        serving.model.layers[1].self_attn.source.self_attn_0.output  # given
        before = "reached".save()
        serving.model.layers[1].self_attn.source.qkv_split_0.output  # passed
        after = "reached".save()
    text = str(failure.value)
    where = "'model.model.layers.1.self_attn.source.qkv_split_0.output.i0'"
    assert text.startswith(
        f"OutOfOrderError: {where} was requested but the model already ran past it"
    )
    assert f"above line {line_of(__file__, 'given')}" in text
    assert place(__file__, "passed") in text
    assert isinstance(failure.value.__cause__, OutOfOrderError)
    assert before == "reached"
    assert "after" not in locals()


def test_operation_that_does_not_run(serving: Any) -> None:
    """A branch that the forward does not take is an error of the step, at the line that asked."""
    with pytest.raises(InterventionError) as failure, serving.trace(A, **GREEDY):
        serving.model.source.IntermediateTensors_0.output  # never
    text = str(failure.value)
    where = "'model.model.source.IntermediateTensors_0.output.i0'"
    assert text.startswith(f"OutOfOrderError: {where} did not run in this step")
    assert place(__file__, "never") in text


def test_operation_that_there_is_not(serving: Any) -> None:
    """An unknown name in a block is an error that lists the operations (B5)."""
    with pytest.raises(InterventionError, match="AttributeError") as failure:
        with serving.trace(A, **GREEDY):
            serving.model.layers[1].mlp.source.act_fn_0.output
    assert "self_gate_up_proj_0, maybe_fused_act_quant_0, x_0" in str(failure.value)


def test_kernel_has_no_operations(serving: Any) -> None:
    """Where a call leaves Python its inside is refused; its input and output are there.

    (B5, G45).
    """
    view = serving.model.layers[1].self_attn.attn.source.query_view_0
    with pytest.raises(SourceNotAvailableError, match="assignment"):
        serving.model.layers[1].self_attn.source.attn_output_0.source
    with pytest.raises(InterventionError, match="SourceNotAvailableError"):
        with serving.trace(A, **GREEDY):
            view.source.anything_0.output


def test_wrong_value_is_one_requests_error(serving: Any) -> None:
    """A shape, or positions, that do not fit fail the request that wrote them and no other."""
    alone = plain_tokens(serving, B, max_tokens=8)

    def shape(model: Any, tracer: Any) -> None:
        model.model.layers[1].source.self_mlp_0.skip(torch.zeros(2, 128))

    def positions(model: Any, tracer: Any) -> None:
        model.model.layers[0].self_attn.source.self_rotary_emb_0.inputs[0][0][:] = 1 << 40

    def tokens(model: Any, tracer: Any) -> None:
        model.model.source.self_embed_input_ids_0.input[:] = 4711

    for block, text in (
        (shape, "was assigned [2, 128]"),
        (positions, "takes 0 to"),
        (tokens, "were written into an operation"),
    ):
        other = Neighbour(serving, B, max_tokens=8)
        with pytest.raises(InterventionError, match="ValueError") as failure:
            serving.trace(A, block=block, **GREEDY)
        assert text in str(failure.value)
        assert other.tokens() == alone
        assert len(A) + len(B) in other.widths
