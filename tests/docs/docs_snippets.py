"""Run the fenced python blocks of a documentation page.

A page is one module: its blocks run in order and share their names. The convention for output: a
block that prints ends in comments ``# prints: TEXT``, one a line of output. ``# prints: TEXT ...``
compares the beginning of the line only, and a last ``# prints: ...`` lets any further lines follow.
A block may await at its top level, as in a notebook: a page has one event loop.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import io
import linecache
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, MappingProxyType, ModuleType

FENCE = re.compile(r"^```python[^\n]*\n(.*?)^```\s*$", re.MULTILINE | re.DOTALL)
PRINTS = "# prints:"


@dataclass(frozen=True)
class Snippet:
    """One fenced block and the line of its page that its code starts on."""

    page: Path
    line: int
    code: str

    @property
    def expected(self) -> list[str]:
        """Lines that the block says it prints."""
        lines = [line for line in self.code.splitlines() if line.startswith(PRINTS)]
        return [line.removeprefix(PRINTS).removeprefix(" ") for line in lines]


def snippets(page: Path) -> list[Snippet]:
    """All python blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    return [
        Snippet(page, text.count("\n", 0, match.start(1)) + 1, match.group(1))
        for match in FENCE.finditer(text)
    ]


def run_page(page: Path, replacing: Mapping[str, str] = MappingProxyType({})) -> int:
    """Run all blocks of a page and compare what they print; returns how many there were.

    Args:
        page: the page.
        replacing: texts to put in place of others, such as the address of a server.
    """
    with _page_module(page) as module, asyncio.Runner() as runner:
        found = [_replaced(snippet, replacing) for snippet in snippets(page)]
        run_snippets(found, module, runner)
    return len(found)


def _replaced(snippet: Snippet, replacing: Mapping[str, str]) -> Snippet:
    code = snippet.code
    for before, after in replacing.items():
        code = code.replace(before, after)
    return Snippet(snippet.page, snippet.line, code)


def run_snippets(found: list[Snippet], module: ModuleType, runner: asyncio.Runner) -> None:
    """Run blocks in a module, in order, and compare what they print."""
    for snippet in found:
        # a page imports and runs as a script does, its `__main__` guards included
        module.__dict__["__name__"] = "__main__"
        assert_output(snippet, _run(snippet, module, runner))


def assert_output(snippet: Snippet, printed: list[str]) -> None:
    """Compare a block's output with what it says it prints."""
    where = f"{snippet.page.name}:{snippet.line}"
    expected = snippet.expected
    rest = bool(expected) and expected[-1] == "..."
    wanted = expected[:-1] if rest else expected
    message = f"{where} printed {printed}, its page says {expected}"
    assert len(printed) == len(wanted) or (rest and len(printed) > len(wanted)), message
    for line, text in zip(printed, wanted, strict=False):
        if text.endswith(" ..."):
            assert line.startswith(text.removesuffix(" ...")), message
        else:
            assert line == text, message


def _run(snippet: Snippet, module: ModuleType, runner: asyncio.Runner) -> list[str]:
    # capture reads a block's source by the file name of the running code; the blank lines
    # before it make line numbers in tracebacks those of the page
    name = f"<{snippet.page.name}:{snippet.line}>"
    code = "\n" * (snippet.line - 1) + snippet.code
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    output = io.StringIO()
    compiled = compile(code, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    with redirect_stdout(output):
        if compiled.co_flags & inspect.CO_COROUTINE:
            runner.run(FunctionType(compiled, module.__dict__)())
        else:
            exec(compiled, module.__dict__)
    return output.getvalue().splitlines()


@contextmanager
def _page_module(page: Path) -> Iterator[ModuleType]:
    name = f"page_{page.stem}"
    module = sys.modules[name] = ModuleType(name)
    try:
        yield module
    finally:
        del sys.modules[name]  # by this name: a page is called `__main__` while it runs
