"""Which tensor a module's name stands for, on decoders that put different ones at the same name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from midstream import TransformersModel
from midstream.errors import InterventionError
from tests.support.checkpoints import A
from tests.support.compare import assert_close
from tests.support.hooking import first, hooked, reading
from tests.support.local_checkpoints import IMAGE

Models = Callable[[str], TransformersModel]


def read(model: TransformersModel, *paths: str) -> dict[str, tuple[Tensor, Tensor]]:
    """Hidden states that modules get and give in a forward on A, each met once."""
    with torch.no_grad(), model.trace(A) as tracer:
        cache = tracer.cache(modules=list(paths), include_inputs=True).save()
    entries = {path: cache[f"model.{path}"] for path in paths}
    assert not any(isinstance(each.output, list) for each in entries.values())
    return {path: (first(each.input), first(each.output)) for path, each in entries.items()}


def hooks(model: TransformersModel, *paths: str) -> dict[str, list[tuple[Tensor, Tensor]]]:
    """As `read`, call by call, of plain PyTorch hooks."""
    seen: dict[str, list[tuple[Tensor, Tensor]]] = {path: [] for path in paths}
    handles = [
        model.module.get_submodule(path).register_forward_hook(
            lambda _, args, output, calls=calls: calls.append((args[0].clone(), output.clone()))
        )
        for path, calls in seen.items()
    ]
    with torch.no_grad():
        model.module(torch.tensor([A]))
    for handle in handles:
        handle.remove()
    return seen


# Norms.

LLAMA_NORMS = ["input_layernorm", "post_attention_layernorm"]
GEMMA_NORMS = [*LLAMA_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm"]
NORMS = [("T-LLAMA", LLAMA_NORMS, 0.0), ("T-GEMMA2", GEMMA_NORMS, 1.0)]


@pytest.mark.parametrize(("name", "norms", "one"), NORMS)
def test_a_norm_is_one_event_with_its_gain(
    traced: Models, name: str, norms: list[str], one: float
) -> None:
    """A norm that q, k and v read is met once; Gemma's gain is 1 and its weight (case 76)."""
    model = traced(name)
    for path, (entered, left) in read(
        model, *(f"model.layers.1.{norm}" for norm in norms), "model.norm"
    ).items():
        scale = (entered.pow(2).mean(-1, keepdim=True) + model.config.rms_norm_eps).sqrt()
        weight = model.module.get_submodule(path).weight.detach()
        right, wrong = ((entered / scale) * (weight + gain) for gain in (one, 1 - one))
        assert_close(left, right, wrong, 1e-5)


@pytest.mark.parametrize(("name", "norms", "one"), NORMS)
def test_a_norm_s_input_is_not_its_output(
    traced: Models, name: str, norms: list[str], one: float
) -> None:
    """What enters and what leaves each norm are two tensors, each that of a hook (case 76b)."""
    model = traced(name)
    paths = [*(f"model.layers.1.{norm}" for norm in norms), "model.norm"]
    seen = hooks(model, *paths)
    for path, (entered, left) in read(model, *paths).items():
        ((right_in, right_out),) = seen[path]
        assert_close(entered, right_in, right_out, 1e-5)
        assert torch.equal(entered, right_in)
        assert torch.equal(left, right_out)


def test_names_of_one_s_own_are_the_modules(traced: Models) -> None:
    """A name that `rename=` gives a norm stands for its input and output alike (case 76b)."""
    plain = traced("T-GEMMA2")
    model = TransformersModel(plain.module, rename={"pre_feedforward_layernorm": "before_mlp"})
    path = "model.layers.1.pre_feedforward_layernorm"
    ((right_in, right_out),) = hooks(plain, path)[path]
    with torch.no_grad(), model.trace(A):
        entered = model.model.layers[1].before_mlp.input.save()
        left = model.model.layers[1].before_mlp.output.save()
    assert torch.equal(entered, right_in)
    assert torch.equal(left, right_out)
    assert not torch.allclose(entered, left, atol=1e-2)


# Parts of the stream.


class Parts(NamedTuple):
    """Where what a stream is the sum of leaves the model, and its factors."""

    embeddings: list[str]
    layers: str
    added: list[str]
    norm: str
    embedding_factor: float = 1.0
    factor: float = 1.0


PARTS = {
    "T-GPT2": Parts(
        ["transformer.wte", "transformer.wpe"], "transformer.h", ["attn", "mlp"], "transformer.ln_f"
    ),
    "T-NEOX": Parts(
        ["gpt_neox.embed_in"], "gpt_neox.layers", ["attention", "mlp"], "gpt_neox.final_layer_norm"
    ),
    "T-LLAMA": Parts(["model.embed_tokens"], "model.layers", ["self_attn", "mlp"], "model.norm"),
    "T-GRANITE": Parts(
        ["model.embed_tokens"], "model.layers", ["self_attn", "mlp"], "model.norm", 3.0, 0.6
    ),
    "T-GEMMA2": Parts(  # its embedding gives the scaled rows, its norms what is added
        ["model.embed_tokens"],
        "model.layers",
        ["post_attention_layernorm", "post_feedforward_layernorm"],
        "model.norm",
    ),
}
UNLIKE = {  # a mistake that is known of each
    "T-GPT2": PARTS["T-GPT2"]._replace(embeddings=["transformer.wte"]),
    "T-NEOX": PARTS["T-NEOX"]._replace(added=["attention"]),
    "T-LLAMA": PARTS["T-LLAMA"]._replace(added=["self_attn"]),
    "T-GRANITE": PARTS["T-GRANITE"]._replace(embedding_factor=1.0, factor=1.0),
    "T-GEMMA2": PARTS["T-GEMMA2"]._replace(embedding_factor=32**0.5, added=["self_attn", "mlp"]),
}


