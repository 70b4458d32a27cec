"""Text, chat messages, images and sound, through a checkpoint's tokenizer and processors."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from midstream.errors import PromptError
from midstream.modeling.transformers.parts import Parts

RAW = ("text", "text_target", "images", "videos", "audio", "sampling_rate")
"""Keywords that a tokenizer or a processor takes, and no forward."""

EMPTY = "Empty input: there is no token to run the model on."


class Raw:
    """Makes tensors of what is not numbers yet.

    Args:
        parts: tokenizer and processors.
        dtype: of the floating-point tensors that a processor makes; None: its own.
    """

    def __init__(self, parts: Parts, dtype: torch.dtype | None):
        self._parts = parts
        self._dtype = dtype

    def text(self, text: str) -> dict[str, Any]:
        """One row of tokens.

        Raises:
            PromptError: the checkpoint has no tokenizer, or the text is no token.
        """
        return self._tokens(dict(self._tokenizer("text")(text, return_tensors="pt")))

    def labels(self, text: str) -> dict[str, Any]:
        """One row of labels: the tokens of the text that a decoder is to write."""
        made = self._tokenizer("text_target")(text_target=text, return_tensors="pt")
        return {"labels": made.get("labels", made["input_ids"])}

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """One row of tokens from chat messages, with the template's generation prompt.

        Raises:
            PromptError: there is nothing with a chat template.
        """
        more = any(_has_more_than_text(each.get("content")) for each in messages)
        processor = self._parts.processor
        holder = processor if more else self._tokenizer("chat messages")
        if not more and not getattr(holder, "chat_template", None) and processor is not None:
            holder = processor
        if holder is None:
            raise PromptError(
                "Chat messages with images or sound need a processor, and this checkpoint has "
                "none. Pass processor=, or messages whose content is text."
            )
        if not getattr(holder, "chat_template", None):
            raise PromptError(
                f"{type(holder).__name__} has no chat template. Pass text, or set its "
                "chat_template."
            )
        made = holder.apply_chat_template(
            list(messages),
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
        )
        return self._cast(dict(made))

    def made(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """What tokenizer or processor make of `text`, `images`, `videos`, `audio` together.

        Raises:
            PromptError: the checkpoint lacks what makes it.
        """
        given = dict(given)
        target = given.pop("text_target", None)
        if target is not None:
            return {**(self.made(given) if given else {}), **self.labels(target)}
        holder = self._holder(given)
        if "audio" in given and holder is self._parts.feature_extractor:
            given["raw_speech"] = given.pop("audio")
            given.setdefault("sampling_rate", getattr(holder, "sampling_rate", None))
        return self._cast(dict(holder(**given, return_tensors="pt", **_padding(given))))

    def _holder(self, given: Mapping[str, Any]) -> Any:
        """What turns these into tensors: the processor, or the one for the only kind there is."""
        kinds = {name for name in given if name != "sampling_rate"}
        one = {
            "text": self._parts.tokenizer if kinds == {"text"} else None,
            "images": self._parts.image_processor if kinds == {"images"} else None,
            "audio": self._parts.feature_extractor if kinds == {"audio"} else None,
        }
        found = next((each for each in one.values() if each is not None), self._parts.processor)
        if found is None:
            raise PromptError(
                f"{' and '.join(sorted(kinds))} need a processor, and this checkpoint has none. "
                "Pass processor= (or image_processor=, feature_extractor=), or what it would make: "
                "pixel_values=, input_features=, ..."
            )
        return found

    def _tokenizer(self, what: str) -> Any:
        if self._parts.tokenizer is None:
            raise PromptError(
                f"Got {what}, and this checkpoint has no tokenizer. Pass token ids, or tokenizer=."
            )
        return self._parts.tokenizer

    def _tokens(self, made: dict[str, Any]) -> dict[str, Any]:
        if made["input_ids"].numel() == 0:
            raise PromptError(EMPTY)
        return made

    def _cast(self, made: dict[str, Any]) -> dict[str, Any]:
        """Floating-point tensors in the dtype of the weights."""
        return {
            name: each.to(self._dtype)
            if isinstance(each, Tensor) and each.is_floating_point() and self._dtype is not None
            else each
            for name, each in made.items()
        }


def is_image(given: Any) -> bool:
    """Whether a value is a picture of PIL, or a list of them."""
    images = sys.modules.get("PIL.Image")  # who has a picture has imported it
    if images is None:
        return False
    if isinstance(given, list | tuple) and given:
        return all(is_image(each) for each in given)
    return isinstance(given, images.Image)


def is_waveform(given: Any, main: str) -> bool:
    """Whether a value is sound for a model that listens: one axis of floats, or a list of such."""
    if main not in ("input_features", "input_values"):
        return False
    if isinstance(given, list | tuple):
        return bool(given) and all(isinstance(e, float) or is_waveform(e, main) for e in given)
    dtype = str(getattr(given, "dtype", ""))
    return getattr(given, "ndim", 0) == 1 and "float" in dtype


def _has_more_than_text(content: Any) -> bool:
    if isinstance(content, str) or not isinstance(content, Sequence):
        return False
    return any(isinstance(each, Mapping) and each.get("type") != "text" for each in content)


def _padding(given: Mapping[str, Any]) -> dict[str, Any]:
    """Several texts for a processor are padded by it."""
    return {"padding": True} if isinstance(given.get("text"), list | tuple) else {}
