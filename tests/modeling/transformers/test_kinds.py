"""Models that are no decoders of text: encoder-decoders, images, images beside text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from midstream import TransformersModel
from midstream.errors import UnsupportedError
from tests.support.compare import assert_close
from tests.support.hooking import first, hooked, reading
from tests.support.local_checkpoints import IMAGE

Models = Callable[[str], TransformersModel]
SOURCE, OTHER, START = [11, 12, 13], [21, 22, 23, 24, 25], [[3, 5]]
PIXELS = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(2))
TEXT = [5, 6, *[IMAGE] * 16, 7, 8, 9]
ENCODER, DECODER = "encoder.final_layer_norm", "decoder.final_layer_norm"


# Encoder and decoder.


@pytest.fixture
def t5(traced: Models) -> TransformersModel:
    """T-T5."""
    return traced("T-T5")


def t5_ids(model: TransformersModel, source: list[int]) -> list[int]:
    """Greedy tokens of plain transformers."""
    found: list[int] = model.module.generate(torch.tensor([source]), max_new_tokens=4)[0].tolist()
    return found


def test_a_forward_of_both_halves(t5: TransformersModel) -> None:
    """Reads, edits and gradients in encoder and decoder are those of hooks (H19, H20, H22)."""
    call = {"input_ids": torch.tensor([SOURCE]), "decoder_input_ids": torch.tensor(START)}
    with reading(t5.module, ENCODER, DECODER) as seen:
        plain = t5.module(**call).logits
    (right,) = torch.autograd.grad(plain[0, -1, 7], seen[ENCODER][0])
    with t5.trace(SOURCE, decoder_input_ids=START) as tracer:
        encoded = t5.encoder.final_layer_norm.output
        states = [encoded, t5.decoder.final_layer_norm.output].save()
        with t5.logits[0, 7].backward():
            gradient = encoded.grad.save()
    assert torch.equal(tracer.result.logits, plain)
    assert all(map(torch.equal, states, (seen[ENCODER][0], seen[DECODER][0])))
    assert torch.equal(gradient, right)
    assert gradient.any()
    with hooked(t5.module, {ENCODER: lambda output: output.flip(-1)}):
        edited = t5.module(**call).logits
    with t5.trace(SOURCE, decoder_input_ids=START) as tracer:
        t5.encoder.final_layer_norm.output = t5.encoder.final_layer_norm.output.flip(-1)
    assert torch.equal(tracer.result.logits, edited)
    assert not torch.allclose(edited, plain, atol=1e-2)


def test_a_generation_of_both_halves(t5: TransformersModel) -> None:
    """The encoder is met in the first step, the decoder in each, and edits of either (H9, H20)."""
    with reading(t5.module, ENCODER, DECODER) as seen:
        right = t5_ids(t5, SOURCE)
    with t5.generate(SOURCE, max_new_tokens=4) as tracer:
        encoded = t5.encoder.final_layer_norm.output.save()
        states, tokens = [].save(), [].save()
        for _ in tracer.iter[:]:
            states.append(t5.decoder.final_layer_norm.output)
            tokens.append(t5.samples.item())
    assert tracer.result[0].tolist() == right == [3, *tokens]
    assert torch.equal(encoded, seen[ENCODER][0])
    assert all(map(torch.equal, states, seen[DECODER]))
    with hooked(t5.module, {ENCODER: torch.ones_like}):
        edited = t5_ids(t5, SOURCE)
    with t5.generate(SOURCE, max_new_tokens=4) as tracer:
        t5.encoder.final_layer_norm.output[:] = 1
    assert tracer.result[0].tolist() == edited != right


def test_sources_of_other_lengths(t5: TransformersModel) -> None:
    """Invokes are padded on the right, and each generates what it does alone (H14, H15)."""
    with t5.generate(max_new_tokens=4) as tracer:
        with tracer.invoke(SOURCE):
            encoded = t5.encoder.final_layer_norm.output.save()
        with tracer.invoke(OTHER):
            encoded = t5.encoder.final_layer_norm.output.save()
    assert tracer.result.tolist() == [t5_ids(t5, SOURCE), t5_ids(t5, OTHER)]
    assert t5_ids(t5, SOURCE) != t5_ids(t5, OTHER)
    with reading(t5.module, ENCODER) as seen:
        for source in (SOURCE, OTHER):
            t5.module.get_encoder()(torch.tensor([source]))
    assert_close(encoded[0][:, :3], seen[ENCODER][0], seen[ENCODER][1][:, :3], 1e-5)
    assert_close(encoded[1], seen[ENCODER][1], seen[ENCODER][1].flip(1), 1e-5)


# Images.


def test_a_vision_model(traced: Models) -> None:
    """Reads, edits, gradients and a skip in a vision model are those of hooks (H13, H20, H22)."""
    model, path = traced("T-VIT"), "vit.layers.0"
    with reading(model.module, path) as seen:
        plain = model.module(PIXELS).logits
    (right,) = torch.autograd.grad(plain[0, 1], first(seen[path][0]))
    with model.trace(PIXELS) as tracer:
        stream = first(model.vit.layers[0].output)
        kept = stream.save()
        with model.logits[0, 1].backward():
            gradient = stream.grad.save()
    assert torch.equal(tracer.result.logits, plain)
    assert torch.equal(kept, first(seen[path][0]))
    assert torch.equal(gradient, right)
    assert gradient.any()
    with hooked(model.module, {"vit.layers.1": lambda output: seen[path][0]}):
        skipped = model.module(PIXELS).logits
    with model.trace(PIXELS) as tracer:
        model.vit.layers[1].skip(model.vit.layers[0].output)
    assert torch.equal(tracer.result.logits, skipped)
    assert not torch.allclose(skipped, plain, atol=1e-3)


def test_images_of_several_invokes(traced: Models) -> None:
    """Each invoke has its own image's values, and ablating one's leaves the other's (H15)."""
    model = traced("T-VIT")
    plain = model.module(PIXELS).logits
    with model.trace() as tracer:
        with tracer.invoke(PIXELS[:1]):
            model.vit.layers[0].output[:] = 0
            logits = model.logits.save()
        with tracer.invoke(PIXELS[1:]):
            logits = model.logits.save()
    assert_close(logits[1], plain[1:], plain[:1], 1e-5)
    with hooked(model.module, {"vit.layers.0": torch.zeros_like}):
        assert_close(logits[0], model.module(PIXELS[:1]).logits, plain[:1], 1e-5)