def contributions(model: TransformersModel, parts: Parts) -> list[Tensor]:
    """What each part adds to the stream, ``[1, tokens, hidden]`` or without the first."""
    count = model.config.get_text_config().num_hidden_layers
    added = [f"{parts.layers}.{layer}.{part}" for layer in range(count) for part in parts.added]
    found = read_outputs(model, [*parts.embeddings, *added])
    embedded = [found[path] * parts.embedding_factor for path in parts.embeddings]
    return embedded + [found[path] * parts.factor for path in added]


def read_outputs(model: TransformersModel, paths: list[str]) -> dict[str, Tensor]:
    """What modules give in a forward on A."""
    with torch.no_grad(), model.trace(A) as tracer:
        cache = tracer.cache(modules=paths).save()
    return {path: first(cache[f"model.{path}"].output) for path in paths}


@pytest.mark.parametrize("name", PARTS)
def test_the_parts_add_up_to_the_stream(traced: Models, name: str) -> None:
    """Embedding, attention and MLP outputs with the model's factors are the stream (case 78)."""
    model = traced(name)
    ((stream, _),) = hooks(model, PARTS[name].norm)[PARTS[name].norm]
    total, wrong = (sum(contributions(model, each)) for each in (PARTS[name], UNLIKE[name]))
    assert_close(total, stream, wrong, 1e-5)


def normed(norm: Any, value: Tensor, scale: Tensor) -> Tensor:
    """A norm's gain on a part of its input, by a scale that is not the part's own."""
    return (centred(norm, value) / scale) * norm.weight.detach()


def centred(norm: Any, value: Tensor) -> Tensor:
    """What a norm divides by its scale."""
    return value - value.mean(-1, keepdim=True) if isinstance(norm, torch.nn.LayerNorm) else value


def scale_of(norm: Any, value: Tensor) -> Tensor:
    """What a norm divides its input by, ``[1, tokens, 1]``."""
    epsilon: float = norm.eps if hasattr(norm, "eps") else norm.variance_epsilon
    return (centred(norm, value).pow(2).mean(-1, keepdim=True) + epsilon).sqrt()


@pytest.mark.parametrize("name", ["T-GPT2", "T-LLAMA"])
def test_contributions_to_a_logit(traced: Models, name: str) -> None:
    """Parts by the scale of the stream they make up, not another's, sum to its logits (case 77)."""
    model, parts = traced(name), PARTS[name]
    norm, head = model.module.get_submodule(parts.norm), model.module.lm_head.weight.detach()
    bias = getattr(norm, "bias", torch.zeros(head.shape[1])).detach()
    with torch.no_grad(), model.trace(A) as tracer:
        middle = first(model.get(parts.layers)[2].input).save()
        last = model.get(parts.norm).input.save()
        early = model.lm_head(model.get(parts.norm)(middle)).save()
    added = contributions(model, parts)
    cases = [  # a lens in the middle of the model, and the model's logits
        (added[: len(parts.embeddings) + 4], middle, last, early),
        (added, last, middle, tracer.result.logits),
    ]
    for terms, own, other, right in cases:
        totals = [
            sum((normed(norm, term, scale) @ head.T for term, scale in scaled), bias @ head.T)
            for scaled in (
                [(term, scale_of(norm, own)) for term in terms],
                [(term, scale_of(norm, other)) for term in terms],
                [(term, scale_of(norm, term)) for term in terms],
            )
        ]
        assert_close(totals[0], right, totals[1], 1e-5)
        assert_close(totals[0], right, totals[2], 1e-5)


@pytest.mark.parametrize("name", PARTS)
def test_the_last_stream_through_norm_and_head(traced: Models, name: str) -> None:
    """The last layer's output through final norm and head is the logits, once (case 85)."""
    model, parts = traced(name), PARTS[name]
    layers = model.get(parts.layers)
    with torch.no_grad(), model.trace(A) as tracer:
        before = first(layers[-2].output)
        last = first(layers[-1].output)
        norm = model.get(parts.norm)
        right = model.lm_head(norm(last)).save()
        wrong = [model.lm_head(each) for each in (norm(before), last, norm(norm(last)))].save()
    logits = as_served(model, right)
    assert torch.equal(logits, tracer.result.logits)
    for each in wrong:
        assert_close(logits, tracer.result.logits, as_served(model, each), 1e-5)


