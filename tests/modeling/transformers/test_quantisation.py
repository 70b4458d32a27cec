"""A dtype by the name of a quantisation is transformers' configuration for it."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from midstream.modeling.transformers.loading import Checkpoint
from midstream.modeling.transformers.model import TransformersModel

Get = Callable[[str], Any]


@pytest.mark.parametrize("dtype", ["nf4", "fp4", "int4", "4bit", "int8", "8bit"])
def test_a_missing_package_is_told_before_anything_is_read(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quantisation without its package says what to install (H4)."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ImportError, match=f"dtype='{dtype}' needs bitsandbytes and accelerate: pip"
    ):
        Checkpoint("nowhere", dtype=dtype)


@pytest.mark.parametrize(
    ("dtype", "kind", "fields"),
    [
        ("nf4", "BitsAndBytesConfig", {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
        ("int4", "BitsAndBytesConfig", {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
        ("4bit", "BitsAndBytesConfig", {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
        ("fp4", "BitsAndBytesConfig", {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}),
        ("int8", "BitsAndBytesConfig", {"load_in_8bit": True}),
        ("8bit", "BitsAndBytesConfig", {"load_in_8bit": True}),
        ("fp8", "FineGrainedFP8Config", {"weight_block_size": (128, 128)}),
    ],
)
def test_names_of_quantisations_are_configurations(
    dtype: str, kind: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch, folder: Get
) -> None:
    """`dtype` by a quantisation's name is transformers' `quantization_config` (H4)."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    seen: dict[str, Any] = {}

    def from_pretrained(source: str, **arguments: Any) -> torch.nn.Module:
        seen.update(arguments)
        return torch.nn.Linear(1, 1)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", from_pretrained)
    checkpoint = Checkpoint(folder("T-LLAMA"), dtype=dtype)
    assert len(checkpoint.empty().model.layers) == 4
    checkpoint.load()
    assert type(seen["quantization_config"]).__name__ == kind
    assert "dtype" not in seen
    assert {name: getattr(seen["quantization_config"], name) for name in fields} == fields


def test_two_ways_to_quantise_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quantisation's name beside a `quantization_config` is refused (H4)."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    with pytest.raises(TypeError, match="dtype='nf4' and quantization_config are two ways"):
        Checkpoint("nowhere", dtype="nf4", quantization_config={"load_in_8bit": True})


@pytest.mark.parametrize("dtype", ["bf16", "nf8", 4, "nn"])
def test_an_unknown_dtype_is_refused(dtype: Any) -> None:
    """A dtype that is none is refused with those there are (H4)."""
    with pytest.raises(ValueError, match=r"dtype=.*expected 'auto', a torch.dtype .*nf4, fp4"):
        Checkpoint("nowhere", dtype=dtype)


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
@pytest.mark.parametrize("dtype", ["nf4", "fp4", "int8"])
def test_a_quantised_checkpoint_is_read_and_edited(dtype: str, folder: Get) -> None:
    """A checkpoint in 4 or 8 bits is read as a hook reads it, and edited (H4)."""
    model = TransformersModel(folder("T-LLAMA"), dtype=dtype, dispatch=True)
    layer = model.module.model.layers[1]
    assert type(layer.mlp.down_proj).__module__.startswith("bitsandbytes")
    ids, found = torch.arange(1, 9)[None], []
    handle = layer.register_forward_hook(lambda _module, _args, output: found.append(output))
    with torch.no_grad():
        plain = model.module(ids).logits
    handle.remove()
    with model.trace(ids):
        stream = model.model.layers[1].output.save()
        logits = model.lm_head.output.save()
    assert torch.equal(stream, found[0])
    assert torch.equal(logits, plain)
    with model.trace(ids):
        model.model.layers[1].output[:] = 0
        edited = model.lm_head.output.save()
    assert (edited - plain).abs().max() > 0.1
