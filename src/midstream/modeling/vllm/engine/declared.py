"""Declared taps in a worker: what they name there, and the graphs captured for them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Sequence
from time import perf_counter
from typing import Any, Protocol

from midstream.errors import EngineBuildError, SourceNotAvailableError
from midstream.interleaving.declared import Declared
from midstream.interleaving.locations import Location
from midstream.interleaving.node import Tree
from midstream.interleaving.routes import Guess, Needs
from midstream.interleaving.source import find_source
from midstream.interleaving.tapped import Tapped
from midstream.modeling.vllm.engine.graphs import Counts, Graph, Record

logger = logging.getLogger(__name__)

_SAMPLES = 2  # the largest ones, as vLLM's own estimate takes
_LEAST = 1 << 20  # bytes that a graph takes in the driver


def declared(tree: Tree, taps: Sequence[Sequence[Any]]) -> Declared | None:
    """The locations that this worker's blocks may ask for.

    Args:
        tree: the model that was loaded.
        taps: the locations as the client found them in the tree without weights; none for all.

    Raises:
        EngineBuildError: the loaded model lacks one of them.
    """
    locations = [Location(*tap) for tap in taps]
    for location in locations:
        _check(tree, location)
    return Declared(locations) if locations else None


def _check(tree: Tree, location: Location) -> None:
    try:
        found = tree.nodes.get(location.path) or find_source(tree, location.path)
    except (AttributeError, SourceNotAvailableError) as error:
        raise EngineBuildError(f"taps: '{location.path}.{location.side}': {error}") from None
    if found is None:
        raise EngineBuildError(
            f"taps: '{location.path}.{location.side}' names nothing in the model that was loaded."
        )


def warn_without_graphs() -> None:
    """Tell that an engine with taps captures nothing for them."""
    logger.warning(
        "Declared taps are served, but by eager steps: graphs with breaks need an engine that "
        "replays whole decode steps as CUDA graphs, on one GPU, without adapters and of text alone."
    )


class RecordAll(Record, Protocol):
    """Records a forward for all shapes that it can be recorded for."""

    def shapes(self) -> Sequence[Hashable]:
        """Those shapes, the one that takes most memory first."""


class DeclaredGraphs:
    """The graphs of one worker with declared taps, by the shape of the batch.

    All are captured when the engine is built. In the place of ``TappedGraphs``.

    Args:
        make: gives a forward with breaks at what was declared.
        record: records one.
        needs: what was declared.
    """

    def __init__(self, make: Callable[[Needs], Tapped], record: RecordAll, needs: Needs):
        self._make, self._record, self._needs = make, record, needs
        self._graphs: dict[Hashable, Graph] = {}
        self.counts = Counts()

    def capture_all(self) -> int:
        """Capture the graphs; the bytes that they take.

        Raises:
            EngineBuildError: one cannot be captured; with the reason.
        """
        began = perf_counter()
        shapes = self._record.shapes()
        if not shapes:
            warn_without_graphs()
        for shape, graph in self._captured(shapes):
            self._graphs[shape] = graph
            self.counts.captures += 1
            self.counts.bytes += graph.recorded.nbytes
        self.counts.held = len(self._graphs)
        logger.info(
            "Captured %d graphs with breaks at %d taps: %.2f GiB, %.1f s.",
            *(self.counts.held, len(self._needs.locations)),
            *(self.counts.bytes / (1 << 30), perf_counter() - began),
        )
        return self.counts.bytes

    def estimate(self) -> int:
        """Bytes that all graphs will take, from the largest ones, which are not kept.

        As in vLLM's own estimate the first sample stands for what all share.
        """
        shapes = self._record.shapes()
        samples = [graph.recorded.nbytes for _, graph in self._captured(shapes[:_SAMPLES])]
        if not samples:
            return 0
        return samples[0] + (len(shapes) - 1) * max(_LEAST, *samples[1:], 0)

    def _captured(self, shapes: Iterable[Any]) -> Iterable[tuple[Hashable, Graph]]:
        for shape in shapes:
            tapped = self._make(self._needs)
            try:
                recorded = self._record(shape, tapped)
            except Exception as error:
                raise EngineBuildError(
                    "The decode steps with breaks at the declared taps could not be captured: "
                    f"{type(error).__name__}: {error}\nDeclare fewer or other taps, or leave taps= "
                    "out to be served everywhere."
                ) from error
            yield shape, Graph(tapped, recorded)

    def find(self, shape: Hashable, guess: Guess) -> Graph | None:
        """The graph of a shape; None for one that vLLM has no graph for either."""
        return self._graphs.get(shape)

    def forget_wish(self) -> None:
        """Nothing is wished for."""

    def capture(self) -> None:
        """Nothing is captured behind a step."""

    def report(self) -> dict[str, int]:
        """The counts as plain data."""
        return self.counts.report()
