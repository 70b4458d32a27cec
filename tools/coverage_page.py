"""Write `docs/coverage.md`: statements of midstream's behaviour, each with the tests that show it.

`tools/statements.toml` has the statements by id. A test shows some of them if its docstring ends in
their ids, in parentheses and before a period: ``... is refused (C42, G25).``, or in a paragraph of
its own where the line is full. A statement that no test shows has a reason there.

Usage: coverage_page.py [--check]
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "coverage.md"
ID = r"(?:[A-Z]\d+|case \d+b?)"
IDS = re.compile(rf"\(({ID}(?:, {ID})*)\)\.$")

HEAD = """\
# What is tested

<!-- Made by tools/coverage_page.py from tools/statements.toml and the tests' docstrings. -->

The behaviour of midstream as single statements, each with the tests that show it. {shown} of
{count} statements have a test; at the others stands why not.
"""


@dataclass
class Statement:
    """One statement of behaviour.

    Attributes:
        text: what holds, in a sentence.
        reason: why no test shows it; "" where tests do.
        tests: the tests that show it, ``path::name`` below `tests/`.
    """

    text: str
    reason: str = ""
    tests: list[str] = field(default_factory=list)


@dataclass
class Section:
    """Statements that belong together, by id."""

    title: str
    statements: dict[str, Statement]


def read_sections(path: Path) -> list[Section]:
    """Read the statements; a reason for an id that is none is a `KeyError`."""
    sections = []
    for entry in tomllib.loads(path.read_text(encoding="utf-8"))["section"]:
        statements = {name: Statement(text) for name, text in entry["statements"].items()}
        for name, reason in entry.get("reasons", {}).items():
            statements[name].reason = reason
        sections.append(Section(entry["title"], statements))
    return sections


def ids_of(docstring: str | None) -> list[str]:
    """The ids that a docstring ends in."""
    found = IDS.search((docstring or "").strip())
    return found.group(1).split(", ") if found else []


def read_tests(folder: Path) -> dict[str, list[str]]:
    """The ids of every test function that has some, by ``path::name``."""
    found = {}
    for path in sorted(folder.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                found[f"{path.relative_to(folder).as_posix()}::{node.name}"] = ids_of(
                    ast.get_docstring(node)
                )
    return {test: ids for test, ids in found.items() if ids}


def assign(sections: list[Section], tests: dict[str, list[str]]) -> list[str]:
    """Put tests at their statements.

    Returns:
        What is wrong: ids that do not exist, statements with neither a test nor a reason, or with
        both.
    """
    statements = {name: one for section in sections for name, one in section.statements.items()}
    problems = []
    for test, ids in tests.items():
        for name in ids:
            if name in statements:
                statements[name].tests.append(test)
            else:
                problems.append(f"{test}: there is no statement {name}")
    for name, statement in statements.items():
        if bool(statement.tests) == bool(statement.reason):
            has = "both tests and a reason" if statement.tests else "neither a test nor a reason"
            problems.append(f"{name} has {has}")
    return problems


def page(sections: list[Section]) -> str:
    """The page's text."""
    every = [one for section in sections for one in section.statements.values()]
    text = HEAD.format(shown=sum(bool(one.tests) for one in every), count=len(every))
    for section in sections:
        rows = [_row(name, one) for name, one in section.statements.items()]
        table = ["| id | behaviour | tests |", "|---|---|---|", *rows]
        text += "\n".join(["", f"## {section.title}", "", *table, ""])
    return text


def _row(name: str, statement: Statement) -> str:
    tests = "<br>".join(f"`{test}`" for test in statement.tests)
    cells = (name, statement.text, tests or f"*{statement.reason}*")
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def main(arguments: list[str]) -> int:
    """Write the page, or with `--check` only look whether it would change."""
    sections = read_sections(ROOT / "tools" / "statements.toml")
    problems = assign(sections, read_tests(ROOT / "tests"))
    text = page(sections)
    if "--check" not in arguments:
        PAGE.write_text(text, encoding="utf-8")
    elif text != PAGE.read_text(encoding="utf-8"):
        problems.append("docs/coverage.md is out of date: make coverage-page")
    print("\n".join(problems) or f"{PAGE.name} is complete", file=sys.stderr if problems else None)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
