"""Tiny random checkpoints that vLLM and transformers both load, and the prompts used with them.

The weights are wide on purpose (standard deviation 0.15, norm gains 0.5 to 1.5, biases that are
not zero): with the usual small initialisation every layer is nearly the identity, and a test that
reads the wrong tensor passes.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

__all__ = [
    "CHECKPOINTS",
    "EOS",
    "FURTHER",
    "LONG",
    "A",
    "B",
    "C",
    "checkpoint",
    "default_root",
    "written",
]

A = [11, 12, 13, 14, 15]
B = [21, 22, 23]
C = list(range(31, 40))
LONG = [(7 * i) % 90 + 5 for i in range(300)]

EOS = 1
"""End-of-sequence and padding token of every checkpoint; greedy decoding never takes it."""

SEED = 20
WEIGHT_STD = 0.15
NORM_GAIN = (0.5, 1.5)

_COMMON = {"architectures": None, "bos_token_id": 0, "eos_token_id": EOS, "pad_token_id": EOS}
_GROUPED_QUERY = {
    **_COMMON,
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,  # not hidden_size / heads: code that derives it is caught
    "max_position_embeddings": 1024,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
}
_ABSOLUTE_POSITIONS = {
    **_COMMON,
    "vocab_size": 101,  # not a multiple of 64: vLLM pads the embedding and the head
    "n_embd": 128,
    "n_head": 2,
    "n_layer": 4,
    "n_positions": 1024,
    "tie_word_embeddings": True,
}

CHECKPOINTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "T-LLAMA": {**_GROUPED_QUERY, "model_type": "llama", "architectures": ["LlamaForCausalLM"]},
        "T-QWEN3": {**_GROUPED_QUERY, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
        "T-GPT2": {
            **_ABSOLUTE_POSITIONS,
            "model_type": "gpt2",
            "architectures": ["GPT2LMHeadModel"],
        },
    }
)
"""Configuration of each checkpoint by its name."""

FURTHER: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "T-MQA": {
            **_GROUPED_QUERY,
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "num_key_value_heads": 1,  # fewer than ranks: each has a copy of the keys
        },
        "T-MIXTRAL": {
            **_GROUPED_QUERY,
            "model_type": "mixtral",
            "architectures": ["MixtralForCausalLM"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
        "T-HYBRID": {
            **_GROUPED_QUERY,
            "model_type": "qwen3_next",
            "architectures": ["Qwen3NextForCausalLM"],
            "layer_types": ["linear_attention"] * 3 + ["full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
        },
        "T-GEMMA2": {
            **_GROUPED_QUERY,
            "model_type": "gemma2",
            "architectures": ["Gemma2ForCausalLM"],
            "tie_word_embeddings": True,
            "query_pre_attn_scalar": 64,
            "sliding_window": 32,
            "attn_logit_softcapping": 2.0,  # both caps are low enough to bite
            "final_logit_softcapping": 3.0,
        },
    }
)
"""Checkpoints for what is special about them, without a table of their locations."""


def default_root() -> Path:
    """Return the user's cache folder for checkpoints; it need not exist yet."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "midstream" / "test-checkpoints"


def checkpoint(name: str, root: Path | None = None, *, with_tokenizer: bool = False) -> Path:
    """Return the folder of the tiny fp32 checkpoint `name`, written on first use.

    Args:
        name: a key of `CHECKPOINTS` or `FURTHER`.
        root: the folder to keep checkpoints in; `default_root()` when left out.
        with_tokenizer: also write a tokenizer whose words are ``t0 t1 ...``, word ``t<i>`` being
            token ``i``. As a stop string ``t8`` also stops at ``t84``, as on any tokenizer.

    Raises:
        KeyError: `name` is a key neither of `CHECKPOINTS` nor of `FURTHER`.
    """
    config = (CHECKPOINTS if name in CHECKPOINTS else FURTHER)[name]
    return written(name, config, root, with_tokenizer=with_tokenizer)


def written(
    name: str, config: Mapping[str, Any], root: Path | None = None, *, with_tokenizer: bool = False
) -> Path:
    """As ``checkpoint``, of a configuration: its `model_type`, `architectures` and fields."""
    folder = (root or default_root()) / _folder_name(name, config, with_tokenizer)
    if not folder.exists():
        _write_atomically(folder, partial(_write, config=config, with_tokenizer=with_tokenizer))
    return folder


def _folder_name(name: str, config: Mapping[str, Any], with_tokenizer: bool) -> str:
    """Name a folder by everything its content depends on, this file's code included."""
    code = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    drawn = [code, SEED, version("transformers"), version("torch")]
    recipe = json.dumps([name, config, with_tokenizer, drawn], sort_keys=True)
    return f"{name}-{hashlib.sha256(recipe.encode()).hexdigest()[:16]}"


def _write_atomically(folder: Path, write: Callable[[Path], None]) -> None:
    """Fill `folder` so that no other process ever sees it half written."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial_folder = Path(tempfile.mkdtemp(prefix=".partial-", dir=folder.parent))
    try:
        write(partial_folder)
        partial_folder.rename(folder)
    except OSError:
        if not folder.exists():  # else another process was first, with the same content
            raise
    finally:
        shutil.rmtree(partial_folder, ignore_errors=True)


def _write(folder: Path, config: Mapping[str, Any], with_tokenizer: bool) -> None:
    """Write configuration, weights, generation configuration and, if asked, the tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = copy.deepcopy(dict(config))  # some configurations fill in what they are given
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(fields.pop("model_type"), **fields), dtype=torch.float32
    )
    _draw_weights(model)
    model.save_pretrained(folder)
    if with_tokenizer:
        _write_tokenizer(folder, config["vocab_size"])


@torch.no_grad()
def _draw_weights(model: Any) -> None:
    """Overwrite every parameter, in the order of their names, from one seeded generator."""
    generator = torch.Generator().manual_seed(SEED)
    for name, parameter in sorted(model.named_parameters()):
        if parameter.ndim == 1 and not name.endswith("bias"):
            parameter.uniform_(*NORM_GAIN, generator=generator)
        else:
            parameter.normal_(std=WEIGHT_STD, generator=generator)
    # Its logit is 0 and never the largest: no request ends before a test makes it end.
    model.get_output_embeddings().weight[EOS] = 0.0


def _write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write a tokenizer that maps the word ``t<i>`` to token ``i``."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(vocab_size)}, unk_token="t2"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"bos_token": "t0", "eos_token": f"t{EOS}", "unk_token": "t2", "pad_token": f"t{EOS}"}
    # single_word, else the special token t1 is found inside the word t11
    special = {key: AddedToken(word, single_word=True) for key, word in names.items()}
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)
