"""A request with its blocks: their steps, what is written again, and how they ended it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from midstream.errors import LimitExceededError, MidstreamError
from midstream.interleaving.replays import Replay, WriteLog
from midstream.interleaving.run import Run
from midstream.modeling.vllm.engine.blocks import HostedBlock
from midstream.modeling.vllm.engine.commons import Common, Commons
from midstream.modeling.vllm.engine.edits import InstalledEdit
from midstream.modeling.vllm.payloads import Record
from midstream.modeling.vllm.wire import FAILED, Payload

if TYPE_CHECKING:
    from midstream.modeling.vllm.engine.host import BlockHost


class Progress(NamedTuple):
    """The part of a request that a step runs.

    Attributes:
        first, stop: positions it runs, as long as they are in the prompt.
        whole: tokens of the prompt; after a preemption, with what had been drawn.
    """

    request_id: str
    first: int
    stop: int
    whole: int

    @property
    def in_prompt(self) -> bool:
        """Whether it runs anything that was known before."""
        return self.first < self.whole


class HostedRequest:
    """A request with its blocks, from its first step to its close.

    Args:
        payload: its own block, if it has one.
        host: the worker's blocks.
        ending_ids: token ids that end it.
        edits: the installed edits that run beside it.

    Attributes:
        blocks: in their turn: those of edits, and its own last.
        reported: whether it has been told that a block ended the request.
    """

    def __init__(
        self,
        request_id: str,
        payload: Payload,
        host: BlockHost,
        ending_ids: frozenset[int],
        edits: Sequence[InstalledEdit] = (),
    ):
        self.request_id, self.ending_ids = request_id, ending_ids
        self._edits = [
            HostedBlock(request_id, host, Common(edit.block), edit=edit) for edit in edits
        ]
        self._own: HostedBlock | None = None
        if payload.block:
            common, rest = _parts(payload, host.commons)
            self._own = HostedBlock(
                request_id, host, common, rest, payload.keep, stream=payload.stream
            )
            for edit in self._edits:
                edit.keeps_saves = True
        self.blocks = [*self._edits, *([self._own] if self._own is not None else [])]
        for turn, block in enumerate(self.blocks):
            block.run.turn = turn
        self.reported = False
        self._steps = 0
        self._prompt: int | None = None
        self._broken = False

    def entering(self, progress: Progress) -> list[Run]:
        """Its runs that have something to do in a step of the request, in their turn."""
        if self._prompt is None:
            self._prompt = progress.whole
        if self.how_ended():
            return []  # a step that was planned before it was known
        step = progress.whole - self._prompt if progress.in_prompt else self._steps
        if progress.stop < progress.whole or step < self._steps:
            return []  # not at the end of what is to be run, or in a step that was taken back
        self._steps = step + 1
        return [block.run for block in self.blocks if block.enters_step(step, self._prompt)]

    def replays(self, progress: Progress) -> list[Replay]:
        """What its blocks wrote in rows that a step runs anew."""
        if not (progress.in_prompt and self._steps):
            return []
        found = []
        for block in self.blocks:
            log, failed = block.run.log, partial(self._break, block)
            if log is not None and log.full:
                failed(_log_is_full(log))
            elif log:
                found.append(Replay(log, progress.first, progress.stop, failed))
        return found

    def _break(self, block: HostedBlock, error: Exception) -> None:
        """End the request: its cache would not hold what a block of it has written."""
        block.fail(error)
        self._broken = True

    def how_ended(self) -> str:
        """How a block has ended the request; an edit that failed lets it go on."""
        if self._broken:
            return FAILED
        for edit in self._edits:
            if edit.run.stopped is not None:
                return edit.how_ended()
        return self._own.how_ended() if self._own is not None else ""

    def close(self) -> bool:
        """Close its blocks; whether its own then waits for the result."""
        for block in self.blocks:
            block.close(may_wait=block is self._own)
        return self._own is not None and self._own.run.waits_for_result

    def drop(self) -> None:
        """End its blocks, of which another worker reports."""
        for block in self.blocks:
            block.run.kill()

    def give_result(self, result: Any) -> None:
        """Let its own block, which waits for it, have the result; None if it was aborted."""
        assert self._own is not None
        if result is not None and self._edits:
            edits = [edit.saves for edit in self._edits]
            result.give_saves({name: saves[name] for saves in edits for name in saves})
        self._own.run.begin_step()
        self._own.run.give_result(MidstreamError(_ABORTED) if result is None else result)

    def unsent(self) -> list[Record]:
        """Records of its blocks that have not been sent, those of edits first."""
        return [block.record() for block in self.blocks if not block.recorded]

    def finished(self) -> list[Record]:
        """What its blocks have to send while it goes on: news, and the records of ended ones."""
        news = self._own.news() if self._own is not None else []
        done = (block for block in self.blocks if block.is_done)
        return [*news, *(block.record() for block in done if not block.recorded)]

    @property
    def goes_on(self) -> bool:
        """Whether a block of it has still to send its record."""
        return not all(block.recorded for block in self.blocks)


def _parts(payload: Payload, commons: Commons) -> tuple[Common, bytes]:
    """A block's part that others share and the rest of it; a block alone has no rest."""
    if not payload.common:
        return Common(payload.block), b""
    return commons.take(payload.common), payload.block


_ABORTED = "The request was aborted before it had finished, so `tracer.result` has nothing to give."


def _log_is_full(log: WriteLog) -> LimitExceededError:
    return LimitExceededError(
        f"The request was preempted, and its block had written more than max_write_log_bytes="
        f"{log.limit:.0f}: what it wrote could not be written again. Give the engine a larger KV "
        "cache, write less, or build the model with a higher `max_write_log_bytes`."
    )
