"""What counts as one prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

from midstream.errors import PromptError, UnsupportedError

_VLLM_FIELDS = ("prompt", "prompt_token_ids", "prompt_embeds")
_MULTIMODAL = ("multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs")

_LOOP = (
    "One trace takes one prompt. For several, loop:\n"
    "    for prompt in prompts:\n"
    "        with model.trace(prompt, ...):\n"
    "            ..."
)


def single(prompt: Any, tokenizer: Any, more: Sequence[Any] = ()) -> dict[str, Any]:
    """One prompt in vLLM's form.

    Args:
        prompt: text; token ids; a tokenizer's output (ids under an attention mask of 0 are left
            out); chat messages (role/content mappings, through the chat template); or vLLM's own
            prompt dictionary.
        tokenizer: the checkpoint's, for chat messages; None where the engine has none.
        more: prompts beside the first one.

    Raises:
        PromptError: no prompt, an empty one, or several; or messages that the template refuses.
        UnsupportedError: images, video or audio.
    """
    if more:
        raise PromptError(f"Got {1 + len(more)} prompts. {_LOOP}")
    if isinstance(prompt, str):
        return {"prompt": _filled(prompt)}
    if isinstance(prompt, Mapping):
        return _mapping(prompt)
    if hasattr(prompt, "tolist"):
        prompt = prompt.tolist()
    if isinstance(prompt, Sequence) and not isinstance(prompt, bytes):
        if is_chat(prompt):
            return _chat(prompt, tokenizer)
        return {"prompt_token_ids": _ids(list(prompt))}
    raise PromptError(
        f"A prompt is text, token ids, a tokenizer's output, chat messages or vLLM's prompt "
        f"dictionary; got {type(prompt).__name__}."
    )


def is_chat(prompt: Any) -> bool:
    """Whether a prompt is chat messages."""
    if not isinstance(prompt, Sequence) or isinstance(prompt, str | bytes):
        return False
    return bool(prompt) and all(isinstance(item, Mapping) and "role" in item for item in prompt)


def _filled(prompt: Any) -> Any:
    if not prompt:
        raise PromptError("Empty prompt: there is no token to run the model on.")
    return prompt


def _ids(ids: list[Any]) -> list[int]:
    if len(ids) == 1 and isinstance(ids[0], list | tuple):
        ids = list(ids[0])
    _filled(ids)
    if all(type(item) is int for item in ids):  # an abstract class takes its time to look at one
        return ids
    for item in ids:
        if not isinstance(item, Integral) or isinstance(item, bool):
            raise PromptError(f"Got a list of {type(item).__name__} as one prompt. {_LOOP}")
    return [int(item) for item in ids]


def _mapping(prompt: Mapping[str, Any]) -> dict[str, Any]:
    if any(prompt.get(name) for name in _MULTIMODAL):
        raise UnsupportedError(
            "Images, video and audio are not supported on vLLM; trace them on HuggingFace with "
            "midstream.TransformersModel."
        )
    if "input_ids" in prompt:
        return {"prompt_token_ids": _encoding(prompt)}
    if any(name in prompt for name in _VLLM_FIELDS):
        return dict(prompt)
    raise PromptError(
        f"A prompt dictionary needs 'input_ids' (a tokenizer's output) or one of {_VLLM_FIELDS} "
        f"(vLLM's own); got the keys {sorted(map(str, prompt))}."
    )


def _encoding(prompt: Mapping[str, Any]) -> list[int]:
    ids, mask = (_row(prompt.get(name)) for name in ("input_ids", "attention_mask"))
    if mask is not None:
        if len(mask) != len(ids):
            raise PromptError(f"attention_mask has {len(mask)} entries for {len(ids)} input_ids.")
        ids = [i for i, keep in zip(ids, mask, strict=True) if keep]
    return _ids(ids)


def _row(value: Any) -> Any:
    """A list from a tensor, array or list, without a batch axis of one row."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple) and len(value) == 1 and isinstance(value[0], list | tuple):
        value = value[0]
    if isinstance(value, list | tuple) and value and isinstance(value[0], list | tuple):
        raise PromptError(f"Got {len(value)} rows of input_ids. {_LOOP}")
    return value


def _chat(messages: Sequence[Mapping[str, Any]], tokenizer: Any) -> dict[str, Any]:
    if tokenizer is None:
        raise PromptError(
            "Chat messages need a tokenizer, and this engine was built without one "
            "(skip_tokenizer_init=True). Pass token ids."
        )
    from jinja2 import TemplateError

    try:
        ids = tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, tokenize=True, return_dict=False
        )
    except TemplateError as error:
        raise PromptError(f"The chat template refuses these messages: {error}") from error
    return {"prompt_token_ids": _ids(list(ids))}
