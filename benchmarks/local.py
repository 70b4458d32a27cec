"""Reads, edits and gradients of a model in this process: by hand, with midstream, with nnsight.

    python benchmarks/local.py [--rounds N] [--toy-rounds N] [--threads N] [--clock CLOCK]
        [--malloc default] [--tiny] [--out FILE]

A 12-layer GPT-2 with random weights, in fp32. Each way has modules of its own around the same
weights. All take turns in every round, in an order that changes, and every ratio is of times of the
same round. What they read is compared first.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.local_toy import INVOKES, Toy, ToyBlocks, ToyHooks
from benchmarks.local_works import (
    Blocks,
    Case,
    Hooks,
    Values,
    case,
    midstream_model,
    nnsight_model,
    nnsight_version,
    with_same_weights,
)
from benchmarks.measuring import first_line
from benchmarks.table import markdown, turns_us, write

ROWS = {
    "empty": "empty trace",
    "one_read": "one layer read",
    "twelve_reads": "every layer read",
    "edit": "one layer edited in place",
    "batch": "{prompts} prompts, one invoke, one layer read",
    "invokes": "{prompts} prompts, an invoke each, one layer read",
    "gradient": "gradient of one layer",
    "iterate": "{tokens} tokens, one layer read in each step",
}
TOY_ROWS = {
    "plain": "no trace",
    "empty": "empty trace",
    "one_read": "one read",
    "reads": "32 reads",
    "first": "one read, first trace of a new model",
}
INVOKE_ROWS = {
    "invokes": "each further invoke with an input, one read in it",
    "views": "each further invoke without input, one read in it",
}
OURS, THEIRS, BASE = "midstream", "nnsight", "hooks"
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
Times = dict[str, list[float] | str]
"""Microseconds of each round by way, or why there are none."""


def ways(given: Case) -> dict[str, Any]:
    """Who does the works of the GPT-2."""
    found: dict[str, Any] = {
        BASE: Hooks(given),
        OURS: Blocks(given, midstream_model(with_same_weights(given.module))),
    }
    if nnsight_version() is not None:
        found[THEIRS] = Blocks(given, nnsight_model(with_same_weights(given.module)))
    return found


def toy_ways() -> dict[str, Any]:
    """Who does the works of the toy."""
    torch.manual_seed(0)
    toy = Toy()
    found: dict[str, Any] = {BASE: ToyHooks(toy), OURS: ToyBlocks(with_same_weights(toy), OURS)}
    if nnsight_version() is not None:
        found[THEIRS] = ToyBlocks(with_same_weights(toy), THEIRS)
    return found


@dataclass(frozen=True)
class Measure:
    """How works are timed.

    Attributes:
        rounds: of each row, all ways once in each.
        clock: seconds of what is measured.
    """

    rounds: int
    clock: Callable[[], float]

    def times(self, found: dict[str, Any], row: str) -> Times:
        """Compare what all ways read in one row, then time them in turns."""
        works = {name: getattr(way, row) for name, way in found.items() if hasattr(way, row)}
        times: Times = dict.fromkeys(found, "")
        times |= _compared(works, row)
        works = {name: work for name, work in works.items() if not times[name]}
        series = turns_us(list(works.values()), repeats=self.rounds, clock=self._clock)
        return times | dict(zip(works, series, strict=True))

    def _clock(self) -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return self.clock()


def _compared(works: dict[str, Callable[[], Values]], row: str) -> dict[str, str]:
    """Check that all ways read the same.

    Returns:
        Why nnsight does not, if it fails: what it cannot do must not end the run.

    Raises:
        ValueError: one read something else.
    """
    wanted: Values | None = None
    for name, work in works.items():
        try:
            got = work()
        except Exception as error:
            if name != THEIRS:
                raise
            return {name: first_line(error)}
        wanted = got if wanted is None else wanted
        compare(wanted, got, f"{row}, {name}")
    return {}


def compare(wanted: Values, got: Values, where: str) -> None:
    """Check that a way read what the first one did.

    Raises:
        ValueError: it did not.
    """
    if len(got) != len(wanted):
        raise ValueError(f"{where}: {len(got)} values were read, {len(wanted)} by hand.")
    for index, (one, other) in enumerate(zip(got, wanted, strict=True)):
        is_close = one.shape == other.shape and torch.allclose(one, other, rtol=1e-5, atol=1e-6)
        if not is_close:
            raise ValueError(f"{where}: value {index} is not what was read by hand.")


_MMAP_MAX, _TRIM_THRESHOLD = -4, -1  # of glibc's `mallopt`


def keep_memory() -> bool:
    """Have the C library keep what is freed, where it is glibc.

    Pages that it gives back come zeroed again. Of 835 MB that a backward pass allocates, whether
    0 or 700 MB are such pages depends on what lies at the end of the heap, for each way and round
    anew: tens of milliseconds that say nothing of the way.

    Returns:
        Whether it does.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return bool(mallopt(_MMAP_MAX, 0) and mallopt(_TRIM_THRESHOLD, -1))


