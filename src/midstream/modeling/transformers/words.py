"""Sampling words: those of both backends, and those that only one of them knows."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from types import MappingProxyType

ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "max_tokens": "max_new_tokens",
        "min_tokens": "min_new_tokens",
        "n": "num_return_sequences",
        "stop": "stop_strings",
    }
)
"""vLLM's names of settings that `generate` has by another name."""

PORTABLE = (
    "max_tokens",
    "max_new_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "n",
)
"""Words that mean the same on vLLM and here."""

VLLM_ONLY: Mapping[str, str] = MappingProxyType(
    {
        "allowed_token_ids": "pass prefix_allowed_tokens_fn=",
        "bad_words": "pass bad_words_ids=, lists of token ids",
        "detokenize": "decode the ids with model.tokenizer",
        "edits": "choose by tracing the edited model that model.edit() gives",
        "extra_args": "it carries settings into vLLM's engine, and there is none here",
        "flat_logprobs": "pass output_logits=True, return_dict_in_generate=True",
        "frequency_penalty": "pass repetition_penalty= or a logits_processor=",
        "include_stop_str_in_output": "decode the ids with model.tokenizer and cut the text",
        "logit_bias": "pass sequence_bias=",
        "logits_processors": "pass logits_processor=",
        "logprob_token_ids": "pass output_logits=True, return_dict_in_generate=True",
        "logprobs": "pass output_logits=True, return_dict_in_generate=True, or read the logits",
        "lora_request": "attach an adapter with peft= or model.load_adapter(...)",
        "output_kind": "read each step in a loop over tracer.iter",
        "presence_penalty": "pass repetition_penalty= or a logits_processor=",
        "output_text_buffer_length": "decode the ids with model.tokenizer",
        "prompt_logprob_start": "trace the prompt and read the logits of the tokens you want",
        "prompt_logprob_token_ids": "trace the prompt and read the logits of those tokens",
        "prompt_logprobs": "trace the prompt and read the logits of all its tokens",
        "repetition_detection": "pass a stopping_criteria=",
        "routed_experts_prompt_start": "trace the prompt and read the routers' outputs",
        "skip_clone": "settings are copied here anyway",
        "skip_reading_prefix_cache": "there is no prefix cache here",
        "skip_special_tokens": "decode the ids with model.tokenizer",
        "spaces_between_special_tokens": "decode the ids with model.tokenizer",
        "stream_interval": "read each step in a loop over tracer.iter",
        "structured_outputs": "pass prefix_allowed_tokens_fn= or a logits_processor=",
        "thinking_token_budget": "pass a stopping_criteria=",
        "trace_decode_token_ids": "save each step's tokens in a loop over tracer.iter",
        "truncate_prompt_tokens": "cut the prompt's ids yourself",
        "watermarking": "pass watermarking_config=",
    }
)
"""Words that exist on vLLM only, with what to do here."""


@functools.cache
def of_configuration() -> frozenset[str]:
    """Fields of `GenerationConfig`."""
    from transformers import GenerationConfig

    named = (name for name in GenerationConfig().to_dict() if not name.startswith("_"))
    return frozenset(named) - {"transformers_version"}


@functools.cache
def of_generate() -> frozenset[str]:
    """Keywords that `generate` itself takes, the fields of its configuration among them."""
    from transformers import GenerationMixin

    own = frozenset(inspect.signature(GenerationMixin.generate).parameters)
    beside = {"tokenizer", "assistant_tokenizer"}  # taken through its ``**kwargs``
    return (own | of_configuration() | beside) - {"self", "inputs", "kwargs"}
