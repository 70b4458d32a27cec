"""The tree without weights, beside the engine that is built from the same checkpoint."""

from __future__ import annotations

from typing import Any

import pytest
from torch import distributed

from midstream import VLLM
from midstream.modeling.vllm import bootstrap, meta
from tests.conftest import TINY
from tests.modeling.vllm.conftest import model_of
from tests.support.checkpoints import checkpoint


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
