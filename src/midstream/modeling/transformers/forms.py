"""The forms that an input may have, each made into rows for the model's forward."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from midstream.errors import PromptError
from midstream.modeling.transformers.encodings import Encoding, stack
from midstream.modeling.transformers.parts import Parts
from midstream.modeling.transformers.raw import EMPTY, RAW, Raw, is_image, is_waveform
from midstream.modeling.transformers.signature import Signature

_ACCEPTED = (
    "text or a list of texts; ids, a list of lists of ids, or an integer tensor [T] or [B, T]; a "
    "tokenizer's or processor's output; chat messages (a list of mappings with 'role' and "
    "'content'); an image, a waveform, or keywords such as input_ids=, images= or text="
)
_ROWS = ("_ids", "_mask", "_values", "_features", "_embeds", "labels", "_thw", "_sizes")
"""Ends of keywords that hold arrays, also where they are written as lists."""

_OF_TOKENS = ("input_ids", "attention_mask", "token_type_ids", "position_ids")
"""Ends of keywords that have an entry for each token of a row."""

_WITHOUT_ROWS = ("logits_to_keep", "cache_position")
"""Keywords whose tensors hold for all rows."""


class Forms:
    """Makes rows of what one invoke was given.

    Args:
        signature: what the forward takes.
        parts: tokenizer and processors.
        dtype: of the model's weights, for what a processor makes of images and sound.
        pad: gives the id that fills shorter rows.
    """

    def __init__(
        self,
        signature: Signature,
        parts: Parts,
        dtype: torch.dtype | None,
        pad: Callable[[], int],
    ):
        self._signature = signature
        self._pad = pad
        self._raw = Raw(parts, dtype)

    def encode(self, inputs: Sequence[Any], keywords: Mapping[str, Any]) -> Encoding:
        """The rows of one invoke, see ``Inputs.encode``."""
        if len(inputs) > 1:
            raise PromptError(
                f"Got {len(inputs)} positional inputs, expected one. Several rows for one invoke "
                "are a list, [first, second]; what else the forward takes are keywords."
            )
        if not inputs:
            return self._keywords(keywords)
        if isinstance(inputs[0], Mapping) or hasattr(inputs[0], "keys"):
            return self._keywords({**inputs[0], **keywords})
        return self._joined(inputs[0], keywords)

    def _joined(self, given: Any, keywords: Mapping[str, Any]) -> Encoding:
        """A positional input with the keywords beside it."""
        if any(name in keywords for name in RAW):
            kind = "text" if _is_text(given) else "images" if is_image(given) else None
            if kind is None or kind in keywords:
                raise PromptError(
                    f"Got {_kind(given)} beside {', '.join(n for n in RAW if n in keywords)}: pass "
                    "all of it as keywords, such as text=, images= and audio=."
                )
            return self._keywords({kind: given, **keywords})
        rows = self._stacked(self._rows(given))
        more = self._arrays(keywords)
        tensors, flags = _sorted({**rows.tensors, **more})
        return self._checked(tensors, {**rows.flags, **flags})

    def _rows(self, given: Any) -> list[dict[str, Any]]:
        """A positional input as keywords, once for every row or once for all."""
        if isinstance(given, str):
            return [self._raw.text(given)]
        if is_waveform(given, self._signature.main):
            return [self._raw.made({"audio": given})]
        if is_image(given):
            return [self._raw.made({"images": given})]
        if isinstance(given, Tensor) or hasattr(given, "__array__"):
            return [self._tensor(torch.as_tensor(given))]
        if isinstance(given, Sequence) and not isinstance(given, bytes):
            return self._several(list(given))
        raise self._unusable(given)

    def _several(self, given: list[Any]) -> list[dict[str, Any]]:
        if not given:
            raise PromptError(EMPTY)
        if all(isinstance(each, Integral) and not isinstance(each, bool) for each in given):
            return [{"input_ids": torch.tensor([[int(each) for each in given]])}]
        if all(_is_message(each) for each in given):
            return [self._raw.chat(given)]
        if any(isinstance(each, float | bool) or each is None for each in given):
            raise self._unusable(given)
        return [self._single(each) for each in given]

    def _single(self, given: Any) -> dict[str, Any]:
        """One row of a list of rows."""
        if isinstance(given, Mapping) or hasattr(given, "keys"):
            found = self._keywords(given)
            return {**found.tensors, **found.flags}
        rows = self._rows(given)
        if len(rows) > 1:
            raise PromptError(
                f"Got a list of lists of {_kind(given)}: a list is the rows of one invoke. Pass "
                "each inner list to an invoke of its own."
            )
        return rows[0]

    def _tensor(self, given: Tensor) -> dict[str, Any]:
        if given.numel() == 0:
            raise PromptError(EMPTY)
        if given.is_floating_point():
            if self._signature.main == "input_ids" or given.ndim < 3:
                raise self._unusable(given)
            return {self._signature.main: given}
        if given.dtype == torch.bool or given.ndim not in (1, 2):
            raise self._unusable(given)
        return {"input_ids": given if given.ndim == 2 else given[None]}

    def _keywords(self, keywords: Mapping[str, Any]) -> Encoding:
        raw = {name: keywords[name] for name in RAW if keywords.get(name) is not None}
        rest = {name: value for name, value in keywords.items() if name not in RAW}
        made = self._made(raw)
        start = self._stacked(made) if made else Encoding({}, {}, 0)
        if not made and _is_ragged(rest.get("input_ids")):
            return self._stacked(_rows_of(rest))
        tensors, flags = _sorted({**start.tensors, **self._arrays(rest)})
        return self._checked(tensors, {**start.flags, **flags})

    def _made(self, raw: Mapping[str, Any]) -> list[dict[str, Any]]:
        """What is not numbers yet, once for every row or once for all."""
        if "text" not in raw or not set(raw) <= {"text", "text_target"}:
            return [self._raw.made(raw)] if raw else []
        texts, targets = _texts(raw["text"]), _texts(raw.get("text_target", []))
        if targets and len(targets) != len(texts):
            raise PromptError(f"Got {len(texts)} texts and {len(targets)} for text_target.")
        labels = [self._raw.labels(each) for each in targets] or [{} for _ in texts]
        return [{**self._raw.text(each), **more} for each, more in zip(texts, labels, strict=True)]

    def _stacked(self, rows: Sequence[Mapping[str, Any]]) -> Encoding:
        """Rows that were made one by one, padded."""
        encodings = [self._checked(*_sorted(self._arrays(each))) for each in rows]
        return stack(encodings, self._signature, self._pad)

    def _arrays(self, keywords: Mapping[str, Any]) -> dict[str, Any]:
        """Keywords with arrays as tensors; what the forward does not take is refused."""
        found = {}
        for name, value in keywords.items():
            if name == "token_type_ids" and name not in self._signature.names:
                continue  # tokenizers give it whether a model has segments or not
            if value is None:
                continue
            self._check_known(name)
            found[name] = _as_tensor(name, value)
        return found

    def _check_known(self, name: str) -> None:
        if not self._signature.takes(name):
            near = difflib.get_close_matches(name, [*self._signature.names, *RAW], n=1)
            hint = f" Did you mean '{near[0]}'?" if near else ""
            raise PromptError(f"{self._signature.model} takes no '{name}'.{hint}")

    def _checked(self, tensors: dict[str, Tensor], flags: dict[str, Any]) -> Encoding:
        """An encoding whose tensors have as many rows and masks as they must."""
        ids = tensors.get("input_ids")
        if ids is not None and ids.ndim == 1:
            tensors = {n: t[None] if t.shape == ids.shape else t for n, t in tensors.items()}
        rows = self._count(tensors)
        if rows == 1:
            tensors = {name: _as_row(name, each) for name, each in tensors.items()}
        ids, mask = tensors.get("input_ids"), tensors.get("attention_mask")
        if ids is not None and ids.numel() == 0:
            raise PromptError(EMPTY)
        if ids is None or mask is None or mask.ndim != 2 or "past_key_values" in flags:
            return Encoding(tensors, flags, rows)
        if mask.shape != ids.shape:
            raise PromptError(
                f"attention_mask has the shape {tuple(mask.shape)} and input_ids "
                f"{tuple(ids.shape)}: expected one entry for each token."
            )
        return Encoding(tensors, flags, rows)

    def _count(self, tensors: Mapping[str, Tensor]) -> int:
        first = ("input_ids", "inputs_embeds", self._signature.main, "decoder_input_ids")
        for name in (*first, *tensors):
            if name in tensors and tensors[name].ndim:
                return tensors[name].shape[0]
        raise PromptError(
            f"There is nothing to run {self._signature.model} on: its input is "
            f"'{self._signature.main}'. Accepted are {_ACCEPTED}."
        )

    def _unusable(self, given: Any) -> PromptError:
        return PromptError(f"Got {_kind(given)} as input. Accepted are {_ACCEPTED}.")


def _sorted(keywords: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(what has rows, what holds for all rows)."""
    tensors = {name: each for name, each in keywords.items() if _has_rows(name, each)}
    return tensors, {name: each for name, each in keywords.items() if name not in tensors}


