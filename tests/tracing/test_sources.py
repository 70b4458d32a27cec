"""The places a block's source comes from."""

from __future__ import annotations

import linecache
import textwrap

import pytest

from midstream.errors import SourceChangedError, WithBlockNotFoundError

from .helpers import TRACE, Trace, python

PROGRAM = """
a = 3
for i in range(2):
    with Trace() as t:
        x = [a + i].save()
    print(x, t.block.code.first_line)
def f(b):
    with Trace():
        y = [b].save()
    return y
print(f(8))
"""


def test_script(tmp_path):
    """A script run by path, also by a relative one with another directory made current (C2)."""
    (tmp_path / "script.py").write_text(TRACE + "import os; os.chdir('/')\n" + PROGRAM)
    done = python(str(tmp_path / "script.py"))
    relative = python("script.py", cwd=tmp_path)
    assert relative.stdout == done.stdout, relative.stderr
    assert done.stdout.split("\n")[:3] == ["[3] 22", "[4] 22", "[8]"], done.stderr


@pytest.mark.parametrize("options", ["-c", "-Bc", "-X dev -c", "-X no_debug_ranges -c", "-O -c"])
def test_program_of_the_command_line(options):
    """`python -c` works on every version, with options before it and arguments after it (C2)."""
    done = python(*options.split(), TRACE + PROGRAM, "-c", "argument")
    assert done.stdout.split("\n")[:3] == ["[3] 21", "[4] 21", "[8]"], done.stderr


def test_piped_script_has_no_source():
    """A script piped on stdin is refused with advice that fits (C2, G17)."""
    done = python("-", stdin=TRACE + PROGRAM)
    assert "WithBlockNotFoundError" in done.stderr
    assert "piped script" in done.stderr


def test_exec_of_registered_text():
    """Text run by `exec` is found where it is registered with linecache."""
    name, text = "<registered text>", "with Trace():\n    x = [n].save()\n"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    namespace = {"Trace": Trace, "n": 4}
    exec(compile(text, name, "exec"), namespace)
    assert namespace["x"] == [4]
    names = {}
    exec(compile(text, name, "exec"), namespace | {"n": 5}, names)
    assert names["x"] == [5]


def test_exec_of_other_text_than_registered():
    """Text registered under the same name but not run is refused."""
    name, text = "<other text>", "with Trace():\n    x = [n].save()\n"
    other = text.replace("n]", "m]")
    linecache.cache[name] = (len(other), None, other.splitlines(keepends=True), name)
    with pytest.raises(SourceChangedError):
        exec(compile(text, name, "exec"), {"Trace": Trace, "n": 4, "m": 5})


def test_exec_of_unregistered_text():
    """Text of no file and no linecache entry is refused with advice that fits (C2, G17)."""
    text = "with Trace():\n    x = [1].save()\n"
    with pytest.raises(WithBlockNotFoundError, match="register text run by `exec`"):
        exec(compile(text, "<nowhere>", "exec"), {"Trace": Trace})


@pytest.fixture
def shell():
    """IPython's own shell, as a notebook runs it."""
    interactive = pytest.importorskip("IPython.core.interactiveshell")
    instance = interactive.InteractiveShell.instance()
    instance.user_ns["Trace"] = Trace
    yield instance
    interactive.InteractiveShell.clear_instance()


@pytest.mark.parametrize("interactivity", ["last_expr", "all"])
def test_notebook_cell(shell, interactivity):
    """A notebook cell, whose statements IPython compiles one by one, is captured each time (C2)."""
    shell.ast_node_interactivity = interactivity
    for n in (1, 2):
        shell.run_cell(f"n = {n}\nwith Trace():\n    n\n    x = [n].save()\nx").raise_error()
        assert shell.user_ns["x"] == [n]
    shell.run_cell("def f(a):\n    with Trace():\n        y = [a].save()\n    return y")
    shell.run_cell("z = f(3)").raise_error()
    assert shell.user_ns["z"] == [3]


def test_notebook_cell_that_imports_what_its_block_uses(shell):
    """An import in the same cell, which changes how calls are compiled, does not hide the block."""
    cell = "import math\nwith Trace():\n    r = [math.sqrt(4), math.ceil(x=1) if 0 else 1].save()"
    shell.run_cell(cell).raise_error()
    assert shell.user_ns["r"] == [2.0, 1]


def test_notebook_cell_with_magics_and_await(shell):
    """Line magics and top-level await in the same cell do not hide the block."""
    cell = """
    import asyncio
    %precision 3
    await asyncio.sleep(0)
    for i in range(2):
        await asyncio.sleep(0)
        with Trace():
            w = [i].save()
    """
    shell.run_cell(textwrap.dedent(cell)).raise_error()
    assert shell.user_ns["w"] == [1]


def test_notebook_cell_that_awaits_beside_its_block(shell):
    """What a cell awaits before and after a block, on a line of its own, does not hide it."""
    cell = "import asyncio\nawait asyncio.sleep(0)\nwith Trace():\n    v = [5].save()\n"
    shell.run_cell(cell + "await asyncio.sleep(0)\n").raise_error()
    assert shell.user_ns["v"] == [5]


@pytest.mark.parametrize("interactivity", ["last_expr", "all"])
def test_notebook_cell_with_text_in_its_block(shell, interactivity):
    """A text or number on a line of its own, which a cell may show, does not hide the block."""
    shell.ast_node_interactivity = interactivity
    shell.run_cell("with Trace():\n    'text'\n    t = [6].save()\n    7\n").raise_error()
    assert shell.user_ns["t"] == [6]


def test_columns_are_counted_in_bytes():
    """Characters outside ASCII before a body or in it change nothing."""
    naïve = ["é"]
    if naïve: ünï = 1; "äöü"; [None for _ in "ü"]  # noqa: E701, E702  # fmt: skip
    with Trace("größe") as trace:
        wörter = [*naïve, "ß"].save(); mehr = [*wörter].save()  # noqa: E702  # fmt: skip
    assert mehr == ["é", "ß"]


def test_importing_tracing_does_not_import_torch():
    """The package is usable, and imported, without torch and without vLLM."""
    code = "import sys, midstream.tracing; print(sorted({'torch', 'vllm'} & set(sys.modules)))"
    done = python("-c", code)
    assert done.stdout.strip() == "[]", done.stderr
