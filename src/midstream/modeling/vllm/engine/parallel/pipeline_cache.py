"""`tracer.cache` over several stages: each records its own modules, the last one has the cache."""

from __future__ import annotations

from collections.abc import Sequence

from midstream.errors import LimitExceededError, UnsupportedError
from midstream.interleaving.caches import Unread, Values
from midstream.interleaving.recording import Recorder
from midstream.interleaving.run import Run, running
from midstream.interleaving.structure import flatten


class _Guard:
    """In the place of what a cache has and nobody has looked at; inside a block it refuses."""

    def __init__(self, unread: Unread):
        self._unread = unread  # lives as long as the cache

    @property
    def bytes(self) -> int:
        """How much there is of it."""
        return self._unread.bytes

    def move_to(self, visits: Values) -> None:
        """Put it where it is read.

        Raises:
            UnsupportedError: inside a block, which other stages run with another part of it.
        """
        if running() is not None:
            raise UnsupportedError(
                "Reading a cache inside the block is not supported with pipeline parallelism: no "
                "stage has all of it before the request has ended. Read it after the `with`, or "
                "read the modules themselves."
            )
        self._unread.move_to(visits)


def guard(recorders: Sequence[Recorder]) -> None:
    """Have caches refuse to be read in a block."""
    for recorder in recorders:
        cache = recorder._cache()
        unread = None if cache is None else cache.__dict__.get("_unread")
        if cache is not None and unread is not None and not isinstance(unread, _Guard):
            cache.__dict__["_unread"] = _Guard(unread)


def take(recorders: Sequence[Recorder]) -> list[Values]:
    """Take what this stage has recorded out of each cache."""
    found: list[Values] = []
    for recorder in recorders:
        values: Values = {}
        unseen = recorder._unseen()
        if unseen is not None:
            unseen.settle(values)
        found.append(values)
    return found


def give(run: Run, stages: Sequence[Sequence[Values]]) -> None:
    """Put what earlier stages have recorded into the caches of the last one."""
    for recorded in stages:
        for recorder, values in zip(run.recorders, recorded, strict=False):
            cache = recorder._cache()
            if cache is not None:
                _add(cache.__dict__["visits"], values)
                _count(run, recorder, values)


def _add(visits: Values, values: Values) -> None:
    for path, sides in values.items():
        for side, calls in sides.items():
            visits.setdefault(path, {}).setdefault(side, []).extend(calls)


def _count(run: Run, recorder: Recorder, values: Values) -> None:
    calls = (call for sides in values.values() for several in sides.values() for call in several)
    try:
        recorder.snapshots.add(leaf for call in calls for leaf in flatten(call)[0])
    except LimitExceededError as error:
        run.fail(error)
