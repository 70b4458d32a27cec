"""Parts of the GPU benchmark that need no engine."""

from __future__ import annotations

import inspect
import math
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import blocks, modes, report, shapes, traced
from benchmarks.arrivals import Flow, Schedule
from benchmarks.measuring import Cell, Recorder, Results
from midstream.errors import EngineDeadError

SCALE = shapes.full((1, 8, 64), 128)


def recorder(path: Path, **how: Any) -> Recorder:
    return Recorder(path, **{"repeats": 3, "deadline": math.inf, "patience": 60.0, **how})


def test_a_row_that_raises_does_not_end_the_run(tmp_path: Path) -> None:
    """A failed work leaves the first line of its error, and the next is measured."""
    path = tmp_path / "found.json"
    taken = recorder(path)

    def fails() -> None:
        raise ValueError("no such thing\nand more")

    taken.measure("idle", 1, fails)
    taken.measure("idle", 8, lambda: {"bytes": 5}, keeps_first=True)
    failed, first, again = Results.read(path).cells
    assert (failed.error, failed.seconds) == ("ValueError: no such thing", None)
    assert (first.run, first.runs, first.error) == ("first", 1, "")
    assert (again.run, again.runs, again.facts["bytes"]) == ("", 3, 5)


def test_median_of_what_the_work_reports(tmp_path: Path) -> None:
    """Seconds that a work reports stand in place of its own time; the first run does not count."""
    reported = iter([100.0, 1.0, 9.0, 2.0])
    taken = recorder(tmp_path / "found.json")
    taken.measure("half", 1, lambda: {"seconds": next(reported)})
    assert [cell.seconds for cell in taken.results.cells] == [2.0]


def test_no_row_begins_after_the_deadline(tmp_path: Path) -> None:
    """What is due after the deadline is left out, and a slow work is not run again."""
    late = recorder(tmp_path / "late.json", deadline=time.time() - 1)
    late.measure("idle", 1, pytest.fail)
    assert late.results.cells == []
    slow = recorder(tmp_path / "slow.json", patience=0.0)
    slow.measure("idle", 1, lambda: None)
    assert slow.results.cells[0].runs == 1


def test_counts_are_differences(tmp_path: Path) -> None:
    """What the engine counted during a line's runs is noted, without what stood still."""
    numbers = iter([10, 11, 11, 14])
    taken = recorder(tmp_path / "found.json", counts=lambda: {"eager": next(numbers), "other": 3})
    taken.measure("idle", 1, lambda: None, keeps_first=True)
    assert [cell.facts["counts"] for cell in taken.results.cells] == [{"eager": 1}, {"eager": 3}]


def test_table_compares_with_the_mean_of_plain() -> None:
    """A share is of the mean of plain vLLM's two processes, with its aim and whether it is met."""
    found = {
        report.PLAIN_FIRST: Results([Cell("decode", 8, steps=128, seconds=0.7)]),
        report.PLAIN_LAST: Results([Cell("decode", 8, steps=128, seconds=0.74)]),
        report.OURS: Results(
            [
                Cell("one-layer", 8, "first", "decode", 128, 1.0, 1),
                Cell("one-layer", 8, "", "decode", 128, 0.75, 5),
            ]
        ),
    }
    *_, table = report.sections(found, SCALE, ["one-layer", "steer"])
    first, again = table.splitlines()[-2:]
    assert "| first | 7.81 ms a step | 5.62 ms a step | 0.720 | ≥ 0.80 | no |" in first
    assert "| 5.86 ms a step | 5.62 ms a step | 0.960 | ≥ 0.90 | yes | 5 |" in again


def test_table_names_what_is_missing() -> None:
    """Rows that failed, were not reached, or lost their process are told."""
    cells = [Cell("idle", 1, error="KeyError: 3"), Cell("memory", 8, facts={"held": 4e8})]
    text = "\n".join(
        report.sections(
            {report.OURS: Results(cells, "OSError: x")}, SCALE, ["idle", "memory", "steer"]
        )
    )
    assert "failed: KeyError: 3" in text
    assert "The process `midstream` failed: OSError: x" in text
    assert "Not measured: steer." in text
    assert "| 0.40 GB | ≤ 0.3 GB | no |" in text


