"""The table of mutants: one line of the library, what it becomes, and the tests that must fail."""

from __future__ import annotations

import tomllib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TABLE = Path(__file__).with_name("mutants.toml")
RESULT = Path(__file__).with_name("RESULT.md")


class StaleMutantError(Exception):
    """A mutant's line is not in the library exactly once."""


@dataclass(frozen=True)
class Mutant:
    """A mistake in one line.

    Attributes:
        statement: the id in `tools/statements.toml`; there is one mutant for a statement.
        file: path below `src`.
        line: the line as it is, without its indentation. It occurs once in the file.
        becomes: what stands in its place, with the same indentation.
        tests: node ids below `tests`; one of them must fail, by an assertion.
        wrong: what the mistake does, in a sentence.
        raises: name of another exception by which the test fails.
        hangs: whether running out of time counts as failing.
    """

    statement: str
    file: str
    line: str
    becomes: str
    tests: list[str] = field(default_factory=list)
    wrong: str = ""
    raises: str = ""
    hangs: bool = False

    def applied(self, text: str) -> str:
        """The file's text with the mistake in it.

        Raises:
            StaleMutantError: the line is not there exactly once.
        """
        lines = text.splitlines(keepends=True)
        found = [index for index, line in enumerate(lines) if line.strip() == self.line]
        if len(found) != 1:
            raise StaleMutantError(
                f"{self.statement}: the line occurs {len(found)} times in {self.file}, and has to "
                f"occur once: {self.line}"
            )
        lines[found[0]] = lines[found[0]].replace(self.line, self.becomes)
        return "".join(lines)


def read(path: Path = TABLE) -> list[Mutant]:
    """The mutants in the order of the table; an unknown or missing field is a `TypeError`."""
    entries = tomllib.loads(path.read_text(encoding="utf-8"))["mutant"]
    return [Mutant(**entry) for entry in entries]


def problems(mutants: list[Mutant], src: Path) -> list[str]:
    """What is wrong with entries by themselves and against the library, each with its statement."""
    counts = Counter(mutant.statement for mutant in mutants)
    found = [f"{name}: has {count} mutants, not one" for name, count in counts.items() if count > 1]
    for mutant in mutants:
        name = mutant.statement
        if not (src / mutant.file).is_file():
            found.append(f"{name}: there is no file {mutant.file}")
            continue
        try:
            mutant.applied((src / mutant.file).read_text(encoding="utf-8"))
        except StaleMutantError as stale:
            found.append(str(stale))
        if mutant.line == mutant.becomes:
            found.append(f"{name}: changes nothing")
        if not mutant.tests or not mutant.wrong:
            found.append(f"{name}: says no test, or not what is wrong")
    return found


def row(mutant: Mutant) -> str:
    """The first cells of a mutant's row in `RESULT.md`."""
    change = f"{mutant.wrong}<br>`{mutant.file}`: {_code(mutant.line)} → {_code(mutant.becomes)}"
    tests = "<br>".join(_code(test) for test in mutant.tests)
    return f"| {mutant.statement} | {change} | {tests} |"


def _code(text: str) -> str:
    return f"`{cell(text)}`"


def cell(text: str) -> str:
    """Text that may stand in a cell of a table."""
    return text.replace("|", "\\|").replace("\n", " ")
