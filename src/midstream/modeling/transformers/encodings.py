"""The rows of one invoke as tensors, and several such stacked into one batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from midstream.errors import PromptError, UnsupportedError
from midstream.modeling.transformers.signature import Signature

IGNORED = -100
"""Label of a token that no loss is computed at."""

_IDS = ("input_ids", "decoder_input_ids")
_MODALITIES = ("pixel_", "image_", "video_", "audio_", "input_features", "input_values", "feature_")
_SOUND = ("input_features", "input_values")
_OWN = ("past_key_values", "cache_params", "encoder_outputs")

_LOOP = (
    "Trace them one by one:\n"
    "    for each in inputs:\n"
    "        with model.trace(each):\n"
    "            ..."
)


@dataclass(frozen=True)
class Encoding:
    """Rows as the model's forward takes them.

    Attributes:
        tensors: what has a row for each sequence, ``[rows, ...]``, by keyword.
        flags: keywords that hold for all rows alike, such as `output_attentions`.
        rows: how many sequences there are.
    """

    tensors: Mapping[str, Tensor]
    flags: Mapping[str, Any]
    rows: int

    @property
    def length(self) -> int | None:
        """Tokens of a row with its padding; None for a model that reads no tokens."""
        for name in ("input_ids", "inputs_embeds"):
            if name in self.tensors:
                return self.tensors[name].shape[1]
        return None

    @property
    def mask(self) -> Tensor | None:
        """Which tokens are real, ``[rows, length]``; None where all are."""
        mask = self.tensors.get("attention_mask")
        return mask if mask is not None and mask.ndim == 2 else None


def stack(encodings: Sequence[Encoding], signature: Signature, pad: Callable[[], int]) -> Encoding:
    """Several encodings as one; rows of other lengths are padded on the model's side.

    Args:
        encodings: at least one. A single one is given back as it is.
        signature: what the forward takes.
        pad: gives the id that fills rows of ids; masks and others are filled with 0, labels with
            -100.

    Raises:
        UnsupportedError: they cannot share a forward.
    """
    if len(encodings) == 1:
        return encodings[0]
    for each in encodings:
        _check_shareable(each)
    uneven = len({each.length for each in encodings}) > 1
    names = list(dict.fromkeys(name for each in encodings for name in each.tensors))
    if uneven and "attention_mask" not in names:
        names.append("attention_mask")
    if uneven and not signature.takes("attention_mask"):
        raise _refusal("rows of other lengths without an attention mask")
    tensors = {name: _column(name, encodings, signature, pad) for name in names}
    return Encoding(tensors, _shared_flags(encodings), sum(each.rows for each in encodings))


def _check_shareable(encoding: Encoding) -> None:
    if encoding.length is not None:
        mixed = [name for name in encoding.tensors if name.startswith(_MODALITIES)]
        if mixed:
            raise _refusal(f"text with {' and '.join(mixed)}")
    elif any(name in encoding.tensors for name in _SOUND):
        raise _refusal("audio features")
    own = [name for name in _OWN if encoding.flags.get(name) is not None]
    if own:
        raise _refusal(f"an input with {own[0]} of its own")


def _shared_flags(encodings: Sequence[Encoding]) -> dict[str, Any]:
    first = dict(encodings[0].flags)
    for each in encodings[1:]:
        differing = [name for name in {**first, **each.flags} if _differs(name, first, each.flags)]
        if differing:
            name = differing[0]
            raise UnsupportedError(
                f"{name}={each.flags.get(name)!r} in one invoke and {first.get(name)!r} in another "
                f"cannot share a forward: give all invokes the same. Or: {_LOOP}"
            )
    return first


def _differs(name: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    if name not in one or name not in other:
        return True
    first, second = one[name], other[name]
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return not torch.equal(first, second)
    return first is not second and bool(first != second)


def _column(
    name: str, encodings: Sequence[Encoding], signature: Signature, pad: Callable[[], int]
) -> Tensor:
    """One keyword's rows of all encodings, padded to one shape."""
    parts = [
        each.tensors[name] if name in each.tensors else _absent(name, each) for each in encodings
    ]
    if len({part.shape[1:] for part in parts}) == 1:
        return torch.cat(parts)
    lengths = [each.length for each in encodings]
    of_decoder = name.startswith("decoder_") or (name == "labels" and signature.encoder_decoder)
    along = [part.shape[1] if part.ndim > 1 else None for part in parts]
    if len({part.shape[2:] for part in parts}) > 1 or not (of_decoder or along == lengths):
        raise _refusal(f"{name} of the shapes {[tuple(part.shape) for part in parts]}")
    side = "right" if of_decoder else signature.side
    value = pad() if name in _IDS else IGNORED if name == "labels" else 0
    longest = max(part.shape[1] for part in parts)
    if name == "labels" and side == "left" and signature.shifts_labels:
        parts = [part if part.shape[1] == longest else _without_first(part) for part in parts]
    return torch.cat([_padded(part, longest, side, value) for part in parts])


