"""What a block saves comes back under its name, as ordinary values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import midstream
from midstream.errors import UnboundSaveWarning
from midstream.modeling.vllm.payloads.segments import remaining
from tests.support.checkpoints import A

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 1}


def test_saves_of_plain_values(llama: Any) -> None:
    """Numbers, strings, lists, dicts, None and their kind come back under their names (O1, C19)."""
    with llama.trace(A, **GREEDY):
        rows = llama.model.layers[1].output[0]
        count = len(rows).save()
        three = 3
        three.save()
        same_three = 3
        score = float(rows[0, 0]).save()
        name = "layer one".save()
        flag = True.save()
        nothing = None
        nothing.save()
        pair = (count, name).save()
        table = {"rows": rows, 2: [score]}.save()
        array = rows.numpy().save()
        kind = rows.dtype.save()
    assert (count, three, name, flag, nothing) == (5, 3, "layer one", True, None)
    assert "same_three" not in locals()
    assert pair == (5, "layer one")
    assert table["rows"][0, 0].item() == score == table[2][0]
    assert isinstance(array, np.ndarray)
    assert np.array_equal(array, table["rows"].numpy())
    assert kind is torch.float32


def test_containers_may_be_filled_later(llama: Any) -> None:
    """What is appended after the save comes back, without a save of its own (C22)."""
    with llama.trace(A, **GREEDY):
        streams, by_layer = [].save(), {}.save()
        for i, layer in enumerate(llama.model.layers):
            streams.append(sum(layer.output))
            by_layer[i] = streams[-1].norm().item()
    assert len(streams) == 4
    assert [s.norm().item() for s in streams] == list(by_layer.values())


def test_save_by_function(llama: Any) -> None:
    """`midstream.save` takes anything, by any name it is imported under (O1, C19)."""
    keep = midstream.save
    with llama.trace(A, **GREEDY):
        rows = midstream.save(llama.model.layers[1].output[0])
        count = keep(len(rows))
    assert rows.shape == (5, 128)


def test_save_returns_its_value(llama: Any) -> None:
    """What is computed from a save is not saved by it (C19, C20)."""
    with llama.trace(A, **GREEDY):
        doubled = (total := llama.model.layers[1].output[0].sum().save()) * 2
    assert total.shape == ()
    assert "doubled" not in locals()


def test_unbound_save_warns(llama: Any) -> None:
    """A save that no name holds cannot come back, and says so at its line (O17)."""
    with pytest.warns(UnboundSaveWarning, match="bound to no name") as caught:
        with llama.trace(A, **GREEDY):
            llama.logits.save()
    assert caught[0].filename == __file__


def test_saved_tensors_are_ordinary(llama: Any) -> None:
    """They are on the CPU, take part in autograd, and can be written to (O5, B15, C25)."""
    with llama.trace(A, **GREEDY):
        rows = llama.model.layers[1].output[0].save()
        view = llama.model.layers[2].output[0][1:3, ::2].save()
        graph = torch.nn.Parameter(torch.ones(3)).save()
    for tensor in (rows, view):
        assert tensor.device.type == "cpu"
        assert not tensor.requires_grad
        assert not tensor.is_inference()
        assert tensor.grad_fn is None
        tensor += 1.0
        weight = torch.ones(tensor.shape[1], requires_grad=True)
        (tensor @ weight).sum().backward()
        assert torch.equal(weight.grad, tensor.sum(0))
    assert not graph.requires_grad
    assert view.shape == (2, 64)
    assert view.untyped_storage().nbytes() < rows.untyped_storage().nbytes()


def test_large_save_leaves_no_shared_memory(llama: Any) -> None:
    """Seventy megabytes come back whole, by shared memory that has no name afterwards."""
    with llama.trace(A, **GREEDY):
        row = llama.model.layers[1].output[0][0]
        large = row.repeat(140_000, 1).save()
        row = row.clone().save()
    assert large.nbytes > 64 << 20
    assert torch.equal(large[0], row)
    assert torch.equal(large[-1], row)
    large[3] = 0.0
    assert remaining(llama._engine._owner) == []
