"""Shapes without numbers."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from midstream import Model
from midstream.errors import InterventionError
from tests.support.local_modules import MLP, WithBuffers, assert_untouched, causal, drawn, rows

X = rows(2)


def test_values_of_a_scan_are_fake() -> None:
    """A scan gives shapes, dtypes and devices; its tensors have no numbers (H27)."""
    module = drawn(MLP)
    model = Model(module)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with model.scan(X) as tracer:
        hidden = model.first.output.save()
        shape = tuple(model.last.output.shape).save()
    assert isinstance(hidden, FakeTensor)
    assert (tuple(hidden.shape), hidden.dtype, hidden.device.type) == ((2, 8), X.dtype, "cpu")
    assert shape == (2, 3)
    assert tuple(tracer.result.shape) == (2, 3)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    with model.trace(X):
        out = model.output.save()
    assert type(out) is torch.Tensor
    assert torch.equal(out, module(X))
    assert_untouched(module)


def test_a_module_without_weights_is_scanned() -> None:
    """On the meta device, with tied weights and buffers; edits and skips are checked too (H27)."""
    with torch.device("meta"):
        module = WithBuffers()
    model = Model(module)
    ids = torch.tensor([[1, 2, 3]])
    with model.scan(ids):
        model.product.output[:, 0] = 1.0
        shape = tuple(model.output.shape).save()
    assert shape == (1, 3, 10)
    with model.scan(ids):
        model.product.skip(torch.zeros(1, 3, 4))
        shape = tuple(model.output.shape).save()
    assert shape == (1, 3, 10)
    with pytest.raises(InterventionError, match=r"assigned \[1, 2, 4\].*\[1, 3, 4\]"):
        with model.scan(ids):
            model.product.output = torch.zeros(1, 2, 4)


@pytest.mark.parametrize("name", ["T-LLAMA", "T-GPT2"])
def test_a_decoder_is_scanned(name: str) -> None:
    """Shapes in a HuggingFace decoder are its forward's; several invokes have theirs (H27)."""
    module = causal(name)
    model = Model(module)
    ids = torch.arange(6).view(2, 3)
    with model.scan() as tracer:
        with tracer.invoke(ids, use_cache=False):
            one = tuple(model.output.logits.shape).save()
        with tracer.invoke(ids[:1], use_cache=False):
            two = tuple(model.output.logits.shape).save()
    vocabulary = module.config.vocab_size
    assert one == (2, 3, vocabulary)
    assert two == (1, 3, vocabulary)
