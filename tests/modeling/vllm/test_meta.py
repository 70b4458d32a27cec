"""The tree without weights, beside the engine that is built from the same checkpoint."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import distributed

from midstream import VLLM
from midstream.modeling.vllm import bootstrap, meta
from tests.conftest import TINY
from tests.modeling.vllm.conftest import model_of
from tests.support.catalogue import CATALOGUE
from tests.support.checkpoints import A, checkpoint


def path() -> str:
    """A checkpoint's folder."""
    return str(checkpoint("T-LLAMA", with_tokenizer=True))


def test_tree_is_that_of_one_rank() -> None:
    """Whatever parallel sizes an engine has, the tree's layers are whole (A11)."""
    with bootstrap.environment({}):  # vLLM sets variables of the process
        root, _ = meta.build(path(), {**TINY, "tensor_parallel_size": 2})
    assert "tp_size=1" in repr(root.model.layers[0].self_attn.qkv_proj)
    assert root.model.layers[0].self_attn.qkv_proj.weight.shape == (512, 128)


def test_a_tree_leaves_an_engine_its_parts(llama: Any) -> None:
    """Built beside an engine, a tree takes neither its process group nor its rotary embedding.

    (A12, A15).
    """
    from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT

    shared, group = dict(_ROPE_DICT), distributed.group.WORLD
    tree = VLLM(path(), **TINY)
    assert shared == _ROPE_DICT
    assert distributed.group.WORLD is group
    modules = model_of(llama)
    assert not any(t.is_meta for t in (*modules.parameters(), *modules.buffers()))
    ours = tree.tree.modules["model.layers.0.self_attn.rotary_emb"]
    assert all(buffer.is_meta for buffer in ours.buffers())
    assert ours not in _ROPE_DICT.values()


@pytest.mark.parametrize("value", ["1", "true"])
def test_the_runner_that_is_used_may_be_asked_for(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    """Selecting the second model runner by hand is no error (O2, G9)."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", value)
    assert not VLLM(path(), **TINY).dispatched


def test_a_tree_leaves_classes_of_transformers_alone() -> None:
    """An architecture that vLLM runs by transformers' code can be loaded on HuggingFace beside it.

    (H1, B11).
    """
    model = VLLM(str(CATALOGUE["OLMo 2"].checkpoint()), skip_tokenizer_init=True, **TINY)
    assert "transformers" in type(model.tree.modules[""]).__module__
    local = model.transformers(dtype=torch.float32)
    with local.trace(A):
        stream = local.model.layers[1].output.save()
    assert stream.shape == (1, len(A), 128)


def test_what_a_definition_makes_on_import_has_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """A definition that is first imported for the tree keeps the tensors it makes on the CPU."""
    name = "vllm.model_executor.models.gemma3n"
    monkeypatch.delitem(sys.modules, name, raising=False)
    VLLM(str(CATALOGUE["Gemma 3n"].checkpoint()), skip_tokenizer_init=True, **TINY)
    assert not sys.modules[name].EPS.is_meta


def test_a_model_that_reads_a_number_while_it_is_built_has_a_tree() -> None:
    """An activation that takes its own parameters out as numbers is no obstacle (A14)."""
    model = VLLM(str(CATALOGUE["Apertus"].checkpoint()), skip_tokenizer_init=True, **TINY)
    assert model.model.layers[3].mlp.path == "model.layers.3.mlp"
