"""What blocks that only compute need of the thread, set once for many visits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from midstream.interleaving.modes import BlockGuard
from midstream.interleaving.printing import Output


class Neutral:
    """The thread's modes and streams as every block finds them at first.

    A block that leaves all of them alone can be switched into while this is entered, at a tenth of
    what an exchange around each switch takes. What it warns about still goes to its own output.

    Attributes:
        entered: whether the thread is in this state.
    """

    def __init__(self) -> None:
        self._output, self._guard = Output(), BlockGuard()
        self.entered = False

    def __enter__(self) -> None:
        self._guard.__enter__()
        self._output.__enter__()
        self.entered = True

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self.entered = False
        self._output.__exit__(kind, error, traceback)
        self._guard.__exit__()

    @contextmanager
    def left(self) -> Iterator[None]:
        """Let the thread be as the engine has it, for a visit that needs an exchange."""
        self.__exit__(None, None, None)
        try:
            yield
        finally:
            self.__enter__()


NEUTRAL = Neutral()
"""There is one set of them: an engine's forward runs in one thread at a time."""
