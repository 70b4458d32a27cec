"""What traces cost on a GPU beside plain vLLM: every row with its aim, in one run.

    python benchmarks/gpu.py [--rows ID,...] [--batches 1,8,64] [--tokens 128] [--repeats 5]
        [--budget SECONDS] [--patience SECONDS] [--out FILE] [--tiny]

Plain vLLM, midstream and plain vLLM again each have a process of their own. The table is written
anew after every measurement. Random weights in the shape of Qwen3-8B; with --tiny a tiny model,
which also runs on a CPU and shows that the script works, not how fast anything is.
"""

from __future__ import annotations

import argparse
import math
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import report, shapes
from benchmarks.catalogue import ROWS
from benchmarks.measuring import Recorder, Results
from benchmarks.table import write

RESULTS = Path(__file__).parent / "results"
_GRACE = 90.0  # seconds past its deadline after which a process is taken to hang
_LISTENS = 30.0  # seconds in which a process that is told to end does


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write the table."""
    args = parser().parse_args(arguments)
    args.out = args.out or RESULTS / ("gpu-tiny.md" if args.tiny else "gpu.md")
    scale = (shapes.tiny if args.tiny else shapes.full)(args.batches, args.tokens)
    if args.mode:
        measure(args, scale)
    elif not compare(args, scale):
        sys.exit(1)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    found.add_argument("--rows", type=_rows, default=list(ROWS), help=f"of {','.join(ROWS)}")
    found.add_argument("--batches", type=_numbers, default=[1, 8, 64], help="requests at a time")
    found.add_argument("--tokens", type=int, default=128, help="new tokens of a request")
    found.add_argument("--repeats", type=int, default=5, help="runs that a median is of")
    found.add_argument(
        "--budget", type=float, default=math.inf, help="seconds after which no row begins"
    )
    found.add_argument(
        "--patience", type=float, default=60.0, help="seconds after which a row is not run again"
    )
    found.add_argument("--out", type=Path, help="results/gpu.md, or gpu-tiny.md")
    found.add_argument("--tiny", action="store_true", help="a tiny model, also on a CPU")
    # what the processes of a run are started with
    found.add_argument("--mode", choices=report.MODES, help=argparse.SUPPRESS)
    found.add_argument("--deadline", type=float, default=math.inf, help=argparse.SUPPRESS)
    found.add_argument("--results", type=Path, help=argparse.SUPPRESS)
    return found


def _rows(text: str) -> list[str]:
    chosen = text.split(",")
    unknown = sorted(set(chosen) - set(ROWS))
    if unknown:
        raise argparse.ArgumentTypeError(f"no rows {unknown}; there are {', '.join(ROWS)}")
    return [row for row in ROWS if row in chosen]


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def measure(args: argparse.Namespace, scale: shapes.Scale) -> None:
    """Be one process of a run."""
    from benchmarks import modes

    recorder = Recorder(
        args.results, repeats=args.repeats, deadline=args.deadline, patience=args.patience
    )
    run = modes.midstream if args.mode == report.OURS else modes.plain
    rows = [row for row in args.rows if row != "build" or args.mode != report.PLAIN_FIRST]
    try:
        run(recorder, rows, scale, is_tiny=args.tiny)
    except Exception as error:
        recorder.fail(error)
        raise


def compare(args: argparse.Namespace, scale: shapes.Scale) -> bool:
    """Run the processes one after the other, and write the table as it grows.

    Returns:
        Whether all of them came to their end.
    """
    end, plain_took, good = time.time() + args.budget, 0.0, True
    with tempfile.TemporaryDirectory(prefix="midstream-gpu-") as folder:
        for mode in report.MODES:
            started = time.time()
            if started > end:
                break
            reserve = plain_took if mode == report.OURS else 0.0  # for plain vLLM's last process
            good &= _run(mode, args, scale, Path(folder), end - reserve)
            plain_took = time.time() - started
        _write(args, scale, Path(folder), show=True)
    return good


def _run(
    mode: str, args: argparse.Namespace, scale: shapes.Scale, folder: Path, deadline: float
) -> bool:
    """Run one process to its end, or until it must hang; gives whether it came to its end."""
    command = [sys.executable, __file__, "--mode", mode, "--rows", ",".join(args.rows)]
    command += ["--batches", ",".join(map(str, args.batches)), "--tokens", str(args.tokens)]
    command += ["--repeats", str(args.repeats), "--patience", str(args.patience)]
    command += ["--deadline", str(deadline), "--results", str(folder / f"{mode}.json")]
    process = subprocess.Popen([*command, *(["--tiny"] if args.tiny else [])])
    written = 0.0
    try:
        while process.poll() is None and time.time() < deadline + _GRACE:
            time.sleep(0.2)
            if (newest := _newest(folder)) > written:
                _write(args, scale, folder, show=False)
                written = newest
    finally:
        _end(process)
        _note_end(process.returncode, folder / f"{mode}.json")
        _write(args, scale, folder, show=False)
    return process.returncode == 0


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process that still runs, by force if it does not listen."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_LISTENS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _note_end(status: int, path: Path) -> None:
    """Have the results say that their process failed, if it could not say so itself."""
    results = Results.read(path)
    if status and not results.error:
        results.error = f"it ended with status {status}; what it printed is above"
        results.write(path)


def _newest(folder: Path) -> float:
    """When a process last wrote results."""
    return max((path.stat().st_mtime for path in folder.glob("*.json")), default=0.0)


def _write(args: argparse.Namespace, scale: shapes.Scale, folder: Path, *, show: bool) -> None:
    """Write the table of what there is so far."""
    files = {mode: folder / f"{mode}.json" for mode in report.MODES}
    found = {mode: Results.read(path) for mode, path in files.items() if path.exists()}
    title = "Traces on a tiny model" if args.tiny else "Traces on a GPU beside plain vLLM"
    write(args.out, title, report.sections(found, scale, args.rows), show=show)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no process of ours stays
    main()
