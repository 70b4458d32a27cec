"""The portability table: what a block in vLLM's spelling is told on a local model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from midstream import TransformersModel
from midstream.errors import UnsupportedError
from tests.support.checkpoints import A, checkpoint


@pytest.fixture(scope="module")
def model() -> TransformersModel:
    """T-LLAMA on HuggingFace."""
    path = checkpoint("T-LLAMA", with_tokenizer=True)
    return TransformersModel(path, dtype=torch.float32, dispatch=True)


def layer_pair(model: Any, tracer: Any) -> None:
    hidden, residual = model.model.layers[0].output
    del hidden, residual


def layer_second(model: Any, tracer: Any) -> None:
    (model.model.layers[0].output[0] + model.model.layers[0].output[1]).sum()


def linear_pair(model: Any, tracer: Any) -> None:
    value, bias = model.model.layers[0].mlp.down_proj.output
    del value, bias


def norm_pair(model: Any, tracer: Any) -> None:
    normed, stream = model.model.layers[0].input_layernorm.output
    del normed, stream


def fused_attention(model: Any, tracer: Any) -> None:
    model.model.layers[0].self_attn.qkv_proj.output.sum()


def fused_mlp(model: Any, tracer: Any) -> None:
    model.model.layers[0].mlp.gate_up_proj.output.sum()


def attention_kernel(model: Any, tracer: Any) -> None:
    model.model.layers[0].self_attn.attn.output.sum()


def logits_of_a_value(model: Any, tracer: Any) -> None:
    model.logits_processor(model.lm_head, model.model.norm.output)


def token_of_a_trace(model: Any, tracer: Any) -> None:
    model.samples.sum()


def finished_request(model: Any, tracer: Any) -> None:
    tracer.result.outputs[0].token_ids.count(1)


SPELLINGS = {
    layer_pair: "`sum(layer.output)` is [tokens, hidden] on both",
    layer_second: "`sum(layer.output)` is [tokens, hidden] on both",
    linear_pair: "Linear layers and norms, which return pairs there, return one tensor here",
    norm_pair: "Linear layers and norms, which return pairs there, return one tensor here",
    fused_attention: "vLLM computes q_proj, k_proj and v_proj in one as 'qkv_proj'",
    fused_mlp: "vLLM computes gate_proj and up_proj in one as 'gate_up_proj'",
    attention_kernel: "an operation of this module's forward, which `self_attn.source` lists",
    logits_of_a_value: "Call the head itself: `model.lm_head(x)`",
    token_of_a_trace: "`with model.generate(...):` draws them, here and on vLLM",
    finished_request: "A RequestOutput exists on vLLM",
}


@pytest.mark.parametrize("block", SPELLINGS, ids=lambda block: block.__name__)
def test_a_block_in_vllms_spelling_is_told_the_other(
    model: TransformersModel, block: Callable[..., None]
) -> None:
    """An error of a block that takes values as vLLM has them says what they are here."""
    with pytest.raises(RuntimeError) as caught:
        model.trace(A, block=block)
    assert SPELLINGS[block] in str(caught.value)


NAMES = {
    "put": "Attach the module",
    "stored": "is used by its name",
    "taps": "Every location is served",
    "stats": "Nothing is counted",
    "run": "Call `model.trace(...)`",
    "close": "Drop the last name",
    "vllm_entrypoint": "`model.module` is the PyTorch module",
    "sampler": "`model.samples` has the token",
}


@pytest.mark.parametrize("name", NAMES)
def test_names_of_engines(model: TransformersModel, name: str) -> None:
    """What only an engine has is an error that says what to write."""
    with pytest.raises(AttributeError) as caught:
        getattr(model, name)
    assert f"'{name}' belongs to engines of vLLM. " in str(caught.value)
    assert NAMES[name] in str(caught.value)


def test_portable_spellings_agree(model: TransformersModel) -> None:
    """What the table gives for both backends is the stream, the last token and the logits here."""
    with model.trace(A, temperature=0.0, max_tokens=1):
        stream = sum(model.model.layers[1].output).save()
        last = model.model.layers[1].output[..., -1, :].save()
        normed = model.model.norm.output
        by_weight = (normed @ model.lm_head.weight.T)[..., -1, :].save()
        by_head = model.lm_head(normed)[..., -1, :].save()
        logits = model.logits.save()
    kept: list[torch.Tensor] = []
    hook = model.module.model.layers[1].register_forward_hook(lambda *call: kept.append(call[2]))
    right = model.module(torch.tensor([A])).logits[:, -1]
    hook.remove()
    assert torch.equal(stream, kept[0][0])
    assert torch.equal(last, kept[0][:, -1])
    assert torch.equal(logits, right)
    assert torch.equal(by_head, right)
    assert torch.allclose(by_weight, right, atol=1e-4)


@pytest.mark.parametrize("word", ["remote", "serve"])
def test_other_places_are_refused(model: TransformersModel, word: str) -> None:
    """`remote=` and `serve=` are refused in every call, before anything runs, naming `serve=`."""
    calls: list[Callable[..., Any]] = [model.trace, model.generate, model.scan, model.pipe]
    for call in calls:
        with pytest.raises(UnsupportedError, match=f"^{word}= is not supported.*serve="):
            call(A, **{word: "there"})
    with pytest.raises(UnsupportedError, match=f"^{word}= is not supported.*serve="):
        model.edit(**{word: "there"})
    with pytest.raises(UnsupportedError, match=f"^{word}= is not supported.*serve="):
        with model.trace() as tracer:
            with tracer.invoke(A, **{word: "there"}):
                model.logits.sum()


def no_grad(model: Any) -> None:
    with torch.no_grad(), model.trace(A):
        with model.logits.sum().backward():
            model.logits.sum()


def generated(model: Any) -> None:
    with model.generate(A, max_new_tokens=1):
        with model.logits.sum().backward():
            model.logits.sum()


@pytest.mark.parametrize("run", [no_grad, generated])
def test_gradients_where_none_are_recorded(
    model: TransformersModel, run: Callable[[Any], None]
) -> None:
    """A backward pass under `no_grad`, or in a generation, is told where gradients are."""
    with pytest.raises(RuntimeError, match=r"(?s)does not require grad.*`model.trace\(...\)`"):
        run(model)
