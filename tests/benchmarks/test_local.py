"""The benchmark of models in the caller's own process."""

from __future__ import annotations

import re

import pytest
import torch

from benchmarks import local
from benchmarks.table import turns_us


def test_tables_have_a_time_in_every_row() -> None:
    """All works run, by hand and with midstream, read the same, and are timed."""
    note, model, toy = local.sections(rounds=2, toy_rounds=2, tiny=True)
    assert "hooks" in note
    rows = [line.split(" | ") for line in model.splitlines() if line.startswith("| ")][2:]
    assert len(rows) == len(local.ROWS)
    for row in rows:
        assert all(float(cell) > 0 for cell in row[1:3])
        assert re.match(r"\d+\.\d{3} \(\d+\.\d{3} to \d+\.\d{3}\)", row[4])
    assert sum(line.startswith("| ") for line in toy.splitlines()) == 2 + 7


@pytest.mark.parametrize("got", [[], [torch.zeros(1, 2)], [torch.ones(2)]])
def test_what_reads_something_else_is_not_timed(got: list[torch.Tensor]) -> None:
    """A value that is missing, another, or of another shape ends the run."""
    with pytest.raises(ValueError, match="midstream: .*by hand"):
        local.compare([torch.ones(1, 2)], got, "midstream")


def test_a_missing_library_is_named() -> None:
    """A way without times shows why, and has no ratio."""
    times: local.Times = {"hooks": [2.0, 4.0], "midstream": [3.0, 4.0], "nnsight": "it failed"}
    assert local.shown(times, "midstream", 1, 1) == "3.5"
    assert local.shown(times, "nnsight", 1, 1) == "it failed"
    assert local.shown({"hooks": [1.0]}, "nnsight", 1, 1) == "not installed"
    assert local.spread(times, "midstream") == "1.250 (1.125 to 1.375)"
    assert local.spread(times, "nnsight") == ""


def test_works_take_turns() -> None:
    """Every round runs all works once, and begins with the next one; warm rounds are not timed."""
    ran: list[str] = []
    ticks = iter(range(100))
    works = [lambda: ran.append("a"), lambda: ran.append("b")]
    times = turns_us(works, repeats=2, warm=1, clock=lambda: float(next(ticks)))
    assert ran == ["a", "b", "b", "a", "a", "b"]
    assert times == [[1e6, 1e6], [1e6, 1e6]]
