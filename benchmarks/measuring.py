"""Times of one process of the GPU benchmark, written down after every one of them."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Facts = Mapping[str, Any] | None
Work = Callable[[], Facts]
"""What is timed. It may return facts: ``seconds`` in place of its own time, ``bytes``, ``note``."""


@dataclass
class Cell:
    """One measurement.

    Attributes:
        row: id of its row.
        requests: how many at a time.
        run: "first" of a block, or "" for the following ones.
        base: what to look up in plain vLLM's process: a work and its number of requests.
        steps: what to divide the time by.
        seconds: median; None if there is none.
        runs: how many the median is of.
        facts: what the work told beside, and what the engine counted meanwhile.
        error: first line of the error that ended it.
    """

    row: str
    requests: int
    run: str = ""
    base: str = ""
    steps: int = 1
    seconds: float | None = None
    runs: int = 0
    facts: dict[str, Any] = field(default_factory=dict)
    error: str = ""


@dataclass
class Results:
    """What one process has measured."""

    cells: list[Cell] = field(default_factory=list)
    error: str = ""

    @classmethod
    def read(cls, path: Path) -> Results:
        """Results that a process has written so far; none before it has."""
        if not path.exists():
            return cls()
        found = json.loads(path.read_text())
        return cls([Cell(**cell) for cell in found["cells"]], found["error"])

    def write(self, path: Path) -> None:
        """Write the results so that nobody reads half of them."""
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(dataclasses.asdict(self)))
        os.replace(partial, path)


class Recorder:
    """Times works, and writes after each what there is.

    Args:
        path: file of the results.
        repeats: runs of a work that its median is of.
        deadline: on ``time.time()``; no work begins after it.
        patience: seconds after which a work is not run again, whatever ``repeats`` says.
        counts: counters of the engine; their differences are noted.
    """

    def __init__(
        self,
        path: Path,
        *,
        repeats: int,
        deadline: float,
        patience: float,
        counts: Callable[[], Mapping[str, float]] = dict,
    ):
        self.path, self.repeats, self.deadline, self.patience = path, repeats, deadline, patience
        self.counts, self.results = counts, Results()
        self.flush()

    @property
    def is_late(self) -> bool:
        """Whether nothing more should begin."""
        return time.time() > self.deadline

    def measure(
        self,
        row: str,
        requests: int,
        work: Work,
        *,
        base: str = "",
        steps: int = 1,
        keeps_first: bool = False,
        repeats: int | None = None,
        warms_up: bool = True,
    ) -> None:
        """Run a work once, then again for its median. What it raises is its row's error.

        Args:
            keeps_first: the first run is a result of its own, and no mere warming up.
            repeats: in place of the recorder's.
            warms_up: False leaves the first run out.
        """
        if self.is_late:
            return
        again = Cell(row, requests, "", base, steps)
        first = dataclasses.replace(again, run="first", facts={})
        try:
            spent = self._fill(first, work, 1) if warms_up else 0.0
            if keeps_first:
                self.add(first)
            self._fill(again, work, repeats or self.repeats, spent)
        except Exception as error:  # noqa: BLE001  # a row that fails must not end the others
            again.error = first_line(error)
        self.add(again)

    def _fill(self, cell: Cell, work: Work, repeats: int, spent: float = 0.0) -> float:
        before, times = self.counts(), []
        for _ in range(repeats):
            seconds, facts = timed(work)
            cell.facts |= facts
            times.append(cell.facts.pop("seconds", seconds))
            spent += seconds
            if spent > self.patience or self.is_late:
                break
        cell.seconds, cell.runs = statistics.median(times), len(times)
        after = self.counts()
        counted = {name: after[name] - before.get(name, 0) for name in after}
        cell.facts["counts"] = {name: number for name, number in counted.items() if number}
        return spent

    def add(self, cell: Cell) -> None:
        """Take a measurement in."""
        self.results.cells.append(cell)
        self.flush()
        state = cell.error or f"{cell.seconds or 0:.4f} s"
        print(f"{cell.row}, {cell.requests} requests {cell.run}: {state}", flush=True)

    def fail(self, error: Exception) -> None:
        """Note that the whole process failed."""
        self.results.error = first_line(error)
        self.flush()

    def flush(self) -> None:
        """Write what there is."""
        self.results.write(self.path)


def timed(work: Work) -> tuple[float, dict[str, Any]]:
    """Seconds of one run, and its facts."""
    start = time.perf_counter()
    facts = work()
    return time.perf_counter() - start, dict(facts or {})


def first_line(error: BaseException) -> str:
    """Kind and beginning of an error, for a cell of a table."""
    text = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {text}"[:200].replace("|", "\\|")
