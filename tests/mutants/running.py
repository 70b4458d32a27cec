"""A copy of the tree with one mistake at a time, and what its tests say."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from tests.mutants.noting import VARIABLE
from tests.mutants.table import ROOT, Mutant

_PARTS = ("src", "tests", "pyproject.toml")
_ASSERTIONS = ("AssertionError", "Failed")  # the second is pytest's own, as of `pytest.raises`


class Verdict(Enum):
    """What became of a mutant."""

    CAUGHT = "caught"
    SURVIVED = "SURVIVED"
    BROKEN = "BROKEN"


@dataclass
class Notes:
    """What one run of pytest noted.

    Attributes:
        failures: see `noting`; with `-x` the first one and its teardown's.
        uncollected: what could not be imported.
        passed: node ids.
        library: path of the package that was tested.
        ended: "" if the run came to its end, else how it ended.
    """

    failures: list[dict[str, str]] = field(default_factory=list)
    uncollected: list[str] = field(default_factory=list)
    passed: list[str] = field(default_factory=list)
    library: str = ""
    ended: str = ""


class Copy:
    """A copy of the tree in a folder of its own.

    Args:
        folder: an empty folder.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        ignored = shutil.ignore_patterns("__pycache__")
        for name in _PARTS:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, folder / name, ignore=ignored)
            else:
                shutil.copy(ROOT / name, folder / name)

    @contextmanager
    def mutated(self, mutant: Mutant) -> Iterator[None]:
        """Have a mistake in the copy."""
        path = self._folder / "src" / mutant.file
        before = path.read_text(encoding="utf-8")
        path.write_text(mutant.applied(before), encoding="utf-8")
        try:
            yield
        finally:
            path.write_text(before, encoding="utf-8")

    def run(self, tests: Sequence[str], seconds: float) -> Notes:
        """Run tests against the copy, stopping at the first failure."""
        notes = self._folder / "notes.json"
        notes.unlink(missing_ok=True)
        options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "tests.mutants.noting"]
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, *(f"tests/{test}" for test in tests)],
            cwd=self._folder,
            env={**os.environ, **self._environment(notes)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a test's own processes end with it
        )
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            return Notes(ended=f"ran out of time, {seconds:.0f} s")
        finally:
            _end(process)
        if not notes.exists():
            return Notes(ended=f"the process ended with status {process.returncode}")
        return self._checked(Notes(**json.loads(notes.read_text(encoding="utf-8"))))

    def _environment(self, notes: Path) -> dict[str, str]:
        # no bytecode: a mutant has its predecessor's size and second, and would be taken for it
        return {
            "PYTHONPATH": str(self._folder / "src"),
            "PYTHONDONTWRITEBYTECODE": "1",
            VARIABLE: str(notes),
        }

    def _checked(self, notes: Notes) -> Notes:
        if notes.library and not Path(notes.library).is_relative_to(self._folder):
            notes.ended = f"the tests imported {notes.library}, not the copy"
        return notes


def _end(process: subprocess.Popen[Any]) -> None:
    """End the process, and what it has started and left."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def judge(mutant: Mutant, notes: Notes) -> tuple[Verdict, str]:
    """Whether the tests caught a mutant, and where, or why it counts as broken."""
    if notes.ended:
        caught = mutant.hangs and notes.ended.startswith("ran out of time")
        return (Verdict.CAUGHT if caught else Verdict.BROKEN), notes.ended
    if notes.uncollected:
        return Verdict.BROKEN, notes.uncollected[0]
    if not notes.failures:
        return (Verdict.SURVIVED, "") if notes.passed else (Verdict.BROKEN, "no test ran")
    first = notes.failures[0]
    place = f"{first['where']} `{first['code']}`"
    if first["type"] in ((mutant.raises,) if mutant.raises else _ASSERTIONS):
        return Verdict.CAUGHT, f"{place} {mutant.raises}".strip()
    return Verdict.BROKEN, f"{place} {first['type']}: {first['message']}"
