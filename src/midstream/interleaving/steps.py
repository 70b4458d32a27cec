"""`tracer.iter`: a loop over the steps of one request."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

from midstream.errors import StepsCutShortWarning

if TYPE_CHECKING:
    from midstream.interleaving.run import Run


_HELD = (
    "`ignore_eos=True` or `min_tokens` and a large enough `max_tokens` hold a request to a number "
    "of steps."
)


class Steps:
    """The steps of a request, to loop over: step 0 runs the prompt, step k gives token k.

    ``for step in tracer.iter[:3]`` runs its body in steps 0, 1 and 2; ``iter[a:b]``, ``iter[a:]``,
    ``iter[a:b:c]``, ``iter[k]`` and ``iter[[0, 4]]`` run it in those. A slice without a start
    begins with the step the block is in. The loop ends when the request does; one that asked for
    more steps then warns.

    Args:
        run: the block's.
        advice: end of that warning: how to get as many steps as one asks for.
    """

    def __init__(self, run: Run, advice: str = _HELD):
        self._run, self._advice = run, advice

    def __getitem__(self, which: int | slice | Sequence[int]) -> Iterator[int]:
        steps, asked = self._chosen(which)
        return self._loop(steps, asked, steps[-1] if isinstance(steps, range) and steps else None)

    def _chosen(self, which: int | slice | Sequence[int]) -> tuple[Iterable[int], int | None]:
        """The steps' numbers, and how many they are where that is known.

        Raises:
            ValueError: a negative step.
            TypeError: neither a number, a slice nor a list of numbers.
        """
        if isinstance(which, slice):
            begin = self._run.visit if which.start is None else _number(which.start)
            every = 1 if which.step is None else _number(which.step)
            if not every:
                raise ValueError(
                    "`tracer.iter[a:b:c]` takes every c-th step; c is 1 or more, got 0."
                )
            if which.stop is None:
                return count(begin, every), None
            steps = range(begin, _number(which.stop), every)
            return steps, len(steps)
        numbers = _numbers(which)
        return numbers, len(numbers)

    def _loop(self, which: Iterable[int], asked: int | None, last: int | None) -> Iterator[int]:
        steps = enumerate(which)
        for ran, step in steps:
            self._run.last_step = last
            goes_on = self._run.enter(step)
            while step <= self._run.stood:
                ran, step = next(steps)  # it has been done in the block's place
            if not goes_on:
                if asked is not None:
                    text = f"The loop asked for {asked} steps and the request ran {ran} of them. "
                    self._run.warn(text + self._advice, StepsCutShortWarning)
                return
            yield step


def _numbers(which: Any) -> list[int]:
    try:
        return [_number(which)]
    except TypeError:
        if isinstance(which, str) or not isinstance(which, Iterable):
            raise
    return [_number(each) for each in which]


def _number(value: Any) -> int:
    """A step's number; numpy's and PyTorch's integers count as such."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise TypeError(
            f"A step is a whole number; got {type(value).__name__}. `tracer.iter[...]` takes one, "
            "a slice, or a list of them."
        )
    if number < 0:
        raise ValueError(f"A step cannot be negative; got {number}. Steps are counted from 0.")
    return number
