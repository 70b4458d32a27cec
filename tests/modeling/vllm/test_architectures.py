"""Module trees of architectures beyond the tiny checkpoints, each from its configuration alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from midstream import VLLM
from tests.conftest import TINY

SMALL = {"hidden_size": 128, "num_hidden_layers": 4, "vocab_size": 128}
GROUPED = {**SMALL, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 256}
EXPERTS = {"moe_intermediate_size": 64, "num_experts_per_tok": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "BloomForCausalLM": {
        "model_type": "bloom",
        "hidden_size": 128,
        "n_head": 2,
        "n_layer": 2,
        "vocab_size": 128,
    },
    "DeepseekV2ForCausalLM": {
        **GROUPED,
        **EXPERTS,
        "model_type": "deepseek_v2",
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "max_position_embeddings": 512,
    },
    "Qwen3NextForCausalLM": {
        **GROUPED,
        **EXPERTS,
        "model_type": "qwen3_next",
        "head_dim": 64,
        "num_experts": 4,
        "shared_expert_intermediate_size": 64,
        "linear_num_value_heads": 2,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
    },
}


@pytest.fixture
def tree(request: pytest.FixtureRequest, tmp_path: Path, llama: Any) -> VLLM:
    """The tree of an architecture, by its name in vLLM; an engine without experts is up."""
    name = request.param
    config = {**CONFIGS[name], "architectures": [name]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return VLLM(str(tmp_path), skip_tokenizer_init=True, **TINY)


@pytest.mark.parametrize("tree", ["BloomForCausalLM"], indirect=True)
def test_model_that_reads_a_table_while_it_is_built(tree: VLLM) -> None:
    """A model with ALiBi reads its slopes back when it is built, and has a tree too (A14)."""
    assert tree.transformer.h[1].self_attention.attn.path == "transformer.h.1.self_attention.attn"
    assert tree.lm_head.weight.is_meta


@pytest.mark.parametrize("tree", ["DeepseekV2ForCausalLM"], indirect=True)
def test_latent_attention_has_its_own_projections(tree: VLLM) -> None:
    """DeepSeek's attention has no fused q, k and v but a latent's projections (B32)."""
    attention = tree.model.layers[0].self_attn
    names = {path.rpartition(".")[2] for path, _ in attention.named_modules()}
    assert {"q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"} <= names
    assert "qkv_proj" not in names
    assert attention.q_proj.path == "model.layers.0.self_attn.q_proj"
    assert attention.mla_attn.q_proj is attention.q_proj


@pytest.mark.parametrize("tree", ["Qwen3NextForCausalLM"], indirect=True)
def test_layers_of_a_hybrid_have_one_kind_of_attention(tree: VLLM) -> None:
    """Three of four layers carry linear attention, the fourth full attention (B33)."""
    kinds = [
        [name for name in ("linear_attn", "self_attn") if hasattr(layer, name)]
        for layer in tree.model.layers
    ]
    assert kinds == [["linear_attn"]] * 3 + [["self_attn"]]
    with pytest.raises(AttributeError, match="Its submodules: linear_attn, mlp"):
        tree.model.layers[0].self_attn
