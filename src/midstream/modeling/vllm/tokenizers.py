"""The tokenizer that the client's half and a block share."""

from __future__ import annotations

from typing import Any


def tokenizer_of(model_config: Any) -> Any:
    """The checkpoint's tokenizer as vLLM resolves it; None with `skip_tokenizer_init`.

    Where it has no padding token, the end-of-sequence token serves.
    """
    if model_config.skip_tokenizer_init:
        return None
    from vllm.tokenizers import cached_tokenizer_from_config

    tokenizer = cached_tokenizer_from_config(model_config)
    if getattr(tokenizer, "pad_token", "") is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer
