"""What a step records for several requests, and each cache's share of it until it is read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import torch

from midstream.interleaving.batches import Call, Form, Kept, Spans
from midstream.interleaving.caches import Values
from midstream.interleaving.copies import Rows
from midstream.interleaving.locations import Location
from midstream.interleaving.snapshots import Snapshots
from midstream.interleaving.structure import flatten


class Sheet:
    """What is recorded for several requests in one step, with the same copies for all of them.

    Attributes:
        kept: in the order of the calls.
        ended: whether the step has, so that nothing is added.
        form: in which values are kept from now on.
    """

    def __init__(self, spans: Sequence[Rows], form: Form):
        self.spans, self.form = Spans(spans), form
        self.kept: list[Kept] = []
        self.ended = False
        self._a_row = self._whole = 0

    def add(self, location: Location, number: int, call: Call) -> Kept:
        """Copy the requests' rows of a value."""
        kept = Kept(location, number, call, self.spans, self.form)
        self._a_row += kept.a_row
        self._whole += kept.whole
        self.kept.append(kept)
        return kept

    def bytes_of(self, rows: int) -> int:
        """How much is kept for a request with so many rows."""
        return self._a_row * rows + self._whole


class Part(NamedTuple):
    """One cache's part of a sheet: some of its calls, and its own rows of their copies."""

    sheet: Sheet
    first: int
    stop: int
    start: int
    rows: int


class Share:
    """One cache's part of a sheet, until it is looked at.

    Args:
        place: which piece of the copies is its own.
        rows: how many that has.
    """

    def __init__(self, sheet: Sheet, place: int, rows: int):
        self._sheet, self._place, self._rows = sheet, place, rows
        self._taken = 0  # of what the sheet keeps
        self._stop: int | None = None
        self._sure = 0
        self._counted = self._moved = 0  # bytes: of all, and of what is elsewhere
        self._holders: list[_Holder] = []

    @property
    def is_used_up(self) -> bool:
        """Whether nothing more can come of it."""
        return self._sheet.ended

    def count(self, snapshots: Snapshots) -> None:
        """Count what has come since the last time.

        Raises:
            LimitExceededError: the block would hold too much; what has come is not taken then.
        """
        size = self._sheet.bytes_of(self._rows)
        if size > self._counted:
            self._holders.append(_Holder())
            try:
                snapshots.hold_while(self._holders[-1], size - self._counted)
            except Exception:
                self._stop = self._sure
                raise
        self._counted, self._sure = size, len(self._sheet.kept)

    @property
    def unseen(self) -> Iterable[tuple[Kept, int]]:
        """What has come since the last time, with its place there."""
        return zip(self._sheet.kept[self._taken : self._stop], repeat(self._place))

    @property
    def unseen_bytes(self) -> int:
        """How much has come since the last time."""
        return self._counted - self._moved

    @property
    def part(self) -> Part | None:
        """What has come since the last time; None if a copy of it stays here."""
        stop = len(self._sheet.kept[: self._stop])
        if not self._sheet.ended or any(kept.spots is None for kept in self._sheet.kept):
            return None
        start = self._sheet.spans.starts[self._place]
        return Part(self._sheet, self._taken, stop, start, self._rows)

    def take(self) -> None:
        """Note that all of it is elsewhere, where it is counted."""
        self._taken = self._sure = len(self._sheet.kept[: self._stop])
        self._counted = self._moved = self._sheet.bytes_of(self._rows)
        self._holders.clear()


class _Holder:
    """Its life is that of the rows a cache has and nobody has looked at."""


class Unseen:
    """What has been recorded into a cache and nobody has looked at. It dies with the cache."""

    def __init__(self, snapshots: Snapshots):
        self._snapshots = snapshots
        self.shares: list[Share] = []

    def move_to(self, visits: Values) -> None:
        """Put it where it is read.

        Raises:
            LimitExceededError: the block would hold too much.
        """
        if self.shares:
            self._snapshots.add(
                leaf for value in self._moved_to(visits) for leaf in flatten(value)[0]
            )

    @property
    def bytes(self) -> int:
        """How much it is."""
        return sum(share.unseen_bytes for share in self.shares)

    def parts(self) -> list[Part] | None:
        """Where it lies in copies that are sent home; None if one of them is not."""
        parts = [share.part for share in self.shares]
        if any(part is None for part in parts):
            return None
        return [part for part in parts if part is not None and part.first < part.stop]

    def settle(self, visits: Values) -> None:
        """Put it where it is read, when no block reads any more."""
        self._moved_to(visits)

    def _moved_to(self, visits: Values) -> list[Any]:
        shares = self.shares
        found = [each for share in shares for each in share.unseen]
        found.sort(key=lambda each: each[0].number)  # a step may have filled several sheets
        _wait_for(kept for kept, _ in found)
        values = [kept.value(place) for kept, place in found]  # may fail: nothing has moved yet
        for share in shares:
            share.take()
        self.shares = [share for share in shares if not share.is_used_up]
        for (kept, _), value in zip(found, values, strict=True):
            path, side, _ = kept.location
            sides = visits.setdefault(path, {})
            sides.setdefault("inputs" if side == "input" else side, []).append(value)
        return values


def _wait_for(several: Iterable[Kept]) -> None:
    """Wait for copies that are under way."""
    late = [kept for kept in several if kept.under_way]
    if late:
        torch.cuda.synchronize()
    for kept in late:
        kept.under_way = False
