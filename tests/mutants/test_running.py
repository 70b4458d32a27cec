"""What counts as caught."""

from __future__ import annotations

import pytest

from tests.mutants.running import Notes, Verdict, judge
from tests.mutants.table import Mutant

MUTANT = Mutant("A1", "f.py", "x = 1", "x = 2", ["test_f.py::test_x"], "It is two.")
FAILURE = {"test": "t", "when": "call", "message": "m", "where": "test_f.py:3", "code": "assert x"}


def failing(kind: str) -> Notes:
    """Notes of a run whose first test failed by an exception."""
    return Notes(failures=[{**FAILURE, "type": kind}])


def test_an_assertion_that_fails_catches_a_mutant() -> None:
    """So does an error that does not come; both say where."""
    for kind in ("AssertionError", "Failed"):
        assert judge(MUTANT, failing(kind)) == (Verdict.CAUGHT, "test_f.py:3 `assert x`")


@pytest.mark.parametrize("kind", ["ImportError", "ValueError"])
def test_another_exception_breaks_it(kind: str) -> None:
    """Unless the table names it; then an assertion is not what was expected."""
    verdict, why = judge(MUTANT, failing(kind))
    assert (verdict, why) == (Verdict.BROKEN, f"test_f.py:3 `assert x` {kind}: m")
    raises = Mutant("A1", "f.py", "x = 1", "x = 2", raises=kind)
    assert judge(raises, failing(kind)) == (Verdict.CAUGHT, f"test_f.py:3 `assert x` {kind}")
    assert judge(raises, failing("AssertionError"))[0] is Verdict.BROKEN


def test_a_run_that_does_not_end_breaks_it() -> None:
    """Unless the table says that it hangs; and a run without a test, or an import, breaks it."""
    late = Notes(ended="ran out of time, 9 s")
    assert judge(MUTANT, late) == (Verdict.BROKEN, "ran out of time, 9 s")
    assert judge(Mutant("A1", "f.py", "x", "y", hangs=True), late)[0] is Verdict.CAUGHT
    assert judge(MUTANT, Notes(uncollected=["f: ImportError"]))[0] is Verdict.BROKEN
    assert judge(MUTANT, Notes()) == (Verdict.BROKEN, "no test ran")


def test_a_mutant_that_its_tests_pass_has_survived() -> None:
    """That is what the table is there to find."""
    assert judge(MUTANT, Notes(passed=["t"]))[0] is Verdict.SURVIVED
