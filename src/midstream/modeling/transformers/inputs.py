"""From what users pass to the keyword arguments of one forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from midstream.errors import PromptError
from midstream.modeling.transformers.encodings import Encoding, ends, positions, stack
from midstream.modeling.transformers.forms import Forms
from midstream.modeling.transformers.parts import Parts
from midstream.modeling.transformers.signature import padding_id, signature_of

_DECODER = ("decoder_input_ids", "decoder_inputs_embeds", "labels")


@dataclass(frozen=True)
class Prepared:
    """The input of one forward, and whose rows are where.

    Attributes:
        arguments: keyword arguments of the model's forward, or of `generate`.
        spans: (start, stop) of each invoke's rows.
        lengths: real tokens of each row; empty where a model reads no tokens.
        side: the side that rows are padded on, "left" or "right".
        ends: where each row's last real token is, in what logits are made for; None where that is
            the last place of all.
        images: for each row, (start, stop) of every run of image tokens in it.
    """

    arguments: dict[str, Any]
    spans: tuple[tuple[int, int], ...]
    lengths: tuple[int, ...]
    side: str
    ends: tuple[int, ...] | None = None
    images: tuple[tuple[tuple[int, int], ...], ...] = ()

    @property
    def rows(self) -> int:
        """How many rows the batch has."""
        return self.spans[-1][1] if self.spans else 0


class Inputs:
    """How one model's inputs are made.

    Args:
        module: the model; on the meta device tensors stay where they are.
        parts: its tokenizer and processors.
    """

    def __init__(self, module: torch.nn.Module, parts: Parts):
        self.signature = signature_of(module)
        self._module = module
        self._parts = parts
        self._forms = Forms(self.signature, parts, getattr(module, "dtype", None), self._pad)

    def encode(self, *inputs: Any, **keywords: Any) -> Encoding:
        """The rows of one invoke.

        Args:
            inputs: none or one: text or a list of texts; ids, a list of lists of ids, an integer
                tensor ``[T]`` or ``[B, T]``; a tokenizer's or processor's output; chat messages
                (role/content mappings, through the chat template with its generation prompt), or a
                list of them; an image or a list; a waveform; a float tensor of the model's own
                first input; or a mapping of the keywords.
            keywords: keyword arguments of the forward (`input_ids`, `attention_mask`,
                `decoder_input_ids`, `labels`, ...), or raw `text`, `text_target`, `images`,
                `videos`, `audio` with `sampling_rate`, for tokenizer and processor. They join the
                positional input, whose rows they have.

        Raises:
            PromptError: nothing to run on, or not usable; the text says what is.
        """
        return self._forms.encode(inputs, keywords)

    def prepare(self, encodings: Sequence[Encoding], *, generate: bool = False) -> Prepared:
        """One forward's input from the rows of its invokes, in their order.

        Rows are stacked. Where lengths differ, decoders are padded on the left, with position ids
        counted over real tokens; encoders and encoder-decoders on the right. A single invoke
        without padding is passed as it is.

        Args:
            encodings: what `encode` gave for each invoke.
            generate: for `generate`, which counts positions and starts the decoder itself.

        Raises:
            UnsupportedError: the invokes cannot share a forward.
            PromptError: tokens for a decoder are missing.
        """
        if not encodings:
            raise PromptError("There is no input: pass one to trace(...) or open an invoke.")
        whole = stack(encodings, self.signature, self._pad)
        tensors = dict(whole.tensors)
        if generate:
            self._add_mask(tensors)
        else:
            self._check_decoder(whole)
            self._add_positions(tensors, whole)
        return Prepared(
            arguments={**self._placed(tensors), **whole.flags},
            spans=_spans(encodings),
            lengths=_lengths(whole),
            side=self.signature.side,
            ends=None if generate else ends(encodings, self.signature),
            images=self._images(whole),
        )

    def _pad(self) -> int:
        return padding_id(getattr(self._module, "config", None), lambda: self._parts.tokenizer)

    def _add_mask(self, tensors: dict[str, Tensor]) -> None:
        """Say that all ids count: `generate` takes padding ids among them for padding."""
        missing = "input_ids" in tensors and "attention_mask" not in tensors
        if missing and self.signature.takes("attention_mask"):
            tensors["attention_mask"] = torch.ones_like(tensors["input_ids"])

    def _add_positions(self, tensors: dict[str, Tensor], whole: Encoding) -> None:
        mask = whole.mask
        if not (self.signature.causal and self.signature.positions) or "position_ids" in tensors:
            return
        if mask is not None and whole.length is not None and bool((mask[:, 0] == 0).any()):
            tensors["position_ids"] = positions(mask, (whole.rows, whole.length), mask.device)

    def _check_decoder(self, whole: Encoding) -> None:
        if not self.signature.needs_decoder:
            return
        if not any({**whole.tensors, **whole.flags}.get(name) is not None for name in _DECODER):
            start = getattr(self._module.config, "decoder_start_token_id", None)
            example = [[start if start is not None else 0]]
            raise PromptError(
                f"{self.signature.model} has a decoder, and one forward needs tokens for it. Pass "
                f"decoder_input_ids={example} (its start token), or labels, or text_target; or use "
                "`model.generate(...)`, which starts the decoder itself."
            )

    def _placed(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        first = next(self._module.parameters(), None)
        if first is None or first.is_meta:
            return tensors
        return {name: each.to(first.device) for name, each in tensors.items()}

    def _images(self, whole: Encoding) -> tuple[tuple[tuple[int, int], ...], ...]:
        config = getattr(self._module, "config", None)
        token = getattr(config, "image_token_id", None) or getattr(
            config, "image_token_index", None
        )
        if token is None or "input_ids" not in whole.tensors:
            return ()
        return tuple(_runs(row == token) for row in whole.tensors["input_ids"])


def _spans(encodings: Sequence[Encoding]) -> tuple[tuple[int, int], ...]:
    spans, start = [], 0
    for each in encodings:
        spans.append((start, start + each.rows))
        start += each.rows
    return tuple(spans)


def _lengths(whole: Encoding) -> tuple[int, ...]:
    if whole.length is None:
        return ()
    if whole.mask is None:
        return (whole.length,) * whole.rows
    return tuple(int(each) for each in (whole.mask != 0).sum(1))


def _runs(marked: Tensor) -> tuple[tuple[int, int], ...]:
    """(start, stop) of every run of True in a row."""
    edges = torch.nn.functional.pad(marked.int(), (1, 1)).diff()
    starts, stops = ((edges == sign).nonzero().flatten().tolist() for sign in (1, -1))
    return tuple(zip(starts, stops, strict=True))
