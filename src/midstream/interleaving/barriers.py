"""`tracer.barrier`: blocks of one trace that wait for each other."""

from __future__ import annotations

import operator

from midstream.interleaving.beside import LocalInterleaver, LocalRun
from midstream.interleaving.run import current_run


class Barrier:
    """A place in the code of several blocks that each leaves when all have come to it.

    Args:
        count: how many blocks it is for.

    Raises:
        ValueError: fewer than one.
        TypeError: not a whole number.
    """

    def __init__(self, count: int):
        self._count = operator.index(count)
        if self._count < 1:
            raise ValueError(f"A barrier is for at least one block; got {count}.")
        self._waiting: list[LocalRun] = []

    def __call__(self) -> None:
        """Wait until as many blocks as the barrier is for have called it. It can be used again.

        Raises:
            ValueError: the trace has ended and too few blocks came.
            NotInTraceError: outside a running block.
        """
        run = current_run("a barrier")
        assert isinstance(run, LocalRun)
        if len(self._waiting) + 1 < self._count:
            self._waiting.append(run)
            run.wait_for_others(self)
            return
        others, self._waiting = self._waiting, []
        assert isinstance(run.interleaver, LocalInterleaver)
        run.interleaver.released += others

    def broken(self) -> ValueError:
        """The error for those that wait when the trace has ended."""
        return ValueError(
            f"The barrier is for {self._count} blocks, and {len(self._waiting)} came to it. Call "
            "it in each of them, or give `tracer.barrier()` the number of those that do."
        )
