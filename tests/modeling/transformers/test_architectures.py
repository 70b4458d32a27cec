"""Decoders that are built unlike most: each module is met as often as it runs, with its values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import transformers

from midstream import TransformersModel
from tests.support.checkpoints import A
from tests.support.hooking import first, hooked, leftovers, reading

_SIZES = {"vocab_size": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_LAYERS = {
    **_SIZES,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 64,
}
BUILDS: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "MPT": (
        "MptForCausalLM",
        "transformer.blocks",
        {"vocab_size": 128, "d_model": 32, "n_heads": 4, "n_layers": 3, "max_seq_len": 64},
    ),
    "GPT-OSS": (
        "GptOssForCausalLM",
        "model.layers",
        {**_LAYERS, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "Mamba": (
        "MambaForCausalLM",
        "backbone.layers",
        {**_SIZES, "hidden_size": 32, "num_hidden_layers": 3, "state_size": 4},
    ),
}
"""Class, path of the layers and configuration."""


@pytest.fixture(params=BUILDS)
def built(request: pytest.FixtureRequest) -> tuple[Any, TransformersModel, str]:
    """Module, model and path of the layers."""
    name, layers, fields = BUILDS[request.param]
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    module = kind(kind.config_class(**fields)).float().eval()
    return module, TransformersModel(module), layers


def test_layers_are_met_once_with_their_values(
    built: tuple[Any, TransformersModel, str],
) -> None:
    """Each layer is one event of a forward, bit for bit what a hook sees (case 72, case 74)."""
    module, model, layers = built
    paths = [f"{layers}.{index}" for index in range(3)]
    with torch.no_grad(), reading(module, *paths) as seen:
        logits = module(torch.tensor([A])).logits
    with torch.no_grad(), model.trace(A) as tracer:
        cache = tracer.cache(modules=paths).save()
    kept = [cache[f"model.{path}"].output for path in paths]
    right = [first(seen[path][0]) for path in paths]
    assert [len(seen[path]) for path in paths] == [1, 1, 1]
    assert not any(isinstance(each, list) for each in kept)  # one event, not several
    assert all(torch.equal(first(each), hook) for each, hook in zip(kept, right, strict=True))
    assert not torch.equal(right[0], right[1])
    assert torch.equal(tracer.result.logits, logits)
    assert leftovers(module) == []


def test_an_edit_in_each_step(built: tuple[Any, TransformersModel, str]) -> None:
    """Edits of a generation are those of a hook, and change its tokens (case 74)."""
    module, model, layers = built
    path, ids = f"{layers}.1", torch.tensor([A])
    mask = torch.ones_like(ids)
    vector = torch.randn(32, generator=torch.Generator().manual_seed(3))

    def steered(output: Any) -> None:
        first(output).add_(vector)

    plain = module.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False)
    with hooked(module, {path: steered}):
        right = module.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False)
    with model.generate(A, max_new_tokens=4) as tracer:
        for _ in tracer.iter[:]:
            first(model.get(path).output)[:] += vector
    assert torch.equal(tracer.result, right)
    assert right.tolist() != plain.tolist()
