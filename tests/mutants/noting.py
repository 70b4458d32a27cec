"""A plugin for pytest that notes how tests failed, as data, where the environment says."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

VARIABLE = "MIDSTREAM_MUTANT_NOTES"
"""The file that is written."""

_failures: list[dict[str, str]] = []
_uncollected: list[str] = []
_passed: list[str] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: Any, call: Any) -> Generator[None, Any, Any]:
    """Note a phase of a test that failed, and tests that passed."""
    report = yield
    if report.failed and call.excinfo is not None:
        _failures.append(
            {
                "test": item.nodeid,
                "when": report.when,
                "type": call.excinfo.typename,
                "message": str(call.excinfo.value).strip().partition("\n")[0],
                **_place(call.excinfo, item),
            }
        )
    elif report.when == "call" and report.passed:
        _passed.append(item.nodeid)
    return report


def _place(excinfo: Any, item: Any) -> dict[str, str]:
    """The line of the test's own file that failed; of another file of the tests if none did."""
    tests = item.config.rootpath / "tests"
    inside = [entry for entry in excinfo.traceback if Path(entry.path).is_relative_to(tests)]
    own = [entry for entry in inside if Path(entry.path) == item.path]
    if not inside:
        return {"where": "", "code": ""}
    entry = (own or inside)[-1]
    where = f"{Path(entry.path).relative_to(tests).as_posix()}:{entry.lineno + 1}"
    return {"where": where, "code": str(entry.statement).strip().partition("\n")[0]}


def pytest_collectreport(report: Any) -> None:
    """Note what could not be collected."""
    if report.failed:
        _uncollected.append(f"{report.nodeid}: {str(report.longrepr).strip().splitlines()[-1]}")


def pytest_sessionfinish(session: Any) -> None:
    """Write the notes, with the library that was tested."""
    notes = {
        "library": getattr(sys.modules.get("midstream"), "__file__", ""),
        "failures": _failures,
        "uncollected": _uncollected,
        "passed": _passed,
    }
    Path(os.environ[VARIABLE]).write_text(json.dumps(notes), encoding="utf-8")
