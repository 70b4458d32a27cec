"""`tracer.result` inside a block: the finished request, on its way from the client to the engine.

Only the client has the text of a request, so a block that asks for its result waits in the engine
after the request has closed, and the client sends it what vLLM made of the request.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from midstream.errors import UnsupportedError
from midstream.modeling.vllm.payloads import Record, pack, unpack
from midstream.modeling.vllm.unsupported import RESULT_SAVES

_NAME = "result"


class _WithEditsSaves:
    """What the engine knows of the values of a finished request."""

    _edits: Mapping[str, Any] | None = None  # no field: it does not travel
    _copied: Mapping[str, Any] | None = None

    @property
    def saves(self) -> Mapping[str, Any]:
        """What installed edits saved beside this sequence, as in the caller's `result.saves`.

        The values are the block's own: changing one changes nothing of what the caller gets.

        Raises:
            UnsupportedError: no edit ran, or another sequence's are asked for.
        """
        if self._edits is None:
            raise UnsupportedError(RESULT_SAVES)
        if self._copied is None:
            self._copied = copy.deepcopy(dict(self._edits))
        return self._copied


@dataclass
class Completion(_WithEditsSaves):
    """One finished sequence, with vLLM's names and values.

    Attributes:
        index: which of the request's sequences it is.
        text: the generated text, without a stop string.
        token_ids: the generated ids.
        cumulative_logprob: log probability of all of them, if ``logprobs`` was asked for.
        logprobs: for each position vLLM's ``Logprob`` by token id, if asked for.
        finish_reason: "stop", "length", "error" or "abort".
        stop_reason: the stop string or token id, or "tracer.stop".
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[Any] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class Result(_WithEditsSaves):
    """A finished request, with the names of vLLM's `RequestOutput`.

    ``text``, ``token_ids``, ``logprobs``, ``finish_reason`` and ``stop_reason`` are those of the
    block's own sequence.

    Attributes:
        request_id: vLLM's id of the request.
        prompt: the prompt's text, if it was one.
        prompt_token_ids: the prompt's ids.
        prompt_logprobs: for each position of the prompt as in ``Completion``, if asked for.
        outputs: the request's sequences: one, or ``n``.
        sequence: which of them the block ran beside.
        finished: always true.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[Any] | None = None
    outputs: list[Completion] = field(default_factory=list)
    sequence: int = 0
    finished: bool = True

    def give_saves(self, edits: Mapping[str, Any]) -> None:
        """Let the block have what edits saved."""
        self._edits = self._own._edits = edits

    @property
    def _own(self) -> Completion:
        return next(output for output in self.outputs if output.index == self.sequence)

    @property
    def text(self) -> str:
        """The generated text."""
        return self._own.text

    @property
    def token_ids(self) -> list[int]:
        """The generated ids."""
        return self._own.token_ids

    @property
    def logprobs(self) -> list[Any] | None:
        """For each position vLLM's ``Logprob`` by token id, if asked for."""
        return self._own.logprobs

    @property
    def finish_reason(self) -> str | None:
        """Why it ended: "stop", "length", "error" or "abort"."""
        return self._own.finish_reason

    @property
    def stop_reason(self) -> int | str | None:
        """The stop string or token id, or "tracer.stop"."""
        return self._own.stop_reason


def of_output(output: Any, sequence: int) -> Result:
    """The result as one sequence's block gets it, from vLLM's finished `RequestOutput`."""
    return Result(
        output.request_id,
        output.prompt,
        list(output.prompt_token_ids or ()),
        _listed(output.prompt_logprobs),
        [_completion(completion) for completion in output.outputs],
        sequence,
    )


def _completion(output: Any) -> Completion:
    return Completion(
        output.index,
        output.text,
        list(output.token_ids),
        output.cumulative_logprob,
        _listed(output.logprobs),
        output.finish_reason,
        output.stop_reason,
    )


def _listed(logprobs: Any) -> list[Any] | None:
    return None if logprobs is None else list(logprobs)  # vLLM also has a flat form


def write(results: Mapping[str, Result | None]) -> bytes:
    """Results by request as one message; None for a request that has none."""
    records = [Record(name, saves={_NAME: result}) for name, result in results.items()]
    return pack(records, owner="", inline_limit=sys.maxsize)


def read(data: bytes) -> dict[str, Result | None]:
    """What ``write`` wrote.

    Raises:
        TransportError: ``data`` is no such message.
    """
    return {record.request_id: record.saves.get(_NAME) for record in unpack(data)}
