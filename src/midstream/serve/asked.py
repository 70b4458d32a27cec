"""Prompts that clients send, looked at before anything is made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from midstream.serve.problems import Problem

MOST_ITEMS = 1 << 20
"""Token ids, or messages, of a prompt."""


def check(prompt: Mapping[str, Any]) -> None:
    """Refuse what is no prompt.

    Raises:
        Problem: naming the field.
    """
    known = {"prompt": str, "cache_salt": str}
    for name, value in prompt.items():
        if name in known and isinstance(value, known[name]):
            continue
        if isinstance(value, list) and len(value) > MOST_ITEMS:
            raise Problem(400, f"prompt: more than {MOST_ITEMS} items.", param="prompt")
        if name == "prompt_token_ids" and is_list_of(value, int) and value:
            continue
        if name == "messages" and is_chat(value):
            _check_chat(value)
            continue
        raise Problem(400, f"prompt: '{name}' is no part of a prompt here.", param="prompt")
    if not any(prompt.get(name) for name in ("prompt", "prompt_token_ids", "messages")):
        raise Problem(400, "prompt: empty.", param="prompt")


def is_list_of(value: Any, kind: type) -> bool:
    """Whether a value is a list of one type's values."""
    return isinstance(value, list) and all(type(item) is kind for item in value)


def is_chat(value: Any) -> bool:
    """Whether a value is chat messages."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(item, dict) and isinstance(item.get("role"), str) for item in value)
    )


def _check_chat(messages: Sequence[Mapping[str, Any]]) -> None:
    """Refuse what no chat template makes text of.

    Raises:
        Problem: naming the field.
    """
    for message in messages:
        content = message.get("content")
        if not (content is None or isinstance(content, str) or is_list_of(content, dict)):
            raise Problem(400, "prompt: a message's content is text, or parts.", param="prompt")


def check_text(prompt: Mapping[str, Any], most: int) -> None:
    """Refuse text that is too long for the model whatever its tokens are, before they are known.

    Raises:
        Problem: it has more than ``most`` characters.
    """
    size = _characters([prompt.get("prompt"), prompt.get("messages")])
    if size > most:
        raise Problem(
            400,
            f"prompt: {size} characters; as many tokens as the model takes (max_model_len) have at "
            f"most {most}.",
            param="prompt",
        )


def _characters(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_characters, value.values()))
    return sum(map(_characters, value)) if isinstance(value, list) else 0
