"""What the parts of a layer are to each other, and which list is that of the blocks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from midstream import TransformersModel
from tests.support.checkpoints import A
from tests.support.compare import assert_close
from tests.support.hooking import first, hooked

Models = Callable[[str], TransformersModel]
BLOCKS = {
    "T-GPT2": "transformer.h",
    "T-LLAMA": "model.layers",
    "T-GEMMA2": "model.layers",
    "T-NEOX": "gpt_neox.layers",
    "T-BLOOM": "transformer.h",
    "T-MIXTRAL": "model.layers",
    "T-LLAVA": "model.language_model.layers",
}


@pytest.mark.parametrize("name", BLOCKS)
def test_the_list_of_blocks_is_the_text_decoders(folder: Callable[[str], Path], name: str) -> None:
    """The blocks that run are, in order, as many as the text configuration says (case 86)."""
    model = TransformersModel(folder(name), dtype=torch.float32, dispatch=True)
    blocks = model.get(BLOCKS[name])
    count = model.config.get_text_config().num_hidden_layers
    assert len(list(blocks)) == count
    order: list[str] = []
    marks = {f"{BLOCKS[name]}.{layer}": None for layer in range(count)}
    with (
        hooked(model.module, {path: lambda _, path=path: order.append(path) for path in marks}),
        model.trace([5, 6, 7]),
    ):
        inner = [first(block.output) for block in blocks].save()
    assert order == list(marks)
    assert {tuple(each.shape[:2]) for each in inner} == {(1, 3)}


def parts(model: TransformersModel, names: dict[str, str]) -> dict[str, torch.Tensor]:
    """What a layer's parts get and give."""
    with torch.no_grad(), model.trace([5, 6, 7, 8]):
        layer = model.get(names["layer"])
        before = first(layer.input).save()
        attention = first(model.get(names["attention"]).output).save()
        between = model.get(names["norm"]).input.save()
        mlp = first(model.get(names["mlp"]).output).save()
        after = first(layer.output).save()
    return {
        "before": before,
        "attention": attention,
        "between": between,
        "mlp": mlp,
        "after": after,
    }


def names(layer: str, attention: str, norm: str = "post_attention_layernorm") -> dict[str, str]:
    """Paths of a layer's parts."""
    return {
        "layer": layer,
        "attention": f"{layer}.{attention}",
        "norm": f"{layer}.{norm}",
        "mlp": f"{layer}.mlp",
    }


def test_sublayers_that_hold_the_residual(traced: Models) -> None:
    """BLOOM's sublayers return the stream itself, and the parts say so (case 71)."""
    found = parts(traced("T-BLOOM"), names("transformer.h.1", "self_attention"))
    assert torch.equal(found["attention"], found["between"])
    assert torch.equal(found["mlp"], found["after"])
    wrong = found["between"] - found["before"]  # what an attention adds elsewhere
    assert not torch.allclose(found["attention"], wrong, atol=1e-2)


@pytest.mark.parametrize(
    ("name", "layer", "attention", "norm"),
    [
        ("T-GPT2", "transformer.h.1", "attn", "ln_2"),
        ("T-LLAMA", "model.layers.1", "self_attn", "post_attention_layernorm"),
        ("T-MIXTRAL", "model.layers.1", "self_attn", "post_attention_layernorm"),
    ],
)
def test_sublayers_that_are_added(
    traced: Models, name: str, layer: str, attention: str, norm: str
) -> None:
    """What attention and MLP return are the steps of the stream (case 71)."""
    found = parts(traced(name), names(layer, attention, norm))
    assert_close(found["attention"], found["between"] - found["before"], found["between"], 1e-4)
    assert_close(found["mlp"], found["after"] - found["between"], found["after"], 1e-4)


def test_sublayers_side_by_side(traced: Models) -> None:
    """In GPT-NeoX attention and MLP together are the step of the stream (case 71)."""
    found = parts(traced("T-NEOX"), names("gpt_neox.layers.1", "attention"))
    both, step = found["attention"] + found["mlp"], found["after"] - found["before"]
    assert_close(both, step, found["attention"], 1e-4)
    assert torch.equal(found["between"], found["before"])


def test_an_expert_is_ablated_in_the_routing_weights(traced: Models) -> None:
    """Zeros in its routing weights take an expert out, its router logits have no effect (B31)."""
    model, path, ids = traced("T-MIXTRAL"), "model.layers.0.mlp.gate", torch.tensor([A])
    with model.trace(A):
        expert = int(model.get(path).output[2][-1, 0]).save()  # the last token's first
    plain = model.module(ids).logits
    experts = model.module.model.layers[0].mlp.experts
    kept = experts.down_proj.detach().clone()
    with torch.no_grad():
        experts.down_proj[expert] = 0
        right = model.module(ids).logits
        experts.down_proj[:] = kept
    with model.trace(A) as tracer:
        _, weights, chosen = model.get(path).output
        weights[chosen == expert] = 0
    assert_close(tracer.result.logits, right, plain, 1e-5)
    with model.trace(A) as tracer:
        model.get(path).output[0][:, expert] = float("-inf")
    assert torch.equal(tracer.result.logits, plain)
