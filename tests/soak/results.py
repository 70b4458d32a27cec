"""What came of a request, in a form that two runs can be compared by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from midstream.interleaving.caches import Cache

TOLERANCE = 1e-4
"""Of a saved tensor, by its largest element: a batch sums in another order than one request."""


@dataclass
class Result:
    """One request's outcome.

    Attributes:
        ended: tokens, finish reason and stop reason of each sequence.
        scores: log probability of each token of each sequence, and of the prompt's tokens, where
            they were asked for.
        error: first line of the error of each sequence's block.
        saves: values by name, of each sequence.
        name: the request's id.
    """

    ended: list[tuple[Any, ...]]
    scores: list[torch.Tensor]
    error: list[str | None]
    saves: list[dict[str, Any]]
    name: str


def result_of(outcome: Any) -> Result:
    """The result in an ``Outcome`` of the client."""
    records = [record for record in outcome.records if record is not None]
    records += [edits[i] for edits in outcome.edits for i in sorted(edits)]
    ended = [
        (tuple(one.token_ids), one.finish_reason, one.stop_reason) for one in outcome.output.outputs
    ]
    errors = [
        record.error and f"{record.error.type_name}: {record.error.message}" for record in records
    ]
    saves = [record.saves for record in records]
    output = outcome.output
    scores = [_scores(one.token_ids, one.logprobs) for one in output.outputs]
    scores.append(_scores(output.prompt_token_ids[1:], (output.prompt_logprobs or ())[1:]))
    return Result(ended, scores, errors, saves, str(outcome.output.request_id))


def _scores(tokens: Any, entries: Any) -> torch.Tensor:
    pairs = zip(tokens, entries or (), strict=False)
    return torch.tensor([entry[token].logprob for token, entry in pairs])


def difference(got: Result, right: Result) -> str | None:
    """What differs; None if nothing does."""
    if got.ended != right.ended:
        return f"ended {got.ended}, alone {right.ended}"
    if got.error != right.error:
        return f"error {got.error}, alone {right.error}"
    return _differs(got.scores, right.scores, "scores") or _differs(got.saves, right.saves, "saves")


def _differs(got: Any, right: Any, where: str) -> str | None:
    if isinstance(right, Cache) and isinstance(got, Cache):
        got, right = got.visits, right.visits
    if type(got) is not type(right):
        return f"{where}: {type(got).__name__}, alone {type(right).__name__}"
    if isinstance(right, torch.Tensor):
        return _tensors_differ(got, right, where)
    if isinstance(right, dict):
        if got.keys() != right.keys():
            return f"{where}: {sorted(got)}, alone {sorted(right)}"
        found = (_differs(got[key], right[key], f"{where}[{key!r}]") for key in right)
    elif isinstance(right, list | tuple):
        if len(got) != len(right):
            return f"{where}: {len(got)} values, alone {len(right)}"
        found = (
            _differs(a, b, f"{where}[{i}]") for i, (a, b) in enumerate(zip(got, right, strict=True))
        )
    else:
        return None if got == right else f"{where}: {got!r}, alone {right!r}"
    return next((text for text in found if text), None)


def _tensors_differ(got: torch.Tensor, right: torch.Tensor, where: str) -> str | None:
    if got.shape != right.shape or got.dtype != right.dtype:
        return f"{where}: {list(got.shape)} {got.dtype}, alone {list(right.shape)} {right.dtype}"
    scale = float(right.double().abs().max()) if right.numel() else 0.0
    tolerance = TOLERANCE * max(1.0, scale if scale == scale else 1.0)
    if torch.allclose(got.double(), right.double(), rtol=0, atol=tolerance, equal_nan=True):
        return None
    error = float((got.double() - right.double()).abs().max())
    return f"{where}: differs by {error:.3g} of {scale:.3g}"