def spread(times: Times, name: str) -> str:
    """A way's time over that by hand, round by round: median and quartiles."""
    mine, base = times.get(name, ""), times[BASE]
    if isinstance(mine, str) or isinstance(base, str):
        return ""
    ratios = [one / other for one, other in zip(mine, base, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def shown(times: Times, name: str, unit: float, digits: int) -> str:
    """Median of one way, or why there is none."""
    found = times.get(name, "not installed")
    return found if isinstance(found, str) else f"{statistics.median(found) / unit:.{digits}f}"


def model_section(given: Case, measure: Measure) -> str:
    """The table of the GPT-2."""
    found, rows = ways(given), []
    for row, title in ROWS.items():
        times = measure.times(found, row)
        cells = [shown(times, name, 1e3, 2) for name in (BASE, OURS, THEIRS)]
        cells += [spread(times, name) for name in (OURS, THEIRS)]
        rows.append([title.format(prompts=len(given.batch), tokens=given.tokens), *cells])
        print(*rows[-1], sep=" | ", flush=True)
    count = len(given.module.transformer.h)
    title = f"GPT-2, {count} layers, fp32, {given.module.device.type}, {measure.rounds} rounds"
    columns = ["hooks, ms", "midstream, ms", "nnsight, ms", "midstream / hooks", "nnsight / hooks"]
    return markdown(title, ["", *columns], rows)


def toy_section(measure: Measure) -> str:
    """The table of the toy."""
    found, rows = toy_ways(), []
    for row, title in TOY_ROWS.items():
        times = measure.times(found, row)
        rows.append([title, *(shown(times, name, 1, 0) for name in (BASE, OURS, THEIRS))])
    one = measure.times(found, "one_invoke")
    for row, title in INVOKE_ROWS.items():
        several = measure.times(found, row)
        rows.append([title, "", *(_each(several, one, name) for name in (OURS, THEIRS))])
    title = f"Twelve linear layers of width 8, CPU, {measure.rounds} rounds"
    return markdown(title, ["", "hooks, µs", "midstream, µs", "nnsight, µs"], rows)


def _each(several: Times, one: Times, name: str) -> str:
    """What each invoke but the first costs."""
    many, first = several.get(name, "not installed"), one.get(name, "")
    if isinstance(many, str) or isinstance(first, str):
        return many if isinstance(many, str) else first
    return f"{(statistics.median(many) - statistics.median(first)) / (INVOKES - 1):.0f}"


def sections(
    *, rounds: int, toy_rounds: int, tiny: bool, clock: str = "wall", memory: str = ""
) -> list[str]:
    """All tables.

    Args:
        memory: a sentence on who keeps it.
        tiny: two narrow layers: for a look at whether all of it runs.
        clock: "wall", or "cpu" for the time of this process alone, all threads together.
    """
    sizes = {"n_embd": 32, "n_head": 2, "vocab_size": 512} if tiny else {}
    given = case(2 if tiny else 12, 4 if tiny else 32, 16, **sizes)
    seconds = "Wall time" if clock == "wall" else "Processor time of all threads"
    note = (
        f"PyTorch's own hooks, midstream, and nnsight {nnsight_version() or '(not installed)'}; "
        f"threads of PyTorch: {torch.get_num_threads()}. {seconds}, medians. Ratios are of times "
        "of the same round: median, and quartiles in brackets. All read the same values. "
        f"{memory}\n"
    )
    model = model_section(given, Measure(rounds, CLOCKS[clock]))
    return [note, model, toy_section(Measure(toy_rounds, CLOCKS[clock]))]


def main() -> None:
    """Measure and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=25, help="of each row of the GPT-2")
    parser.add_argument("--toy-rounds", type=int, default=300, help="of each row of the toy")
    parser.add_argument("--threads", type=int, help="of PyTorch")
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--tiny", action="store_true", help="two narrow layers, to see it run")
    parser.add_argument("--malloc", choices=("kept", "default"), default="kept")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/local.md")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    kept = args.malloc == "kept" and keep_memory()
    memory = "Memory that is freed stays with the process." if kept else "Memory is the system's."
    how = {"rounds": args.rounds, "toy_rounds": args.toy_rounds, "clock": args.clock}
    tables = sections(tiny=args.tiny, memory=memory, **how)
    write(args.out, "Models in the caller's own process", tables)


if __name__ == "__main__":
    main()
