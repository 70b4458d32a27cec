"""Recorded forwards, kept for the steps to come: what there is, what is missing, what has to go."""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Protocol

from midstream.interleaving.routes import Guess, Needs
from midstream.interleaving.tapped import Tapped

logger = logging.getLogger(__name__)

_MOST_ASKED = 1000


class Recorded(NamedTuple):
    """One recorded forward.

    Attributes:
        replay: runs it; called with the model's forward and its keyword arguments, returns what
            the forward returns.
        nbytes: memory that it holds.
    """

    replay: Callable[[Callable[..., Any], dict[str, Any]], Any]
    nbytes: int = 0


class Graph(NamedTuple):
    """A recorded forward and its breaks."""

    tapped: Tapped
    recorded: Recorded


class Record(Protocol):
    """Records a forward for batches of one shape."""

    def serves(self, shape: Any) -> bool:
        """Whether there can be one for a shape."""

    def __call__(self, shape: Any, tapped: Tapped) -> Recorded:
        """Record it, between two steps."""


@dataclass
class Counts:
    """What has happened to an engine's graphs.

    Attributes:
        captures: how many were captured.
        replays: steps that ran one to its end.
        wrong_guesses: steps in which a block asked for what the graph had no break for.
        evictions: how many were dropped to make room.
        held: how many there are.
        bytes: memory that these hold.
    """

    captures: int = 0
    replays: int = 0
    wrong_guesses: int = 0
    evictions: int = 0
    held: int = 0
    bytes: int = 0

    def report(self) -> dict[str, int]:
        """The counts as plain data."""
        return asdict(self)


class TappedGraphs:
    """The graphs of one worker, by the shape of the batch and by what they offer.

    Args:
        make: gives a forward with breaks at what some blocks need.
        record: records one.
        most: graphs that are held at a time; the one that ran longest ago goes first.
        most_bytes: memory that they may hold together. The last one captured always stays.
    """

    def __init__(
        self,
        make: Callable[[Needs], Tapped],
        record: Record,
        most: int,
        most_bytes: float,
    ):
        self._make, self._record = make, record
        self._most, self._most_bytes = most, most_bytes
        self._graphs: OrderedDict[tuple[Hashable, Needs], Graph] = OrderedDict()
        self._wish: tuple[Hashable, Needs] | None = None
        self._asked: Counter[tuple[Hashable, Needs]] = Counter()
        self._refused: set[Needs] = set()
        self.counts = Counts()

    def find(self, shape: Hashable, guess: Guess) -> Graph | None:
        """A graph that has what is needed; if there is none, it is captured after the step.

        Args:
            shape: the batch's, as graphs are captured for.
            guess: what is needed, and in how many steps before it is captured.
        """
        needs = guess.needs
        self._wish = None
        if not self._record.serves(shape):
            return None
        for key in reversed(self._graphs):
            if key[0] == shape and needs.within(key[1]):
                self._graphs.move_to_end(key)
                return self._graphs[key]
        if needs not in self._refused and self._ask(shape, needs) >= guess.patience:
            self._wish = shape, needs
        return None

    def _ask(self, shape: Hashable, needs: Needs) -> int:
        """How often a graph that there is not has been asked for."""
        if len(self._asked) > _MOST_ASKED:
            self._asked.clear()
        self._asked[shape, needs] += 1
        return self._asked[shape, needs]

    def forget_wish(self) -> None:
        """The step did not get to its end."""
        self._wish = None

    def capture(self) -> None:
        """Capture what the step that has ended looked for in vain."""
        wish, self._wish = self._wish, None
        if wish is None:
            return
        tapped = self._make(wish[1])
        self._make_room(self._most - 1)
        try:
            recorded = self._record(wish[0], tapped)
        except Exception:
            logger.exception("A forward with blocks could not be captured; it runs eagerly.")
            self._refused.add(wish[1])
            return
        self._graphs[wish] = Graph(tapped, recorded)
        del self._asked[wish]
        self.counts.captures += 1
        self.counts.bytes += recorded.nbytes
        self._make_room(self._most)
        self.counts.held = len(self._graphs)

    def _make_room(self, most: int) -> None:
        while len(self._graphs) > most or (
            self.counts.bytes > self._most_bytes and len(self._graphs) > 1
        ):
            _, graph = self._graphs.popitem(last=False)
            self.counts.bytes -= graph.recorded.nbytes
            self.counts.evictions += 1
        self.counts.held = len(self._graphs)

    def report(self) -> dict[str, int]:
        """The counts as plain data."""
        return self.counts.report()
