"""Finished requests as a server sends them: vLLM's names and values, in classes of our own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Logprob:
    """Log probability of one token.

    Attributes:
        logprob: natural logarithm.
        rank: 1 for the likeliest token.
        decoded_token: its text.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class ServedCompletion:
    """One sequence, with the names of vLLM's `CompletionOutput`.

    Where installed edits ran, ``saves`` has their values.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[Any] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class ServedOutput:
    """A request, with the names of vLLM's `RequestOutput`.

    Where installed edits ran, ``saves`` has their values and ``edit_error`` an
    `InterventionError` or None.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[Any] | None = None
    outputs: list[ServedCompletion] = field(default_factory=list)
    finished: bool = True
    num_cached_tokens: int | None = None


def of_output(output: Any) -> ServedOutput:
    """What to send of vLLM's `RequestOutput`."""
    return ServedOutput(
        output.request_id,
        output.prompt,
        list(output.prompt_token_ids or ()),
        _positions(output.prompt_logprobs),
        [_completion(each) for each in output.outputs],
        output.finished,
        getattr(output, "num_cached_tokens", None),
    )


def _completion(output: Any) -> ServedCompletion:
    return ServedCompletion(
        output.index,
        output.text,
        list(output.token_ids),
        output.cumulative_logprob,
        _positions(output.logprobs),
        output.finish_reason,
        output.stop_reason,
    )


def _positions(logprobs: Any) -> list[Any] | None:
    """Log probabilities by token id, position after position; None where vLLM has none."""
    if logprobs is None:
        return None
    return [None if found is None else _one(found) for found in logprobs]


def _one(found: Any) -> dict[int, Logprob]:
    return {
        int(token): Logprob(float(each.logprob), each.rank, each.decoded_token)
        for token, each in found.items()
    }