def as_served(model: TransformersModel, projected: Tensor) -> Tensor:
    """What the model makes of its head's output."""
    cap = getattr(model.config, "final_logit_softcapping", None)
    if cap is not None:
        return torch.tanh(projected / cap) * cap
    return projected / getattr(model.config, "logits_scaling", 1.0)


@pytest.mark.parametrize(
    ("name", "norm"),
    [("T-LLAMA", "post_attention_layernorm"), ("T-GEMMA2", "pre_feedforward_layernorm")],
)
def test_what_enters_the_mlp(traced: Models, name: str, norm: str) -> None:
    """`gate_proj` gets the MLP's input; the norm before it gets the stream (case 88)."""
    model, layer = traced(name), "model.layers.1"
    added = f"{layer}.{PARTS[name].added[0]}"
    gate = f"{layer}.mlp.gate_proj"
    ((gated, _),) = hooks(model, gate)[gate]
    found = read(model, layer, f"{layer}.{norm}", f"{layer}.mlp")
    attention = read_outputs(model, [added])[added]
    stream, normed = found[f"{layer}.{norm}"]
    entered = found[f"{layer}.mlp"][0]
    assert torch.equal(entered, gated)
    assert torch.equal(entered, normed)
    assert_close(stream, found[layer][0] + attention, entered, 1e-5)
    assert_close(stream, found[layer][0] + attention, attention, 1e-5)


# Modules that a layer does not have, or that do not run.


def test_keys_of_another_layer(traced: Models) -> None:
    """A layer that shares another's keys has no projection of them, and says so (case 80)."""
    model = traced("T-GEMMA3N")
    path = "model.layers.1.self_attn.k_proj"
    with torch.no_grad(), reading(model.module, path) as seen:
        model.module(torch.tensor([A]))
    with torch.no_grad(), model.trace(A):
        keys = model.model.layers[1].self_attn.k_proj.output.save()
    assert torch.equal(keys, seen[path][0])
    missing = r"layers\.3\.self_attn.* 'k_proj'\. Its submodules: q_proj, q_norm, o_proj"
    with pytest.raises(InterventionError, match=missing), model.trace(A):
        _ = model.model.layers[3].self_attn.k_proj.output


def test_a_tower_that_does_not_run(traced: Models) -> None:
    """A module that a forward does not call is an error that says so, never empty (case 80)."""
    model = traced("T-QWEN3VL")
    with (
        pytest.raises(InterventionError, match=r"model\.visual\.output.*did not run"),
        model.trace(A),
    ):
        _ = model.model.visual.output


def test_layers_of_two_kinds(traced: Models) -> None:
    """Each layer of a hybrid has its own attention, and one it lacks is named (case 82)."""
    model = traced("T-HYBRID")
    names = ["linear_attn", "linear_attn", "linear_attn", "self_attn"]
    paths = [f"model.layers.{layer}.{name}" for layer, name in enumerate(names)]
    with torch.no_grad(), reading(model.module, *paths) as seen:
        model.module(torch.tensor([A]))
    values = read_outputs(model, paths)
    assert all(torch.equal(values[path], first(seen[path][0])) for path in paths)
    assert not torch.allclose(values[paths[0]], values[paths[1]])
    for layer, other in ((0, "self_attn"), (3, "linear_attn")):
        there = rf"AttributeError: 'model\.layers\.{layer}'.*'{other}'.*: {names[layer]}, mlp"
        with pytest.raises(InterventionError, match=there), model.trace(A):
            _ = model.model.layers[layer].get(other).output


# Widths.

PROMPT = [5, 6, *[IMAGE] * 4, 7, 8]
PICTURE = {
    "pixel_values": torch.randn(16, 48, generator=torch.Generator().manual_seed(2)),
    "image_grid_thw": torch.tensor([[1, 4, 4]]),
    "mm_token_type_ids": torch.tensor([[int(token == IMAGE) for token in PROMPT]]),
}


def test_the_width_of_a_vector(traced: Models) -> None:
    """Where features of an image enter early layers, the text's width is the vector's (case 87)."""
    model = traced("T-QWEN3VL")
    path, generator = "model.language_model.layers.0", torch.Generator().manual_seed(3)
    text, vision = (torch.randn(width, generator=generator) for width in (32, 48))

    def steered(output: Any) -> None:
        first(output).add_(text)

    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        plain = model.module(ids, **PICTURE).logits
        with hooked(model.module, {path: steered}):
            right = model.module(ids, **PICTURE).logits
    with torch.no_grad(), model.trace(PROMPT, **PICTURE) as tracer:
        first(model.get(path).output)[:] += text
    assert_close(tracer.result.logits, right, plain, 1e-6)
    assert torch.equal(tracer.result.logits, right)
    both = r"\(32\) must match .* \(48\)"
    with pytest.raises(InterventionError, match=both), model.trace(PROMPT, **PICTURE):
        first(model.get(path).output)[:] += vision
    both = r"was assigned \[1, 8, 48\], but the model goes on with \[1, 8, 32\]"
    with pytest.raises(InterventionError, match=both), model.trace(PROMPT, **PICTURE):
        _ = model.get(path).output
        model.get(path).output = vision.expand(1, len(PROMPT), 48)
