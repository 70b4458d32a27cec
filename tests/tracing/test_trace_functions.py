"""Captures under debuggers and coverage tools, whose trace functions are put back."""

from __future__ import annotations

import bdb
import json
import sys

import pytest

from .helpers import TRACE, Trace, python


def traced(value):
    first = value
    with Trace():
        result = [first].save()
    return list(result)


def test_python_trace_function_is_restored():
    """A coverage-like trace function sees the lines around the trace, before and after it (C7)."""
    lines, previous = [], sys.gettrace()

    def tracer(frame, event, arg):
        if frame.f_code is traced.__code__ and event == "line":
            lines.append(frame.f_lineno - traced.__code__.co_firstlineno)
        return tracer

    sys.settrace(tracer)
    try:
        assert traced(3) == [3]
        assert sys.gettrace() is tracer
    finally:
        sys.settrace(previous)
    assert {1, 2, 4} <= set(lines)
    assert 3 not in lines


def test_frame_without_a_local_trace_function_stays_so():
    """A tool that does not trace the caller's frame does not trace it afterwards either."""
    previous = sys.gettrace()

    def ignore(frame, event, arg):
        return None

    sys.settrace(ignore)
    try:
        with Trace():
            result = [1].save()
        assert sys.gettrace() is ignore
        assert sys._getframe().f_trace is None
    finally:
        sys.settrace(previous)
    assert result == [1]


def test_line_events_switched_off_by_a_tool():
    """A tool that asked for no line events of a frame gets that setting back."""
    frame = sys._getframe()
    frame.f_trace_lines = False
    try:
        with Trace():
            result = [1].save()
        assert frame.f_trace_lines is False
    finally:
        frame.f_trace_lines = True
    assert result == [1]


class Stepper(bdb.Bdb):
    """A debugger that steps over every line of `traced`."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def user_line(self, frame):
        """Note the line and go to the next one of the frame."""
        if frame.f_code is traced.__code__:
            self.lines.append(frame.f_lineno - traced.__code__.co_firstlineno)
            self.set_next(frame)
        else:
            self.set_step()

    def user_return(self, frame, value):
        """Go on."""
        self.set_step()


def test_debugger_steps_over_the_block():
    """Stepping with a debugger goes from the header to the line after the block."""
    debugger, previous = Stepper(), sys.gettrace()
    try:
        assert debugger.runcall(traced, 4) == [4]
    finally:
        sys.settrace(previous)
    body_left_out = [line for line in debugger.lines if line != 2]
    assert body_left_out == [1, 4]


def test_block_runs_untraced_lines_are_reported_after_it():
    """The trace function is back before `__exit__` goes on, so what runs there is traced."""
    seen, previous = [], sys.gettrace()

    def tracer(frame, event, arg):
        if event == "call":
            seen.append(frame.f_code.co_name)
        return tracer

    sys.settrace(tracer)
    try:
        traced(1)
    finally:
        sys.settrace(previous)
    assert "saves" in seen


MEASURED = """
from traced_helper import Trace
def helper(x):
    return x
def f():
    for i in range(3):
        with Trace():
            x = [i].save()
        helper(x)
    return helper(x)
def g():
    a = f()
    return helper(a)
print(g())
"""


@pytest.mark.parametrize("core", ["ctrace", "pytrace"])
def test_coverage_measures_what_follows(tmp_path, monkeypatch, core):
    """Under coverage, in C or Python, the lines after a trace and in its callers are recorded.

    (C7).
    """
    pytest.importorskip("coverage")
    (tmp_path / "traced_helper.py").write_text(TRACE)
    (tmp_path / "measured.py").write_text(MEASURED)
    monkeypatch.setenv("COVERAGE_CORE", core)
    run = python("-m", "coverage", "run", "--include=measured.py", "measured.py", cwd=tmp_path)
    assert run.stdout == "[2]\n", run.stderr
    report = python("-m", "coverage", "json", "-q", "-o", "-", cwd=tmp_path)
    lines = json.loads(report.stdout)["files"]["measured.py"]
    assert set(lines["missing_lines"]) <= {8}
