"""A call of a model with blocks beside each of its forwards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from midstream.interleaving.beside import Halt, LocalInterleaver
from midstream.interleaving.copies import BatchSizes, Rows
from midstream.interleaving.events import Check
from midstream.interleaving.locations import Location
from midstream.interleaving.run import Run
from midstream.modeling.local.hosted import LocalBlock

Handing = Callable[["Running", Any], Any]
"""Called with what a forward returned, while blocks can still meet it; gives what is returned."""


class Beside(NamedTuple):
    """A block and the rows of the batch that it is beside."""

    block: LocalBlock
    rows: Rows


class Running:
    """One call, as blocks see it: every forward of the root module is a step.

    A step lasts until the next forward begins: what the call does between two forwards, such as
    drawing a token or running an encoder first, belongs to the one before, or to the first.

    Args:
        interleaver: the model's steps.
        beside: the blocks, each with its rows.
        total: rows of the batch.
        after: hands over what lies behind the forward.

    Attributes:
        interleaver: as given.
    """

    def __init__(
        self,
        interleaver: LocalInterleaver,
        beside: Sequence[Beside],
        total: int,
        after: Handing | None = None,
    ):
        self.interleaver, self._beside, self._total = interleaver, beside, total
        self._after = after
        self._step = 0
        self._forwards = 0
        self._phase: AbstractContextManager[None] | None = None
        self._inside = False

    def call(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> Any:
        """Call a function that runs the root module; None if the blocks have ended it early."""
        replacing = self.interleaver.replacing
        self._own = replacing.forward_of("")
        self._traced = self.interleaver.traced("", self._own)
        self.interleaver.is_over = self._is_over
        with self.interleaver.called_with(args, kwargs):
            return self._call(function, args, kwargs)

    def _call(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> Any:
        finished = False
        try:
            with self.interleaver.replacing.held("", self._forward):
                self._enter_step()
                if self._is_over():
                    return None
                result = function(*args, **kwargs)
                finished = True
            return result
        except Halt:
            return None
        finally:
            self._leave_step(learned=finished)
            self._close(result if finished else None, finished)
            self.interleaver.is_over = bool

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        """Stands for the root module's forward."""
        if not self.interleaver.is_home:
            return self._own(*args, **kwargs)
        if self._inside:  # a module that calls its root again: a part of the forward under way
            return self._traced(*args, **kwargs)
        if self._forwards:
            self._leave_step(learned=True)
            self._step += 1
            self._enter_step()
            if self._is_over():
                raise Halt
        self._set_rows(*_rows_in((args, kwargs)))
        self._inside = True
        try:
            value = self._traced(*args, **kwargs)
            self._forwards += 1
            return value if self._after is None else self._after(self, value)
        finally:
            self._inside = False

    def waits_for(self, location: Location) -> bool:
        """Whether a block waits for a location."""
        return location in self.interleaver.waiting

    def hand_over(self, location: Location, value: Any, check: Check | None = None) -> Any:
        """Offer a value that is no module's to the blocks, see ``Interleaver``."""
        rows, sizes = self._rows
        return self.interleaver.hand_over(location, value, rows, sizes, check)

    def stopped_rows(self) -> list[Rows]:
        """Rows of the forward whose blocks have ended them."""
        rows, _ = self._rows
        runs = [each.block.run for each in self._beside if not each.block.is_edit]
        return [rows[run] for run in runs if run.stopped is not None]

    def _enter_step(self) -> None:
        active = [each for each in self._beside if each.block.enters_step(self._step)]
        self.interleaver.begin_step([each.block.run for each in active])
        self._rows, self.interleaver.tokens = self._spread(1), 1
        self._phase = self.interleaver.phase(*self._rows)
        self._phase.__enter__()

    def _leave_step(self, *, learned: bool) -> None:
        phase, self._phase = self._phase, None
        if phase is not None:
            phase.__exit__(None, None, None)
            self.interleaver.finish_step(learned=learned and self._forwards > 0)

    def _set_rows(self, found: int | None, tokens: int) -> None:
        """Take in how many rows a forward has: with beams, several for each one of the batch."""
        if found and found % self._total == 0:
            self._rows = self._spread(found // self._total)
            self.interleaver.set_rows(*self._rows)
            self.interleaver.tokens = tokens

    def _spread(self, times: int) -> tuple[Mapping[Run, Rows], BatchSizes]:
        rows: dict[Run, Rows] = {
            each.block.run: Rows(each.rows.start * times, each.rows.stop * times)
            for each in self._beside
        }
        return rows, BatchSizes((self._total * times,))

    def _is_over(self) -> bool:
        """Whether no block needs the forward any more: one failed, or all have stopped."""
        if not all(each.block.is_done for each in self._beside):
            return False
        blocks = [each.block for each in self._beside]
        own = [block.run for block in blocks if not block.is_edit]
        failed = any(block.run.error is not None for block in blocks)
        return failed or (bool(own) and all(run.stopped is not None for run in own))

    def _close(self, result: Any, finished: bool) -> None:
        """No forward comes any more: loops end, and what waits for the result has it."""
        blocks = [each.block for each in self._beside]
        for block in blocks:
            block.close()
            self.interleaver.let_go()
        for block in blocks:
            if block.run.waits_for_result:
                block.run.give_result(result if finished else _unfinished())
            block.run.release()


def _unfinished() -> RuntimeError:
    return RuntimeError("The call did not finish, so `tracer.result` has nothing to give.")


def _rows_in(call: tuple[tuple[Any, ...], Mapping[str, Any]]) -> tuple[int | None, int]:
    """How many rows a forward is called with, the length of its first tensor, and their tokens."""
    args, kwargs = call
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            are_ids = value.dim() == 2 and not value.is_floating_point()
            return int(value.shape[0]), int(value.shape[1]) if are_ids else 1
    return None, 1
