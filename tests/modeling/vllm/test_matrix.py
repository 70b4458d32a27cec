"""Architectures unlike those of the other tests, each compared with HuggingFace's forward."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest

from midstream import VLLM
from midstream.modeling.vllm.checking.report import Check
from tests.conftest import TINY
from tests.support.catalogue import CATALOGUE, Entry
from tests.support.groups import give_experts_a_group
from tests.support.rotary import rotate_in_pytorch

LAYERS = 4
FORMS = {  # what the stream leaving a layer is, and how many layers have a router
    "Falcon": ("layer.output", 0),  # attention and MLP side by side
    "StableLM": ("layer.output[0]", 0),  # a pair whose second element is left over
    "GLM-4": ("sum(layer.output)", 0),  # norms behind attention and MLP
    "Qwen3-MoE": ("sum(layer.output)", LAYERS),
    "DeepSeek-V2": ("sum(layer.output)", LAYERS - 1),  # latent attention; one layer is dense
}


def checked(entry: Entry) -> Check:
    """The check of an engine on the architecture's checkpoint."""
    give_experts_a_group()
    path, settings = str(entry.checkpoint()), {**TINY, "skip_tokenizer_init": True}
    with VLLM(path, dispatch=True, **settings) as model:
        if entry.native_rotary:
            rotate_in_pytorch(model)
        found: Any = model.check(tolerance=entry.tolerance)
    return found


@pytest.mark.parametrize("title", FORMS)
def test_reads_and_writes_are_huggingfaces(title: str) -> None:
    """Stream, attention and MLP of each layer, routers, norm, logits and writes are equal.

    (B16, B22, B25, B30, B32, case 100).
    """
    check = checked(CATALOGUE[title])
    check.raise_for_failure()
    form, routers = FORMS[title]
    assert check.stream == form
    names = [re.fullmatch(r"(\w+) \d+", row.name) for row in check]
    kinds = Counter(found[1] for found in names if found)
    wanted = {"stream": LAYERS, "attention": LAYERS, "mlp": LAYERS, "router": routers}
    assert +kinds == +Counter(wanted)
    writes = [row.name for row in check if " = 0" in row.name or "steered" in row.name]
    assert len(writes) == 2
    assert any("ablated" in row.name for row in check) == bool(routers)
    assert {"final norm", "logits"} <= {row.name for row in check}
