"""The page of statements and their tests: complete, up to date, and made from docstrings."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Import the script as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import coverage_page as module

    yield module
    sys.modules.pop("coverage_page", None)


def test_page_is_complete_and_up_to_date(tool: ModuleType) -> None:
    """Ids in docstrings exist, every statement has tests or a reason, and the page says so."""
    sections = tool.read_sections(ROOT / "tools" / "statements.toml")
    tests = tool.read_tests(ROOT / "tests")
    assert len(tests) > 100
    assert tool.assign(sections, tests) == []
    assert tool.PAGE.read_text(encoding="utf-8") == tool.page(sections), "make coverage-page"


@pytest.mark.parametrize(
    ("docstring", "ids"),
    [
        ("It is refused (C42).", ["C42"]),
        ("It is refused (C42, G25, case 12, case 38b).", ["C42", "G25", "case 12", "case 38b"]),
        ("A full line.\n\n    (B1, O5).\n    ", ["B1", "O5"]),
        ("It is refused (C42)", []),
        ("It is refused (as C42).", []),
        ("C42 (B1) is in the middle.", []),
        (None, []),
    ],
)
def test_ids_stand_at_the_end_of_a_docstring(
    tool: ModuleType, docstring: str | None, ids: list[str]
) -> None:
    """They are in parentheses before the last period, and nowhere else."""
    assert tool.ids_of(docstring) == ids


def test_what_is_wrong_is_said(tool: ModuleType, tmp_path: Path) -> None:
    """An unknown id, a statement without test or reason, and one with both are named."""
    data = tmp_path / "statements.toml"
    data.write_text(
        '[[section]]\ntitle = "S"\n[section.statements]\nA1 = "a"\nA2 = "b|c"\nA3 = "d"\n'
        '[section.reasons]\nA1 = "not built"\nA3 = "not built"\n'
    )
    (tmp_path / "test_x.py").write_text('def test_y():\n    """Holds (A3, A9)."""\n')
    sections = tool.read_sections(data)
    assert tool.assign(sections, tool.read_tests(tmp_path)) == [
        "test_x.py::test_y: there is no statement A9",
        "A2 has neither a test nor a reason",
        "A3 has both tests and a reason",
    ]
    text = tool.page(sections)
    assert "1 of\n3 statements" in text
    assert "| A1 | a | *not built* |" in text
    assert "| A3 | d | `test_x.py::test_y` |" in text
    assert "| A2 | b\\|c |" in text
