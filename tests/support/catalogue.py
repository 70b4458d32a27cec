"""One tiny checkpoint for each architecture of the table in `docs/architectures.md`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.checkpoints import CHECKPOINTS, FURTHER, written

__all__ = ["CATALOGUE", "Entry"]


@dataclass(frozen=True)
class Entry:
    """An architecture, and how its checkpoint is run.

    Attributes:
        title: what people call it.
        config: `model_type`, `architectures` and the other fields of the configuration.
        dtype: of the engine.
        tolerance: relative error of a row; None for the default of the dtype.
        apart: run the engine in a process of its own, since vLLM changes classes of transformers
            where it runs their code.
        native_rotary: have vLLM rotate by its code in PyTorch, not by its kernel.
        note: what a reader of the table should know.
    """

    title: str
    config: Mapping[str, Any]
    dtype: str = "float32"
    tolerance: float | None = None
    apart: bool = False
    native_rotary: bool = False
    note: str = ""

    @property
    def architecture(self) -> str:
        """The class that vLLM looks up."""
        return str(self.config["architectures"][0])

    def checkpoint(self) -> Path:
        """Folder of the tiny checkpoint, written on first use."""
        return written(f"M-{self.config['model_type']}", self.config)


def _config(model_type: str, architecture: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    return {**fields, "model_type": model_type, "architectures": [architecture]}


def _without(fields: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in names}


_ENDS = {"vocab_size": 128, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
_WIDE = _without(CHECKPOINTS["T-LLAMA"], "architectures", "model_type")  # heads wider than usual
_UNTIED = {"tie_word_embeddings": False}
_FLAT = {  # heads as wide as the hidden size over their number
    **_without(_WIDE, "head_dim"),
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
_PARTLY = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
_NO_ROPE = _without(_WIDE, "rope_parameters")
_TWO_KINDS = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 32}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ROUTED = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_LATENT = {
    **_FLAT,
    **_ROUTED,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_FACTORS = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.2,
    "logits_scaling": 2.0,
}
_LINEAR = {
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
_GEMMA = {**_WIDE, "tie_word_embeddings": True}
_OLD = {**_ENDS, "n_embd": 128, "n_head": 2, "n_layer": 4, "n_positions": 1024}

_BF16 = (
    "vLLM's linear attention on a CPU takes bfloat16 only; differences were not told apart from "
    "its rounding"
)
_MLA = (
    "run with vLLM's rotary code in PyTorch: its kernel for CPUs turns queries of the form "
    "[tokens, heads, size] wrongly, so that there plain vLLM is wrong too"
)
_PLAIN = "on this checkpoint plain vLLM's logits are not HuggingFace's either"
_EXACT_GELU = "vLLM computes the exact GELU, HuggingFace its approximation by tanh"
_XIELU = "vLLM keeps the activation's parameters in bfloat16"


def _entries() -> Iterator[Entry]:
    yield from _dense()
    yield from _gemmas()
    yield from _parallel()
    yield from _experts()
    yield from _hybrids()
    yield from _elsewhere()


def _dense() -> Iterator[Entry]:
    yield Entry("GPT-2", CHECKPOINTS["T-GPT2"])
    yield Entry("Llama", CHECKPOINTS["T-LLAMA"])
    yield Entry("Mistral", _config("mistral", "MistralForCausalLM", _WIDE))
    yield Entry(
        "Qwen2", _config("qwen2", "Qwen2ForCausalLM", {**_FLAT, "tie_word_embeddings": True})
    )
    yield Entry("Qwen3", CHECKPOINTS["T-QWEN3"])
    yield Entry("Phi-3", _config("phi3", "Phi3ForCausalLM", _FLAT))
    yield Entry(
        "OPT",
        _config(
            "opt",
            "OPTForCausalLM",
            {
                **_without(_FLAT, "num_key_value_heads", "intermediate_size", "rope_parameters"),
                "ffn_dim": 256,
                "word_embed_proj_dim": 128,
            },
        ),
    )
    yield Entry("GLM-4", _config("glm4", "Glm4ForCausalLM", _WIDE))
    yield Entry("Nemotron", _config("nemotron", "NemotronForCausalLM", _WIDE))
    yield Entry("Granite", _config("granite", "GraniteForCausalLM", {**_FLAT, **_FACTORS}))
    yield Entry(
        "StableLM",
        _config("stablelm", "StableLmForCausalLM", {**_FLAT, "rope_parameters": _PARTLY}),
    )
    yield Entry(
        "EXAONE 4",
        _config(
            "exaone4",
            "Exaone4ForCausalLM",
            {
                **_WIDE,
                "sliding_window": 32,
                "sliding_window_pattern": 4,
                "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
            },
        ),
    )
    yield Entry("ERNIE 4.5", _config("ernie4_5", "Ernie4_5ForCausalLM", _WIDE))
    yield Entry(
        "Apertus",
        _config("apertus", "ApertusForCausalLM", _FLAT),
        tolerance=1e-2,
        note=_XIELU,
    )
    yield Entry(
        "BLOOM",
        _config(
            "bloom", "BloomForCausalLM", {**_ENDS, "hidden_size": 128, "n_head": 2, "n_layer": 4}
        ),
        tolerance=1e-3,
        note=_EXACT_GELU,
    )


def _gemmas() -> Iterator[Entry]:
    yield Entry("Gemma", _config("gemma", "GemmaForCausalLM", _GEMMA))
    yield Entry("Gemma 2", FURTHER["T-GEMMA2"])
    no_rope = {**_NO_ROPE, "tie_word_embeddings": True, **_TWO_KINDS}
    yield Entry(
        "Gemma 3",
        _config("gemma3_text", "Gemma3ForCausalLM", {**no_rope, "query_pre_attn_scalar": 64}),
    )
    yield Entry(
        "Gemma 3n",
        _config(
            "gemma3n_text",
            "Gemma3nForCausalLM",
            {
                **no_rope,
                "num_kv_shared_layers": 2,
                "vocab_size_per_layer_input": 128,
                "hidden_size_per_layer_input": 64,
                "laurel_rank": 16,
                "altup_num_inputs": 4,
                "activation_sparsity_pattern": [0.0] * 4,
            },
        ),
        note=_PLAIN,
    )


def _parallel() -> Iterator[Entry]:
    yield Entry(
        "Falcon",
        _config(
            "falcon",
            "FalconForCausalLM",
            {
                **_without(_FLAT, "num_key_value_heads", "intermediate_size"),
                "multi_query": True,
                "new_decoder_architecture": False,
                "parallel_attn": True,
                "bias": False,
                "alibi": False,
            },
        ),
    )
    yield Entry(
        "GPT-J",
        _config(
            "gptj", "GPTJForCausalLM", {**_OLD, "rotary_dim": 32, "tie_word_embeddings": False}
        ),
    )
    cohere = {"tie_word_embeddings": True, "logit_scale": 0.25}
    yield Entry("Cohere", _config("cohere", "CohereForCausalLM", {**_FLAT, **cohere}))
    yield Entry(
        "Cohere2",
        _config("cohere2", "Cohere2ForCausalLM", {**_WIDE, **cohere, "sliding_window": 32}),
    )


def _experts() -> Iterator[Entry]:
    yield Entry("Mixtral", FURTHER["T-MIXTRAL"])
    yield Entry(
        "Qwen2-MoE",
        _config(
            "qwen2_moe",
            "Qwen2MoeForCausalLM",
            {**_FLAT, **_EXPERTS, "shared_expert_intermediate_size": 64},
        ),
    )
    yield Entry("Qwen3-MoE", _config("qwen3_moe", "Qwen3MoeForCausalLM", {**_WIDE, **_EXPERTS}))
    yield Entry("OLMoE", _config("olmoe", "OlmoeForCausalLM", {**_FLAT, **_EXPERTS}))
    yield Entry(
        "Granite-MoE",
        _config("granitemoe", "GraniteMoeForCausalLM", {**_FLAT, **_FACTORS, **_LOCAL_EXPERTS}),
    )
    yield Entry("GLM-4-MoE", _config("glm4_moe", "Glm4MoeForCausalLM", {**_WIDE, **_ROUTED}))
    yield Entry(
        "gpt-oss",
        _config("gpt_oss", "GptOssForCausalLM", {**_NO_ROPE, **_LOCAL_EXPERTS, **_TWO_KINDS}),
    )
    yield Entry(
        "Llama 4",
        _config(
            "llama4_text",
            "Llama4ForCausalLM",
            {
                **_WIDE,
                "num_local_experts": 4,
                "num_experts_per_tok": 1,
                "intermediate_size_mlp": 256,
                "interleave_moe_layer_step": 2,
                "attention_chunk_size": 64,
                "layer_types": ["chunked_attention", "full_attention"] * 2,
            },
        ),
    )
    yield Entry(
        "DeepSeek-V2",
        _config("deepseek_v2", "DeepseekV2ForCausalLM", _LATENT),
        native_rotary=True,
        note=_MLA,
    )
    yield Entry(
        "DeepSeek-V3",
        _config(
            "deepseek_v3",
            "DeepseekV3ForCausalLM",
            {**_LATENT, "q_lora_rank": 64, "topk_method": "noaux_tc"},
        ),
        native_rotary=True,
        note=f"{_MLA}; {_PLAIN}",
    )


def _hybrids() -> Iterator[Entry]:
    yield Entry("Qwen3-Next", FURTHER["T-HYBRID"], dtype="bfloat16", note=_BF16)
    yield Entry(
        "Qwen3.5",
        _config("qwen3_5_text", "Qwen3_5ForCausalLM", {**_WIDE, **_LINEAR}),
        dtype="bfloat16",
        note="vLLM's definition imports torchvision, which the CPU environment has not",
    )
    yield Entry(
        "Mamba-2",
        _config(
            "mamba2",
            "Mamba2ForCausalLM",
            {
                **_ENDS,
                "hidden_size": 128,
                "num_hidden_layers": 4,
                "head_dim": 64,
                "num_heads": 4,
                "state_size": 64,
                "expand": 2,
                "n_groups": 1,
            },
        ),
    )
    yield Entry(
        "LFM2",
        _config(
            "lfm2",
            "Lfm2ForCausalLM",
            {
                **_FLAT,
                "block_multiple_of": 64,
                "layer_types": ["conv", "full_attention"] * 2,
                "conv_L_cache": 3,
                "conv_dim": 128,
                "conv_dim_out": 128,
                "block_dim": 128,
                "block_ff_dim": 256,
            },
        ),
        note=_PLAIN,
    )


def _elsewhere() -> Iterator[Entry]:
    """Architectures without a definition of vLLM's own any more."""
    for title, model_type, name in (
        ("StarCoder2", "starcoder2", "Starcoder2ForCausalLM"),
        ("OLMo", "olmo", "OlmoForCausalLM"),
        ("OLMo 2", "olmo2", "Olmo2ForCausalLM"),
    ):
        yield Entry(title, _config(model_type, name, _FLAT), apart=True)
    yield Entry(
        "GPT-NeoX",
        _config(
            "gpt_neox",
            "GPTNeoXForCausalLM",
            {**_without(_FLAT, "num_key_value_heads"), "rope_parameters": _PARTLY},
        ),
        apart=True,
    )
    yield Entry(
        "MPT",
        _config(
            "mpt",
            "MptForCausalLM",
            {
                "vocab_size": 128,
                "d_model": 128,
                "n_heads": 2,
                "n_layers": 4,
                "expansion_ratio": 2,
                "max_seq_len": 1024,
            },
        ),
        note="vLLM dropped it in 0.28",
    )


CATALOGUE: Mapping[str, Entry] = {entry.title: entry for entry in _entries()}
"""The architectures by title, in the order of the table."""