def test_arrivals_keep_as_many_in_flight_as_asked() -> None:
    """Poisson arrivals of random lengths have the wanted number in flight, and all end."""
    schedule, running, ended = Schedule.poisson(SCALE), {}, []

    def add(number: int) -> str:
        running[str(number)] = schedule.lengths[number]
        return str(number)

    def step() -> list[Any]:
        done = [name for name, left in running.items() if left == 1]
        ended.extend(done)
        for name in done:
            del running[name]
        running.update({name: left - 1 for name, left in running.items()})
        return [SimpleNamespace(request_id=name, finished=True) for name in done]

    flow = Flow(schedule, add, step)
    flow.begin()
    assert len(running) == SCALE.in_flight
    while running:
        flow.step()
    assert not flow.has_more
    assert len(flow.ended) == len(ended) == SCALE.in_flight + SCALE.arrivals
    assert flow.mean_running == pytest.approx(SCALE.in_flight, rel=0.25)
    assert 0.35 < sum(schedule.traced) / len(schedule.traced) < 0.65


def test_next_request_comes_when_nobody_runs() -> None:
    """Where all have left before the next is due, it comes at once: no step is empty."""
    schedule = Schedule(due=(0, 50), lengths=(1, 1), traced=(False, True))
    added: list[int] = []

    def add(number: int) -> str:
        added.append(number)
        return str(number)

    flow = Flow(schedule, add, lambda: [SimpleNamespace(request_id=str(added[-1]), finished=True)])
    flow.begin()
    assert added == [0]
    flow.step()
    assert added == [0, 1]


def test_fresh_copies_have_blocks_of_their_own() -> None:
    """A copy's block differs in its text from the original's and from any other copy's."""
    for function in (blocks.read_one, blocks.read_prompt, blocks.record_all, blocks.follow):
        texts = {inspect.getsource(each) for each in (function, *map(blocks.fresh, [function] * 2))}
        assert len({text.partition("tracer.invoke")[2] or text for text in texts}) == 3


def test_prompts_are_the_same_in_every_process() -> None:
    """Prompts are drawn alike each time, and differ from each other."""
    prompts = SCALE.prompts(64)
    assert prompts == SCALE.prompts(64)
    assert len(set(map(tuple, prompts))) == 64
    assert {len(prompt) for prompt in prompts} == {64}


def test_dead_engine_is_built_again_before_a_row() -> None:
    """An engine that a row has ended is closed and built before the next row is timed."""
    done: list[str] = []

    def stats() -> None:
        raise EngineDeadError("it ended")

    modes.revive(
        SimpleNamespace(
            stats=stats, close=lambda: done.append("close"), dispatch=lambda: done.append("build")
        )
    )
    assert done == ["close", "build"]


@dataclass
class Graphs:
    captures: int = 3
    wrong_guesses: int = 1
    bytes: int = 1000
    sizes: tuple[int, ...] = (1, 8)


@pytest.mark.parametrize("graphs", [Graphs(), vars(Graphs())], ids=["object", "mapping"])
def test_counts_take_in_graphs(graphs: Any) -> None:
    """Numbers of the engine's graphs count beside its steps; an engine without them has none."""
    model = SimpleNamespace(stats=lambda: SimpleNamespace(steps={"eager": 2}, graphs=graphs))
    assert traced.counts(model) == {
        "eager steps": 2,
        "graph captures": 3,
        "graph wrong guesses": 1,
        "graph bytes": 1000,
    }
    bare = SimpleNamespace(stats=lambda: SimpleNamespace(steps={"eager": 2}))
    assert traced.counts(bare) == {"eager steps": 2}


def test_memory_is_what_the_sizes_add(tmp_path: Path) -> None:
    """Bytes of graphs are what one block adds that meets every batch size; without graphs, told."""
    seen: list[int] = []

    def block(model: Any, layer: Any, prompts: list[Any], settings: Any) -> None:
        seen.append(len(prompts))

    model = SimpleNamespace(model=SimpleNamespace(layers=[0, 1, 2, 3]))
    taken = recorder(tmp_path / "found.json")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "fresh", lambda function: block)
        for graphs in (lambda: {"bytes": 100 + 10 * len(seen)}, lambda: None):
            model.stats = lambda graphs=graphs: SimpleNamespace(steps={}, graphs=graphs())
            traced.Traced(model, taken, SCALE).memory()
    counted, told = taken.results.cells
    assert seen[: len(seen) // 2] == [size for size in SCALE.sizes for _ in range(2)]
    assert (counted.facts["held"], counted.requests) == (160, 8)
    assert "no graphs" in told.error
