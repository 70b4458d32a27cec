"""Which copies are sent home while later steps run: what blocks of the same code have saved."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType
from typing import Any, NamedTuple

import torch

from midstream.interleaving.copies import Copies
from midstream.interleaving.locations import Location
from midstream.interleaving.run import Run
from midstream.modeling.vllm.payloads.mirrors import Mirrors, Spot

_MOST_NOTED = 1 << 16  # copies of which it is not known yet whether blocks save them
_MOST_SAVED = 1 << 14  # tensors of a record that are looked at; more are more of the same
_MOST_CODES = 1 << 12
_UNSEEN = frozenset(("data", "imag"))
"""Attributes through which a tensor is written unseen, or has other values than its bytes say."""

Place = tuple[Location, int]
"""A location, and which tensor of its value."""


class _Noted(NamedTuple):
    """A copy of which it is not known whether blocks save rows.

    Attributes:
        visits: the step of each block's request.
    """

    place: Place
    storage: weakref.ref[Any]
    share: int
    visits: Mapping[Run, int]


class Mirroring:
    """Decides which of the copies that blocks are given are sent home at once.

    Rows are if a block of the same code has saved at least half of what it was given there, and
    only for blocks whose every change the copies' versions tell of. What caches record always is.

    Args:
        runs: the blocks of the step under way.
        mirrors: where the copies go.
    """

    takes_caches = True

    def __init__(self, runs: Callable[[], Sequence[Run]], mirrors: Mirrors):
        self._runs, self.mirrors = runs, mirrors
        self._saved: dict[str, dict[bool, frozenset[Place]]] = {}
        self._noted: list[_Noted] = []
        self._begun = False

    def follow(self, run: Run, code: CodeType | None) -> None:
        """Take in a block that is about to execute, before it is given anything."""
        if run.plain and run.code is not None and code is not None and writes_are_seen(code):
            self.mirrors.trust(run)

    def _begin(self) -> None:
        """The first copies of a step."""
        self._begun = True
        runs = [run for run in self._runs() if self.mirrors.is_trusted(run)]
        self._visits = {run: run.visit for run in runs}
        self._learns = any(run.code not in self._saved for run in runs)
        self._wanted: Counter[Place] = Counter()
        kinds = Counter((str(run.code), run.visit > 0) for run in runs)
        for (code, decodes), count in kinds.items():
            for place in self._saved.get(code, {}).get(decodes, ()):
                self._wanted[place] += count
        self._readers = frozenset(run for run in runs if run.code in self._saved)

    def made(self, location: Location, leaf: int, copies: Copies) -> None:
        """Send a copy home if most of those who share it save it."""
        if not self._begun:
            self._begin()
        place = location, leaf
        if 2 * self._wanted[place] >= copies.sharers:
            self.mirrors.add(copies.hull, self._readers)
        elif self._learns and len(self._noted) < _MOST_NOTED:
            share = copies.hull.nbytes // copies.sharers
            self._noted.append(_Noted(place, copies.storage, share, self._visits))

    def keep(
        self, copy: torch.Tensor, runs: frozenset[Run], arrived: Callable[[], None]
    ) -> Spot | None:
        """Send home what caches have recorded."""
        return self.mirrors.add(copy, runs, arrived)

    def end_step(self) -> None:
        """Have what has come written, if it is worth it."""
        self._begun = False
        self.mirrors.end_step()

    def learn(self, run: Run, saves: Mapping[str, Any]) -> None:
        """Take in what a block has saved; what blocks of its code save from now on is mirrored."""
        code = run.code
        if code is None or code in self._saved or not self.mirrors.is_trusted(run):
            return
        if len(self._saved) >= _MOST_CODES:
            self._saved.clear()
        self._saved[code] = self._places(run, saves)
        self._noted = [noted for noted in self._noted if noted.storage() is not None]
        if not any(self._is_unknown(run) for noted in self._noted[-1:] for run in noted.visits):
            self._noted.clear()

    def _is_unknown(self, run: Run) -> bool:
        return run.code is not None and run.code not in self._saved

    def _places(self, run: Run, saves: Mapping[str, Any]) -> dict[bool, frozenset[Place]]:
        noted = {id(found): each for each in self._noted if (found := each.storage()) is not None}
        counts: Counter[int] = Counter()
        for tensor in _tensors(saves):
            storage = id(tensor.untyped_storage())
            if storage in noted:
                counts[storage] += tensor.nbytes
        places: dict[bool, set[Place]] = {False: set(), True: set()}
        for storage, size in counts.items():
            each = noted[storage]
            if run in each.visits and 2 * size >= each.share:
                places[each.visits[run] > 0].add(each.place)
        return {decodes: frozenset(found) for decodes, found in places.items()}


def writes_are_seen(code: CodeType) -> bool:
    """Whether versions tell of all that plain code writes; comprehensions are code of their own."""
    inner = (const for const in code.co_consts if isinstance(const, CodeType))
    return _UNSEEN.isdisjoint(code.co_names) and all(map(writes_are_seen, inner))


def _tensors(saves: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """Tensors in nested lists and dictionaries; not all if there are very many."""
    left, seen, count = list(saves.values()), set[int](), 0
    while left and count < _MOST_SAVED:
        value = left.pop()
        if type(value) is torch.Tensor:
            count += 1
            if value.layout is torch.strided:
                yield value
        elif type(value) in (list, tuple, dict) and id(value) not in seen:
            seen.add(id(value))
            left += value.values() if type(value) is dict else value