def _has_rows(name: str, value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0 and name not in _WITHOUT_ROWS


def _as_row(name: str, value: Tensor) -> Tensor:
    """What was given for a row's tokens without the axis of rows gets it."""
    of_tokens = name.endswith(_OF_TOKENS) or (name == "labels" and len(value) > 1)
    return value[None] if value.ndim == 1 and of_tokens else value


def _as_tensor(name: str, value: Any) -> Any:
    if isinstance(value, Tensor):
        return value
    if hasattr(value, "__array__") or (isinstance(value, list | tuple) and name.endswith(_ROWS)):
        return torch.as_tensor(value)
    return value


def _is_ragged(value: Any) -> bool:
    return (
        isinstance(value, list | tuple)
        and all(isinstance(each, Sequence | Tensor) for each in value)
        and len({len(each) for each in value}) > 1
    )


def _rows_of(keywords: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Lists of rows of other lengths, row by row."""
    count = len(keywords["input_ids"])
    return [
        {
            name: [value[i]] if isinstance(value, list | tuple) and len(value) == count else value
            for name, value in keywords.items()
        }
        for i in range(count)
    ]


def _is_text(given: Any) -> bool:
    several = isinstance(given, list | tuple) and bool(given)
    return isinstance(given, str) or (several and all(isinstance(each, str) for each in given))


def _texts(given: Any) -> list[str]:
    if given and not _is_text(given):
        raise PromptError(f"Got {_kind(given)} as text: expected a text or a list of texts.")
    return [given] if isinstance(given, str) else list(given)


def _is_message(given: Any) -> bool:
    return isinstance(given, Mapping) and "role" in given


def _kind(given: Any) -> str:
    if isinstance(given, Tensor):
        return f"a tensor of {str(given.dtype).removeprefix('torch.')} {list(given.shape)}"
    if isinstance(given, list | tuple) and given:
        kinds = sorted({type(each).__name__ for each in given})
        return f"a {type(given).__name__} of {' and '.join(kinds)}"
    return type(given).__name__
