"""PEFT adapters are attached, swapped and taken off."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from midstream import TransformersModel
from midstream.errors import UnsupportedError
from midstream.modeling.transformers.loading import Checkpoint
from tests.support.checkpoints import A, B

Get = Callable[[str], Any]


def test_adapters_need_peft(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without PEFT an adapter is refused with what to install, before anything is read (H5)."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="needs PEFT: pip install peft"):
        Checkpoint("nowhere", peft="adapter")
    with pytest.raises(ImportError, match="needs PEFT"):
        Checkpoint("nowhere").load_adapter("adapter")
    Checkpoint("nowhere").load_adapter(None)


@pytest.fixture
def adapter(folder: Get, tmp_path: Path) -> Callable[[int], Path]:
    """Write adapters of T-LLAMA's queries, drawn from a seed."""
    peft = pytest.importorskip("peft")

    def write(seed: int) -> Path:
        config = peft.LoraConfig(target_modules=["q_proj"], r=2, lora_dropout=0.5)
        model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(folder("T-LLAMA")), config)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for path, weight in sorted(model.named_parameters()):
                if "lora_" in path:
                    weight.normal_(std=0.3, generator=generator)
        model.save_pretrained(tmp_path / f"{seed}")
        return tmp_path / f"{seed}"

    return write


def _with_peft(folder: Path, adapter: Path) -> torch.Tensor:
    peft = pytest.importorskip("peft")
    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), adapter)
    with torch.no_grad():
        return model.eval()(input_ids=torch.tensor([A])).logits


def _logits(checkpoint: Checkpoint) -> torch.Tensor:
    with torch.no_grad():
        return checkpoint.load()(torch.tensor([A])).logits


def test_an_adapter_is_attached_swapped_and_taken_off(folder: Get, adapter: Any) -> None:
    """Results are PEFT's with each adapter, and the plain model's without one (H5)."""
    first, second = adapter(1), adapter(2)
    source = folder("T-LLAMA")
    checkpoint = Checkpoint(source, peft=first)
    plain = _logits(Checkpoint(source))
    rights = [_with_peft(source, first), _with_peft(source, second)]
    assert min((right - plain).abs().max() for right in rights) > 1e-2
    assert torch.allclose(_logits(checkpoint), rights[0], atol=1e-5)
    checkpoint.load_adapter(second)
    assert checkpoint.adapter == str(second)
    assert torch.allclose(_logits(checkpoint), rights[1], atol=1e-5)
    checkpoint.load_adapter(None)
    assert torch.equal(_logits(checkpoint), plain)
    paths = [path for path, _ in checkpoint.load().named_modules()]
    assert paths == [path for path, _ in Checkpoint(source).load().named_modules()]
    checkpoint.load_adapter(first)
    assert torch.allclose(_logits(checkpoint), rights[0], atol=1e-5)


def test_an_adapter_is_chosen_before_loading(folder: Get, adapter: Any) -> None:
    """The empty tree has the adapter's modules, and loses them with it (H5)."""
    source = folder("T-LLAMA")
    checkpoint = Checkpoint(source, peft=adapter(1))
    paths = [path for path, _ in checkpoint.empty().named_modules()]
    assert "model.layers.0.self_attn.q_proj.base_layer" in paths
    assert all(each.is_meta for each in checkpoint.empty().parameters())
    assert not any(each.training for each in checkpoint.empty().modules())
    assert paths == [path for path, _ in Checkpoint(source, peft=adapter(1)).load().named_modules()]
    checkpoint.load_adapter(None)
    bare = [path for path, _ in checkpoint.empty().named_modules()]
    assert bare == [path for path, _ in Checkpoint(source).empty().named_modules()]
    assert torch.equal(_logits(checkpoint), _logits(Checkpoint(source)))


def test_an_adapter_leaves_the_mode(folder: Get, adapter: Any) -> None:
    """A ready module that trains goes on training with an adapter, which trains too (H5)."""
    checkpoint = Checkpoint(AutoModelForCausalLM.from_pretrained(folder("T-LLAMA")).train())
    checkpoint.load().model.norm.eval()
    checkpoint.load_adapter(adapter(1))
    still = {path for path, each in checkpoint.load().named_modules() if not each.training}
    assert still == {"model.norm"}


def test_gradients_flow_beside_an_adapter(folder: Get, adapter: Any) -> None:
    """Weights take gradients with an adapter as they do without one (H22)."""
    module = Checkpoint(folder("T-LLAMA"), peft=adapter(1)).load()
    assert not module.training
    module(torch.tensor([B])).logits.sum().backward()
    assert module.model.embed_tokens.weight.grad is not None
    assert module.model.layers[0].self_attn.q_proj.lora_A["default"].weight.grad is not None


def test_a_model_that_peft_has_wrapped(folder: Get, adapter: Any) -> None:
    """It is traced and generates; beside its steps blocks run on the model inside (H1, H5)."""
    peft = pytest.importorskip("peft")
    base = AutoModelForCausalLM.from_pretrained(folder("T-LLAMA"))
    wrapped = peft.PeftModel.from_pretrained(base, adapter(1)).eval()
    model = TransformersModel(wrapped)
    with model.trace(A):
        logits = model.logits.save()
    assert torch.equal(logits, wrapped(input_ids=torch.tensor([A])).logits[:, -1])
    ids = model.generate(A, max_new_tokens=3)
    with pytest.raises(UnsupportedError, match=r"TransformersModel\(peft_model.get_base_model"):
        with model.generate(A, max_new_tokens=3):
            model.logits.sum()
    inside = TransformersModel(wrapped.get_base_model())
    with inside.generate(A, max_new_tokens=3) as tracer:
        tokens = [].save()
        for _ in tracer.iter[:]:
            tokens.append(inside.samples.item())
    assert tracer.result.tolist() == ids.tolist() == [[*A, *tokens]]
