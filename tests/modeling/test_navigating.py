"""A module held as a model, without any engine."""

from __future__ import annotations

import pytest
import torch

from midstream.errors import NotInTraceError
from midstream.modeling.navigating import Navigable
from tests.interleaving.toy import Toy


def test_any_module_can_be_held() -> None:
    """A ready module is navigated, renamed and printed as one of an engine is (A4)."""
    module = Toy()
    model = Navigable(module, rename={"layers": "blocks"})
    assert model.blocks[1].mlp is model.get("layers.1.mlp")
    assert model.tree.modules["layers.1.mlp"] is module.layers[1].mlp
    assert torch.equal(model.head.weight, module.head.weight)
    assert repr(model).startswith("Toy(\n  (layers, blocks): ModuleList(")
    with pytest.raises(NotInTraceError, match="`output` of 'head'"):
        model.head.output