# Images beside text.


@pytest.fixture
def llava(traced: Models) -> TransformersModel:
    """T-LLAVA."""
    return traced("T-LLAVA")


def llava_logits(model: TransformersModel) -> torch.Tensor:
    """Of plain transformers, of all positions."""
    call = {"input_ids": torch.tensor([TEXT]), "pixel_values": PIXELS[:1]}
    found: torch.Tensor = model.module(**call).logits
    return found


def test_rows_of_an_image_are_read_and_ablated(llava: TransformersModel) -> None:
    """Rows of image tokens are told by their id, read, and ablated as in a hook (case 95)."""
    path = "model.language_model.layers.0"
    with reading(llava.module, path, "model.vision_tower") as seen:
        plain = llava_logits(llava)
    with llava.trace(TEXT, pixel_values=PIXELS[:1]) as tracer:
        ids = llava.inputs[1]["input_ids"]
        rows = (ids[0] == llava.config.image_token_id).nonzero().flatten().save()
        patches = llava.model.vision_tower.output[0].save()
        stream = first(llava.model.language_model.layers[0].output)
        read = stream[:, rows].save()
        stream[:, rows] = 0
    assert rows.tolist() == list(range(2, 18))
    assert torch.equal(read, first(seen[path][0])[:, 2:18])
    assert torch.equal(patches, seen["model.vision_tower"][0][0])

    def ablated(output: Any) -> None:
        first(output)[:, 2:18] = 0

    with torch.no_grad(), hooked(llava.module, {path: ablated}):
        right = llava_logits(llava)
    assert_close(tracer.result.logits, right, plain, 1e-6)


def test_gradients_at_an_image(llava: TransformersModel) -> None:
    """The gradient of an answer reaches the vision tower, as in plain autograd (H13, H22)."""
    path = "model.multi_modal_projector"
    with reading(llava.module, path) as seen:
        loss = llava_logits(llava)[0, -1, 7]
    (right,) = torch.autograd.grad(loss, seen[path][0])
    with llava.trace(TEXT, pixel_values=PIXELS[:1]):
        projected = llava.model.multi_modal_projector.output
        with llava.logits[0, 7].backward():
            gradient = projected.grad.save()
    assert torch.equal(gradient, right)
    assert gradient.any()


def test_a_generation_after_an_image(llava: TransformersModel) -> None:
    """The tower is met in the first step, and the tokens are transformers' (H13, case 95)."""
    call = {"input_ids": torch.tensor([TEXT]), "pixel_values": PIXELS[:1]}
    right = llava.module.generate(**call, max_new_tokens=3)
    with llava.generate(TEXT, pixel_values=PIXELS[:1], max_new_tokens=3) as tracer:
        lengths = [].save()
        for _ in tracer.iter[:]:
            lengths.append(first(llava.model.language_model.layers[0].output).shape[1])
    assert torch.equal(tracer.result, right)
    assert lengths == [21, 1, 1]
    with llava.generate(TEXT, pixel_values=PIXELS[:1], max_new_tokens=3) as tracer:
        llava.model.vision_tower.output[0][:] = 0
    assert tracer.result.tolist() != right.tolist()
    alone = llava.module.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3)
    assert torch.equal(llava.generate([5, 6, 7], max_new_tokens=3), alone)


def test_a_forward_that_looks_at_numbers_is_not_scanned(llava: TransformersModel) -> None:
    """A model that counts an image's tokens is scanned on text, and refused with images (H27)."""
    with llava.scan([5, 6, 7]):
        shape = llava.model.language_model.layers[0].output.shape.save()
    assert shape == (1, 3, 32)
    with pytest.raises(UnsupportedError, match="cannot be scanned.* looks at numbers"):
        with llava.scan(TEXT, pixel_values=PIXELS[:1]):
            shape = llava.model.language_model.layers[0].output.shape.save()


# Sound.


def test_a_generation_from_sound(traced: Models) -> None:
    """Whisper's own decoding loop is met step by step, its encoder in the first (H9, H11, H13)."""
    model = traced("T-WHISPER")
    sound = torch.randn(1, 8, 100, generator=torch.Generator().manual_seed(4))
    right = model.module.generate(sound, max_new_tokens=3)
    with model.generate(sound, max_new_tokens=3) as tracer:
        length = model.model.encoder.layers[0].output.shape[1].save()
        tokens = [].save()
        for _ in tracer.iter[:]:
            tokens.append(model.samples.item())
    assert length == 50
    assert tracer.result.tolist() == right.tolist()
    assert right[0].tolist()[-len(tokens) :] == tokens
    with model.generate(sound, max_new_tokens=3) as tracer:
        model.model.encoder.layer_norm.output[:] = 1
    with hooked(model.module, {"model.encoder.layer_norm": torch.ones_like}):
        edited = model.module.generate(sound, max_new_tokens=3)
    assert tracer.result.tolist() == edited.tolist() != right.tolist()
