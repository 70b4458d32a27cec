"""Who sends copies home is told of all that blocks and caches are given, and when a step ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from midstream.interleaving.copies import Copies
from midstream.interleaving.locations import Location
from tests.interleaving.test_batches import parts_of
from tests.interleaving.test_caches import Requests, outputs, same
from tests.interleaving.toy import rows


class Arrived:
    """The spot of a copy that is there at once."""

    mirror, index = None, 0

    def __init__(self, copy: torch.Tensor):
        self._copy = copy.clone()

    def load(self) -> torch.Tensor:
        """A copy of it."""
        return self._copy.clone()


class Told:
    """Notes what it is told."""

    takes_caches = True

    def __init__(self, *, refuses: bool = False) -> None:
        self.made_of: list[tuple[Location, int, int]] = []
        self.kept: list[int] = []
        self.steps = 0
        self._refuses = refuses
        self._arrived: list[Callable[[], None]] = []

    def made(self, location: Location, leaf: int, copies: Copies) -> None:
        """Note a copy for blocks."""
        self.made_of.append((location, leaf, copies.sharers))

    def keep(self, copy: Any, runs: Any, arrived: Callable[[], None]) -> Any:
        """Take a recorded copy, which has arrived when the step ends."""
        self.kept.append(len(runs))
        if self._refuses:
            return None
        self._arrived.append(arrived)
        return Arrived(copy)

    def end_step(self) -> None:
        """Note the end of a step; copies need not be kept any longer."""
        self.steps += 1
        for arrived in self._arrived:
            arrived()
        self._arrived.clear()


def told(*blocks: Any, refuses: bool = False) -> tuple[Requests, Told]:
    """Requests, and what is told of them."""
    requests, mirroring = Requests(*blocks), Told(refuses=refuses)
    requests.interleaver.mirroring = mirroring
    return requests, mirroring


def test_copies_for_blocks() -> None:
    """One for each tensor of a value, with the blocks that share it."""

    def block(requests: Requests) -> None:
        requests.tree.root.layers[0].output
        requests.tree.root.layers[1].mlp.output

    requests, mirroring = told(block, block, lambda r: r.tree.root.layers[1].mlp.output)
    requests.step(rows(2, 1), rows(1, 2), rows(3, 3))
    by_place = {
        (location.path, location.side, leaf): count for location, leaf, count in mirroring.made_of
    }
    assert by_place["layers.1.mlp", "output", 0] == 3
    assert by_place["layers.0", "output", 0] == 2
    assert mirroring.steps == 1


def test_caches_have_what_has_arrived() -> None:
    """Copies that were let go of are read where they are; those of two requests are one."""

    def everything(requests: Requests) -> None:
        requests.open(device=torch.device("cpu"))

    for refuses in (False, True):
        requests, mirroring = told(everything, everything, refuses=refuses)
        requests.step(rows(2, 1), rows(3, 2))
        assert set(mirroring.kept) == {2}
        right = outputs(torch.cat([rows(2, 1), rows(3, 2)]))
        for cache, start, stop in zip(requests.caches, (0, 2), (2, 5), strict=True):
            assert set(cache) == set(right)
            for path in cache:
                assert same(cache[path].output, parts_of(right[path], start, stop))


def test_caches_on_another_device_stay_there() -> None:
    """Only what is wanted on the CPU may be sent home in place of being kept."""
    requests, mirroring = told(lambda r: r.open())
    requests.step(rows(2, 1))
    assert mirroring.kept == []
