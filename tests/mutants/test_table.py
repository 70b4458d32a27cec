"""The table of mutants fits the library, the statements, the tests, and the last run's result."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from tests.mutants.table import RESULT, ROOT, Mutant, StaleMutantError, problems, read, row

AGAIN = "python -m tests.mutants --out tests/mutants/RESULT.md"


@pytest.fixture(scope="module")
def mutants() -> list[Mutant]:
    """The table."""
    return read()


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The script that reads statements and tests, as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import coverage_page as module

    yield module
    sys.modules.pop("coverage_page", None)


def test_every_line_is_in_the_library_once(mutants: list[Mutant]) -> None:
    """An entry whose line is gone, or is there twice, is named."""
    found = problems(mutants, ROOT / "src")
    assert not found, "\n".join(found)
    assert len(mutants) >= 40


def test_statements_and_tests_exist(mutants: list[Mutant], page: ModuleType) -> None:
    """A mutant's statement is known, and its tests are the statement's own."""
    found = misplaced(mutants, page)
    assert not found, "\n".join(found)


def test_the_result_is_of_this_table(mutants: list[Mutant]) -> None:
    """`RESULT.md` has a row for each mutant as it stands here, all of them caught, and no other."""
    shown = [line for line in RESULT.read_text(encoding="utf-8").splitlines() if line[:1] == "|"]
    rows = shown[2:]
    missing = [one.statement for one in mutants if not any(r.startswith(row(one)) for r in rows)]
    gone = [r for r in rows if not any(r.startswith(row(one)) for one in mutants)]
    assert not missing, f"{', '.join(missing)}: not in RESULT.md as they are now. {AGAIN}"
    assert not gone, f"{', '.join(map(name_of, gone))}: in RESULT.md, not in the table. {AGAIN}"
    missed = [name_of(r) for r in rows if "| **" in r]
    assert not missed, f"{', '.join(missed)}: not caught"


def name_of(line: str) -> str:
    """The statement of a row."""
    return line.split("|")[1].strip()


def misplaced(mutants: list[Mutant], page: ModuleType) -> list[str]:
    """Entries whose statement or tests there are not, or whose tests show another statement."""
    sections = page.read_sections(ROOT / "tools" / "statements.toml")
    known = {name for section in sections for name in section.statements}
    tests = page.read_tests(ROOT / "tests")
    found = [f"{one.statement}: no such statement" for one in mutants if one.statement not in known]
    for one in mutants:
        for test in one.tests:
            ids = tests.get(test.partition("[")[0])
            if ids is None:
                found.append(f"{one.statement}: there is no test {test} with an id")
            elif one.statement not in ids:
                found.append(f"{one.statement}: {test} shows {ids}, not this statement")
    return found


ENTRY = Mutant("A1", "f.py", "x = 1", "x = 2", ["test_public.py::test_all"], "It is two.")


def test_what_is_wrong_is_said(tmp_path: Path, page: ModuleType) -> None:
    """Lines that are missing or doubled, files, statements and tests that are not there."""
    (tmp_path / "f.py").write_text("if y:\n    x = 1\nz = 1\nz = 1\n")
    assert problems([ENTRY], tmp_path) == []
    wrong = [
        replace(ENTRY, statement="A2", line="z = 1"),
        replace(ENTRY, statement="A3", line="y"),
        replace(ENTRY, statement="A4", file="g.py"),
        replace(ENTRY, statement="A5", becomes="x = 1"),
        replace(ENTRY, statement="A6", tests=[]),
        ENTRY,
        ENTRY,
    ]
    assert [text.partition(":")[0] for text in problems(wrong, tmp_path)] == [
        *("A1", "A2", "A3", "A4", "A5", "A6")
    ]
    others = [
        replace(ENTRY, statement="Z9", tests=[]),
        replace(ENTRY, statement="A2"),
        replace(
            ENTRY, statement="A3", tests=["test_public.py::test_both_import_paths_give_one_class"]
        ),
    ]
    assert [text.partition(":")[0] for text in misplaced(others, page)] == ["Z9", "A2", "A3"]


def test_a_mistake_is_one_line_with_its_indentation() -> None:
    """Applied, a mutant leaves all other lines as they are."""
    assert ENTRY.applied("if y:\n    x = 1\nz = 3\n") == "if y:\n    x = 2\nz = 3\n"
    with pytest.raises(StaleMutantError, match=r"A1: the line occurs 2 times in f\.py"):
        ENTRY.applied("x = 1\nx = 1\n")
