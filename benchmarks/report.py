"""What the processes of the GPU benchmark measured, as a table."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from benchmarks.catalogue import ROWS, Row
from benchmarks.measuring import Cell, Results
from benchmarks.shapes import Scale
from benchmarks.table import markdown

PLAIN_FIRST, OURS, PLAIN_LAST = "plain-first", "midstream", "plain-last"
MODES = (PLAIN_FIRST, OURS, PLAIN_LAST)
_HEADER = ("row", "requests", "run", "time", "plain", "result", "aim", "met", "runs", "notes")
_PLAIN_HEADER = ("plain vLLM", "requests", "first", "last", "last / first")


def sections(found: Mapping[str, Results], scale: Scale, rows: Sequence[str]) -> list[str]:
    """The tables: plain vLLM first and last, and our rows beside the mean of the two."""
    failed = [f"The process `{mode}` failed: {r.error}\n" for mode, r in found.items() if r.error]
    bases = plain_times(found)
    ours = found[OURS].cells if OURS in found else []
    table = [line(cell, bases, scale) for row in rows for cell in ours if cell.row == row]
    measured = {cell.row for cell in ours}
    missing = [row for row in rows if row not in measured]
    if missing:
        failed.append(f"Not measured: {', '.join(missing)}.\n")
    return [
        _explanation(scale),
        *failed,
        markdown("Plain vLLM", _PLAIN_HEADER, _plain_lines(found)),
        markdown("midstream", _HEADER, table),
    ]


def _explanation(scale: Scale) -> str:
    return (
        f"Prompts of {scale.prompt} tokens and {scale.tokens} new ones, greedy, where a row does "
        "not say otherwise; medians. `plain` is the mean of plain vLLM's first and last process. "
        "A share is one of its tokens per second. `first` is the first run of a block that the "
        "engine has not seen; counts in the notes are of all runs of a line together. The aims are "
        "those for Qwen3-8B on an H200.\n"
    )


Times = Mapping[tuple[str, int], float]


def plain_times(found: Mapping[str, Results]) -> dict[tuple[str, int], float]:
    """Seconds of plain vLLM by work and requests: the mean of its processes that measured it."""
    times: dict[tuple[str, int], list[float]] = {}
    for mode in (PLAIN_FIRST, PLAIN_LAST):
        for cell in found[mode].cells if mode in found else ():
            if cell.seconds is not None:
                times.setdefault((cell.row, cell.requests), []).append(cell.seconds)
    return {key: sum(each) / len(each) for key, each in times.items()}


def line(cell: Cell, bases: Times, scale: Scale) -> list[str]:
    """One measurement as cells of the table."""
    row = ROWS[cell.row]
    title = row.title.format(**dataclasses.asdict(scale))
    base = bases.get((cell.base, cell.requests))
    result, met = _result(row, cell, base)
    failed = [f"failed: {cell.error}"] if cell.error else []
    return [
        f"`{cell.row}`: {title}",
        str(cell.requests or ""),
        cell.run,
        _time(cell.seconds, cell.steps),
        _time(base, cell.steps),
        result,
        _aim(row, cell),
        met,
        str(cell.runs or ""),
        "; ".join([*failed, *_notes(cell)]),
    ]


def _result(row: Row, cell: Cell, base: float | None) -> tuple[str, str]:
    """What a row tells, and whether it is as good as its aim."""
    found = value(row, cell, base)
    if found is None:
        return "", ""
    aim = row.aim(cell)
    good = aim is None or (found >= aim if row.kind in ("share", "rate") else found <= aim)
    return _FORMATS[row.kind].format(found), "" if aim is None else "yes" if good else "no"


def value(row: Row, cell: Cell, base: float | None) -> float | None:
    """What a row tells, as a number in the unit of its aim; None without what it needs."""
    if row.kind == "held":
        return cell.facts["held"] / 1e9 if "held" in cell.facts else None
    if cell.seconds is None:
        return None
    if row.kind == "rate":
        return float(cell.facts["bytes"]) / cell.seconds / 1e9
    if base is None:
        return None
    if row.kind in ("share", "time"):
        return base / cell.seconds
    return cell.seconds - base if row.kind == "added" else cell.seconds / base


_FORMATS = {
    "share": "{:.3f}",
    "time": "{:.3f}",
    "times": "{:.2f} times",
    "rate": "{:.2f} GB/s",
    "added": "{:+.1f} s",
    "held": "{:.2f} GB",
}
_BOUNDS = {
    "share": "≥ {:.2f}",
    "times": "≤ {:.2f} times",
    "rate": "≥ {:.0f} GB/s",
    "added": "≤ {:+.0f} s",
    "held": "≤ {:.1f} GB",
}


def _aim(row: Row, cell: Cell) -> str:
    aim = row.aim(cell)
    return "" if aim is None else _BOUNDS[row.kind].format(aim)


def _time(seconds: float | None, steps: int) -> str:
    """A time, of a step if there were several."""
    if seconds is None:
        return ""
    if steps > 1:
        return f"{seconds / steps * 1e3:.2f} ms a step"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"


def _notes(cell: Cell) -> list[str]:
    notes = [str(cell.facts["note"])] if "note" in cell.facts else []
    if cell.facts.get("bytes"):
        notes.append(f"{cell.facts['bytes'] / 1e6:.4g} MB returned")
    counted = cell.facts.get("counts", {})
    return notes + [f"{number:.0f} {name}" for name, number in counted.items()]


def _plain_lines(found: Mapping[str, Results]) -> list[list[str]]:
    first, last = (
        {(cell.row, cell.requests): cell for cell in found.get(mode, Results()).cells}
        for mode in (PLAIN_FIRST, PLAIN_LAST)
    )
    lines = []
    for key in first | last:
        pair = [side.get(key) for side in (first, last)]
        times = [cell.seconds if cell else None for cell in pair]
        shown = [_shown(cell) for cell in pair]
        drift = f"{times[1] / times[0]:.3f}" if times[0] and times[1] else ""
        lines.append([key[0], str(key[1]), *shown, drift])
    return lines


def _shown(cell: Cell | None) -> str:
    if cell is None:
        return ""
    return f"failed: {cell.error}" if cell.error else _time(cell.seconds, cell.steps)
