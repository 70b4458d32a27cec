"""What a model's forward takes, and how its rows are padded."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard

import torch

_FILLING = ("bart", "bigbird_pegasus", "led", "mbart", "mvp", "plbart")
"""Model types whose forward makes decoder_input_ids of input_ids where it gets none."""

_OWN_DECODER = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
"""Heads that make the decoder's input themselves, whatever the model type."""


@dataclass(frozen=True)
class Signature:
    """What a model's forward takes.

    Attributes:
        model: name of the model's class.
        main: name of its first input, such as "input_ids" or "pixel_values".
        names: parameters that the forward names.
        more: names that it takes beyond them; None where it takes any.
        encoder_decoder: whether it has a decoder that reads tokens of its own.
        needs_decoder: whether one forward fails without tokens for the decoder.
        causal: whether a row's tokens see only those before them.
        shifts_labels: whether its loss compares a label with what the token before it predicts.
        positions: whether position ids derived from a mask may be passed.
    """

    model: str
    main: str
    names: frozenset[str]
    more: frozenset[str] | None
    encoder_decoder: bool
    needs_decoder: bool
    causal: bool
    shifts_labels: bool
    positions: bool

    @property
    def side(self) -> Literal["left", "right"]:
        """Where rows are padded: left where the last token is what continues."""
        return "left" if self.causal else "right"

    def takes(self, name: str) -> bool:
        """Whether the forward takes a keyword."""
        return name in self.names or self.more is None or name in self.more


def signature_of(module: torch.nn.Module) -> Signature:
    """What a module's forward takes."""
    parameters = inspect.signature(module.forward).parameters.values()
    named = frozenset(each.name for each in parameters if each.kind not in _VARIABLE)
    config = getattr(module, "config", None)
    decoder = "decoder_input_ids" in named
    name = type(module).__name__
    filled = getattr(config, "model_type", "") in _FILLING or name.endswith(_OWN_DECODER)
    return Signature(
        model=name,
        main=getattr(module, "main_input_name", None) or next(iter(named), ""),
        names=named,
        more=_more(module, named),
        encoder_decoder=decoder,
        needs_decoder=decoder and not filled,
        causal=not decoder and _is_causal(module, config, named),
        shifts_labels=not decoder and _generates(module),
        positions="position_ids" in named and not _has_many_positions(module),
    )


def padding_id(config: Any, tokenizer: Callable[[], Any]) -> int:
    """The id to pad with: the model's padding token, the tokenizer's, or an end of text.

    Args:
        config: the model's configuration, which has the last word: some models look for it.
        tokenizer: gives the tokenizer, or None; called only where it is needed.
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if _is_id(getattr(text, "pad_token_id", None)):
        return int(text.pad_token_id)
    own = tokenizer()
    ends = getattr(text, "eos_token_id", None)
    end = ends[0] if isinstance(ends, list | tuple) and ends else ends
    named = (getattr(own, name, None) for name in ("pad_token_id", "eos_token_id"))
    return next((each for each in (*named, end) if _is_id(each)), 0)


def _is_id(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and value >= 0


_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _more(module: torch.nn.Module, named: frozenset[str]) -> frozenset[str] | None:
    """Names that a forward takes through its ``**kwargs``."""
    kinds = [each.kind for each in inspect.signature(module.forward).parameters.values()]
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        return frozenset()
    return _passed_on() if named - {"args", "kwargs"} else None  # a wrapper hands on all there is


@functools.cache
def _passed_on() -> frozenset[str]:
    from transformers.utils import TransformersKwargs

    return frozenset(TransformersKwargs.__optional_keys__)


def _is_causal(module: torch.nn.Module, config: Any, named: frozenset[str]) -> bool:
    """Whether a model with one stack of layers is a decoder: it keeps a cache, and is no encoder.

    Encoders that can serve as decoders say in `is_decoder` that they do not.
    """
    cached = bool(named & {"past_key_values", "cache_params", "state"})
    return cached and bool(getattr(config, "is_decoder", True))


def _generates(module: torch.nn.Module) -> bool:
    can = getattr(module, "can_generate", None)
    return bool(can is not None and can())


def _has_many_positions(module: torch.nn.Module) -> bool:
    """Whether a token's position is several numbers, which the model finds from ids and mask."""
    return any(hasattr(each, "get_rope_index") for each in module.modules())
