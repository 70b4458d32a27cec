"""Tiny random checkpoints of kinds that vLLM does not serve as text: encoders, images, audio.

Weights are drawn as in `checkpoints`, wide enough that a wrong tensor does not pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from tests.support.checkpoints import NORM_GAIN, SEED, WEIGHT_STD

__all__ = ["KINDS", "random_model", "save", "word_tokenizer", "word_vocabulary"]

WORDS = 128
IMAGE = WORDS
"""Id of the image placeholder of T-LLAVA; its text ids are those below."""

_SIZES = {"vocab_size": WORDS, "pad_token_id": 3, "bos_token_id": 0, "eos_token_id": 1}
_LAYERS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_BERT = {**_SIZES, **_LAYERS, "intermediate_size": 64, "max_position_embeddings": 64}
_LLAMA = {
    **_SIZES,
    **_LAYERS,
    "intermediate_size": 64,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
_VISION = {**_LAYERS, "intermediate_size": 64, "image_size": 16, "patch_size": 4}
_GROUPED = {
    **_LLAMA,
    "num_hidden_layers": 4,
    "head_dim": 8,
}
_SEQ2SEQ = {
    **_SIZES,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
}

KINDS: Mapping[str, tuple[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "T-BERT": ("BertForMaskedLM", _BERT),
        "T-BERT-CLASSES": ("BertForSequenceClassification", {**_BERT, "num_labels": 3}),
        "T-LLAMA-CLASSES": ("LlamaForSequenceClassification", {**_LLAMA, "num_labels": 3}),
        "T-BLOOM": ("BloomForCausalLM", {**_SIZES, **_LAYERS}),
        "T-NEOX": (
            "GPTNeoXForCausalLM",
            {**_SIZES, **_LAYERS, "intermediate_size": 64, "max_position_embeddings": 64},
        ),
        "T-GRANITE": (
            "GraniteForCausalLM",
            {
                **_GROUPED,
                "embedding_multiplier": 3.0,
                "residual_multiplier": 0.6,
                "attention_multiplier": 0.5,
                "logits_scaling": 2.0,
            },
        ),
        "T-GEMMA3N": (  # the last two layers use the keys and values of the first two
            "Gemma3nForCausalLM",
            {
                **_GROUPED,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "num_kv_shared_layers": 2,
                "intermediate_size": [64] * 4,
                "activation_sparsity_pattern": [0.0] * 4,
                "vocab_size_per_layer_input": WORDS,
                "hidden_size_per_layer_input": 8,
                "laurel_rank": 4,
                "altup_num_inputs": 2,
            },
        ),
        "T-T5": (
            "T5ForConditionalGeneration",
            {
                **_SIZES,
                "d_model": 32,
                "d_kv": 8,
                "d_ff": 64,
                "num_layers": 2,
                "num_heads": 4,
                "decoder_start_token_id": 3,
            },
        ),
        "T-BART": (
            "BartForConditionalGeneration",
            {**_SEQ2SEQ, "max_position_embeddings": 64, "decoder_start_token_id": 1},
        ),
        "T-VIT": ("ViTForImageClassification", {**_VISION, "num_labels": 3}),
        "T-WHISPER": (
            "WhisperForConditionalGeneration",
            {
                **_SEQ2SEQ,
                "num_mel_bins": 8,
                "max_source_positions": 50,
                "max_target_positions": 32,
                "decoder_start_token_id": 5,
                "suppress_tokens": None,
                "begin_suppress_tokens": None,
            },
        ),
        "T-LLAVA": (
            "LlavaForConditionalGeneration",
            {
                "vision_config": {**_VISION, "model_type": "clip_vision_model"},
                "text_config": {**_LLAMA, "vocab_size": WORDS + 1, "model_type": "llama"},
                "image_token_id": IMAGE,
                "image_seq_length": 16,
                "vision_feature_select_strategy": "default",
                "vision_feature_layer": -1,
            },
        ),
        "T-QWEN3VL": (  # features of another width enter the first two text layers, projected
            "Qwen3VLForConditionalGeneration",
            {
                "text_config": {
                    **_GROUPED,
                    "vocab_size": WORDS + 1,
                    "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1]},
                },
                "vision_config": {
                    "depth": 2,
                    "hidden_size": 48,
                    "intermediate_size": 64,
                    "num_heads": 4,
                    "patch_size": 4,
                    "temporal_patch_size": 1,
                    "out_hidden_size": 32,
                    "num_position_embeddings": 16,
                    "deepstack_visual_indexes": [0, 1],
                },
                "image_token_id": IMAGE,
            },
        ),
    }
)
"""Class and configuration of each kind, by its name."""


def random_model(name: str, **fields: Any) -> Any:
    """A model of `KINDS` with drawn weights, in fp32 and evaluation mode."""
    import transformers

    architecture, config = KINDS[name]
    kind = getattr(transformers, architecture)
    model = kind(kind.config_class(**{**config, **fields})).float().eval()
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for path, weight in sorted(model.named_parameters()):
            if weight.ndim == 1 and not path.endswith("bias"):
                weight.uniform_(*NORM_GAIN, generator=generator)
            else:
                weight.normal_(std=WEIGHT_STD, generator=generator)
    return model


def save(name: str, folder: Path, **fields: Any) -> Path:
    """Write a checkpoint of `KINDS` with all that belongs to it, and give its folder."""
    random_model(name, **fields).save_pretrained(folder)
    _BESIDE.get(name, _words)(folder)
    return folder


def word_vocabulary(count: int = WORDS) -> dict[str, int]:
    """The word ``t<i>`` for every id ``i``."""
    return {f"t{i}": i for i in range(count)}


def word_tokenizer(**special: Any) -> Any:
    """A tokenizer whose words are ``t0 t1 ...``; it has no padding token unless one is given."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {**word_vocabulary(), "<image>": IMAGE}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="t2"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"bos_token": "t0", "eos_token": "t1", "unk_token": "t2", **special}
    tokens = {
        key: AddedToken(word, single_word=True) if isinstance(word, str) else word
        for key, word in names.items()
    }
    made = PreTrainedTokenizerFast(tokenizer_object=words, **tokens)
    made.chat_template = (
        "{% for m in messages %}t9 {% if m['content'] is string %}{{ m['content'] }} "
        "{% else %}{% for c in m['content'] %}"
        "{% if c['type'] == 'image' %}<image> {% else %}{{ c['text'] }} {% endif %}"
        "{% endfor %}{% endif %}{% endfor %}{% if add_generation_prompt %}t8{% endif %}"
    )
    return made


def _words(folder: Path) -> None:
    word_tokenizer(pad_token="t3").save_pretrained(folder)


def _image_processor() -> Any:
    from transformers import CLIPImageProcessorPil

    size = {"height": 16, "width": 16}
    return CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size=size)


def _images(folder: Path) -> None:
    from transformers import ViTImageProcessorPil

    ViTImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(folder)


def _images_and_text(folder: Path) -> None:
    from transformers import LlavaProcessor

    tokenizer = word_tokenizer(pad_token="t3", additional_special_tokens=["<image>"])
    LlavaProcessor(
        image_processor=_image_processor(),
        tokenizer=tokenizer,
        patch_size=4,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token="<image>",
        chat_template=tokenizer.chat_template,
    ).save_pretrained(folder)


def _audio(folder: Path) -> None:
    from transformers import WhisperFeatureExtractor

    _words(folder)
    made = WhisperFeatureExtractor(
        feature_size=8, chunk_length=1, n_fft=400, hop_length=160, sampling_rate=16000
    )
    made.save_pretrained(folder)


_BESIDE: Mapping[str, Callable[[Path], None]] = MappingProxyType(
    {"T-VIT": _images, "T-LLAVA": _images_and_text, "T-WHISPER": _audio}
)
