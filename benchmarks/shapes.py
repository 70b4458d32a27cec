"""What the GPU benchmark runs: the model's folder, engine arguments, sizes and prompts."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

QWEN3_8B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}
"""Configuration of the measured model, whose weights are drawn at random."""

_RESERVED = 5  # ids below this are special tokens


@dataclass(frozen=True)
class Scale:
    """How large everything is.

    Attributes:
        batches: requests at a time, ascending.
        prompt, tokens: lengths of a decoding row's prompts and answers.
        medium, long: lengths of the prompts of rows that answer with one token.
        long_batches: requests at a time that return all layers of a long prompt.
        many: requests of the row with one token each.
        medium_repeats: how often the row of one medium prompt is run.
        in_flight, arrivals: requests that run on average, and that come after the first ones.
        sizes: batch sizes whose graphs are counted.
        vocabulary: token ids of the model.
    """

    batches: tuple[int, ...]
    prompt: int = 64
    tokens: int = 128
    medium: int = 512
    long: int = 1024
    long_batches: tuple[int, ...] = (1, 8)
    many: int = 1024
    medium_repeats: int = 20
    in_flight: int = 32
    arrivals: int = 128
    sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 24, 32, 64)
    vocabulary: int = int(QWEN3_8B["vocab_size"])

    def prompts(self, count: int, length: int | None = None) -> list[list[int]]:
        """Different prompts of random token ids, the same ones in every process."""
        drawn = random.Random(f"{count} {length}")
        size = length or self.prompt
        return [
            [drawn.randrange(_RESERVED, self.vocabulary) for _ in range(size)] for _ in range(count)
        ]

    def greedy(self, tokens: int | None = None) -> dict[str, Any]:
        """Sampling settings of a row."""
        return {"temperature": 0.0, "max_tokens": tokens or self.tokens, "ignore_eos": True}


def full(batches: Sequence[int], tokens: int) -> Scale:
    """Sizes on a GPU."""
    return Scale(batches=tuple(sorted(batches)), tokens=tokens)


def tiny(batches: Sequence[int], tokens: int) -> Scale:
    """Sizes that a tiny model on a CPU does in seconds."""
    return Scale(
        batches=tuple(sorted(batches)),
        tokens=tokens,
        prompt=16,
        medium=32,
        long=64,
        long_batches=(1, 2),
        many=8,
        medium_repeats=3,
        in_flight=2,
        arrivals=6,
        sizes=(1, 2),
        vocabulary=128,
    )


def engine(*, is_tiny: bool) -> tuple[str, dict[str, Any]]:
    """Folder of the model, and the engine arguments that all modes share."""
    if is_tiny:
        from tests.support.checkpoints import checkpoint

        return str(checkpoint("T-LLAMA", with_tokenizer=True)), {
            "dtype": "float32",
            "max_model_len": 256,
            "block_size": 32,
            "max_num_seqs": 8,
            "kv_cache_memory_bytes": 1 << 28,
            "enable_prefix_caching": False,
            "enforce_eager": True,
        }
    return str(qwen3_8b()), {
        "dtype": "bfloat16",
        "load_format": "dummy",
        "max_model_len": 2048,
        "gpu_memory_utilization": 0.6,
        "enable_prefix_caching": False,
    }


def qwen3_8b() -> Path:
    """Folder with the configuration of Qwen3-8B and a tokenizer of words ``t0 t1 ...``."""
    from midstream.demo import cache_folder

    folder = cache_folder() / "qwen3-8b-shape"
    folder.mkdir(parents=True, exist_ok=True)
    _write_tokenizer(folder, int(QWEN3_8B["vocab_size"]))
    (folder / "config.json").write_text(json.dumps(QWEN3_8B, indent=1))
    return folder


def _write_tokenizer(folder: Path, vocabulary: int) -> None:
    """Write a tokenizer with a word for every token, since random weights draw any."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(vocabulary)}, unk_token="t2"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"bos_token": "t0", "eos_token": "t1", "unk_token": "t2", "pad_token": "t1"}
    PreTrainedTokenizerFast(tokenizer_object=words, **names).save_pretrained(folder)