def _without_first(labels: Tensor) -> Tensor:
    """Labels whose first is ignored: nothing predicts it, and padding before it is not to."""
    return torch.cat([torch.full_like(labels[:, :1], IGNORED), labels[:, 1:]], dim=1)


def _padded(part: Tensor, length: int, side: str, value: int) -> Tensor:
    shape = (part.shape[0], length - part.shape[1], *part.shape[2:])
    filling = part.new_full(shape, value)
    return torch.cat([filling, part] if side == "left" else [part, filling], dim=1)


def _absent(name: str, encoding: Encoding) -> Tensor:
    """What a keyword that other encodings have means for one that lacks it."""
    length = encoding.length
    if length is not None:
        like = next(iter(encoding.tensors.values()))
        shape = (encoding.rows, length)
        if name == "attention_mask":
            return torch.ones(shape, dtype=torch.int64, device=like.device)
        if name == "token_type_ids":
            return torch.zeros(shape, dtype=torch.int64, device=like.device)
        if name == "position_ids":
            return positions(encoding.mask, shape, like.device)
    raise PromptError(
        f"{name} is given for some of the invokes and not for all: pass it to each of them. One "
        "forward takes it for all rows or for none."
    )


def positions(mask: Tensor | None, shape: tuple[int, int], device: torch.device) -> Tensor:
    """Position ids ``[rows, length]``: real tokens are counted from 0, padding has 0."""
    if mask is None:
        return torch.arange(shape[1], device=device).expand(shape)
    return (mask.long().cumsum(-1) - 1).clamp(min=0).masked_fill(mask == 0, 0)


def ends(encodings: Sequence[Encoding], signature: Signature) -> tuple[int, ...] | None:
    """Where each row's last real token is, of the decoder where there is one.

    None where that is the last place in all rows, as with padding on the left.
    """
    real = [_real(each, signature) for each in encodings]
    longest = max(each.shape[1] for each in real)
    found: list[int] = []
    for each in real:
        shift = longest - each.shape[1] if signature.side == "left" else 0
        places = torch.arange(each.shape[1], device=each.device) + shift
        found += (each * places).max(1).values.tolist()
    return None if set(found) <= {longest - 1} else tuple(found)


def _real(encoding: Encoding, signature: Signature) -> Tensor:
    """Which places are real tokens, ``[rows, length]``; a model without tokens has one place."""
    prefix = "decoder_" if signature.encoder_decoder else ""
    for name in (f"{prefix}attention_mask", f"{prefix}input_ids", "labels"):
        given = encoding.tensors.get(name)
        if given is None or given.ndim != 2 or not given.shape[1]:
            continue
        if name.endswith("_ids"):
            return torch.ones_like(given, dtype=torch.bool)
        return given != (IGNORED if name == "labels" else 0)
    return torch.ones((encoding.rows, 1), dtype=torch.bool)


def _refusal(what: str) -> UnsupportedError:
    return UnsupportedError(f"Several inputs cannot share one forward: {what}. {_LOOP}")
