"""The least context manager that captures a body, runs it in place and binds its saves."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType

import midstream
from midstream.tracing import Capture, Execution, bind

SOURCE_ROOT = Path(midstream.__file__).parents[1]

TRACE = """
import sys
from midstream.tracing import Capture, Execution, bind
class Trace:
    def __enter__(self):
        self.frame = sys._getframe(1)
        self.capture = Capture.begin(self.frame)
        return self
    def __exit__(self, kind, error, traceback):
        self.block = self.capture.finish(kind, error)
        if self.block is None:
            return False
        run = Execution(self.block)
        run.run()
        bind(self.frame, run.saves())
        return True
"""
"""`Trace` as text, for programs that tests run elsewhere."""


class Trace:
    """Captures the body, runs it with `Execution`, and binds its saves, also after an error."""

    block = None

    def __init__(self, what="trace", run=True):
        self.what, self.run = what, run

    def __enter__(self):
        self.frame = sys._getframe(1)
        self.capture = Capture.begin(self.frame, self.what)
        return self

    def __exit__(self, kind, error, traceback):
        self.block = self.capture.finish(kind, error)
        frame, self.frame = self.frame, None  # the frame holds us: leave no cycle behind
        if self.block is None:
            return False
        if self.run:
            self.execution = Execution(self.block)
            try:
                self.execution.run()
            finally:
                bind(frame, self.execution.saves())
        return True

    def invoke(self, *_):
        """Return a trace inside this one, as a tracer's `invoke` does."""
        return Trace("invoke")


def load(path: Path, text: str | None = None) -> ModuleType:
    """Import a file as a module with `Trace` in it; `text` is written to it first."""
    if text is not None:
        path.write_text(textwrap.dedent(text), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    module.Trace = Trace
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def python(
    *arguments: str, stdin: str | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess:
    """Run this interpreter with midstream importable."""
    environment = {**os.environ, "PYTHONPATH": str(SOURCE_ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, *arguments],
        input=stdin,
        text=True,
        capture_output=True,
        env=environment,
        cwd=cwd,
        timeout=120,
        check=False,
    )
