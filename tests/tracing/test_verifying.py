"""The text that is captured is the code that runs, or capture is refused."""

from __future__ import annotations

import importlib
import linecache
import os

import pytest

from midstream.errors import SourceChangedError, WithBlockNotFoundError

from .helpers import Trace, load

BEFORE = """
def f(y=5):
    a = 1
    with Trace():
        x = [y + 1, a].save()
        z = 2
    return x
"""


@pytest.mark.parametrize(
    "after",
    [
        BEFORE.replace("a = 1", "a = 1\n"),  # the lines moved
        BEFORE.replace("y + 1", "y + 2"),  # a constant
        BEFORE.replace("y + 1", "y - 1"),  # an operator
        BEFORE.replace("y + 1", "a + 1"),  # a name
        BEFORE.replace("with Trace", "while Trace"),  # no `with` there
        BEFORE.replace("        z = 2", "    z = 2"),  # the body ends earlier
        BEFORE.replace("    return x", "        return x"),  # it ends later
        BEFORE.replace("        z = 2\n", ""),
        "not python (",
        BEFORE.replace("x = [", "q = ["),
    ],
)
def test_file_edited_after_import(tmp_path, after):
    """A file that no longer is the running code is an error, never another block's code.

    (C2, G17).
    """
    path = tmp_path / "edited_module.py"
    linecache.checkcache()
    module = load(path, BEFORE)
    path.write_text(after)
    os.utime(path, ns=(1, 1))
    with pytest.raises(SourceChangedError, match="edited after it was imported"):
        module.f()


def test_edit_that_leaves_the_body_alone(tmp_path):
    """An edit elsewhere that moves no line of the body is no reason to refuse."""
    module = load(tmp_path / "kept_module.py", BEFORE)
    (tmp_path / "kept_module.py").write_text(BEFORE + "\ndef g():\n    return 1\n")
    assert module.f() == [6, 1]


def test_edit_after_the_first_capture(tmp_path):
    """What was captured once from running code stays right whatever becomes of the file (C3)."""
    path = tmp_path / "later_module.py"
    module = load(path, BEFORE)
    assert module.f() == [6, 1]
    path.write_text(BEFORE.replace("y + 1", "y + 9"))
    assert module.f() == [6, 1]
    path.unlink()
    assert module.f() == [6, 1]


def test_edited_and_reloaded(tmp_path):
    """After a reload the new text is captured."""
    path = tmp_path / "again_module.py"
    assert load(path, BEFORE).f() == [6, 1]
    assert load(path, BEFORE.replace("y + 1", "y + 10")).f() == [15, 1]


def test_and_for_or_in_a_module_without_asserts(tmp_path):
    """A changed boolean operator is seen even where no column moves."""
    before = "def f(a=0, b=[1]):\n    with Trace():\n        x = a and b\n        y = [x].save()\n"
    path = tmp_path / "boolean_module.py"
    module = load(path, before)
    path.write_text(before.replace("and b", "or  b"))
    linecache.checkcache()
    with pytest.raises(SourceChangedError):
        module.f()


LEFT_AT_ONCE = "for i in [1]:\n            if i: pass\n            break"


@pytest.mark.parametrize(
    ("line", "after"),
    [
        ("import json as m", "import math as m"),
        ("for i in [1]:\n            continue", "for i in [1]:\n            break"),
        ("for i in [1]:\n            if i: continue\n            break", LEFT_AT_ONCE),
        ("x = dict(p=1)", "x = dict(q=1)"),
        ("def g(*p): return 1", "def g(*q): return 1"),
        ("def g():\n            global p; x = 1", "def g():\n            global x; x = 1"),
    ],
)
def test_edits_that_move_nothing(tmp_path, line, after):
    """A changed import, way out of a loop, keyword or `global` is seen where no column moves."""
    before = f"def f():\n    with Trace():\n        {line}\n        y = [1].save()\n"
    path = tmp_path / "unmoved_module.py"
    module = load(path, before)
    path.write_text(before.replace(line, after))
    linecache.checkcache()
    with pytest.raises(SourceChangedError):
        module.f()


def test_edit_of_a_module_with_rewritten_asserts(tmp_path, monkeypatch):
    """An edit is seen in a module whose asserts pytest rewrote, and its own asserts are not one."""
    header = f"from {Trace.__module__} import Trace\n"
    text = BEFORE.replace("z = 2", "assert x == [y + 1, a], 'said'")
    for name, after in (("kept_asserts", text), ("edited_asserts", text.replace("a]", "1]", 1))):
        path = tmp_path / f"{name}.py"
        path.write_text(header + text)
        pytest.register_assert_rewrite(name)
        monkeypatch.syspath_prepend(tmp_path)
        module = importlib.import_module(name)
        assert "@pytest_ar" in vars(module)
        path.write_text(header + after)
        if after == text:
            assert module.f() == [6, 1]
        else:
            with pytest.raises(SourceChangedError):
                module.f()


def test_rewritten_asserts_in_a_function_of_many_variables(tmp_path, monkeypatch):
    """Pytest's asserts bring variables, which change how those of the block are loaded."""
    values = "".join(f"        v{i} = {i}\n" for i in range(15))
    text = f"def f():\n    with Trace():\n        assert str(1) == '1'\n{values}"
    text += "        x = [v13, v14].save()\n    return x\n"
    path = tmp_path / "many_asserts.py"
    path.write_text(f"from {Trace.__module__} import Trace\n{text}")
    pytest.register_assert_rewrite("many_asserts")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("many_asserts")
    assert "@pytest_ar" in vars(module)
    assert module.f() == [13, 14]


def test_many_constants_and_names(tmp_path):
    """A body far into a function with hundreds of constants is verified like any other."""
    many = "".join(f"    v{i} = {i}.5\n" for i in range(400))
    text = f"def f():\n{many}    with Trace():\n        x = [v399, 1234.5].save()\n    return x\n"
    assert load(tmp_path / "many_module.py", text).f() == [399.5, 1234.5]


def test_file_that_is_gone(tmp_path):
    """Without its file, a module's block cannot be captured, and the error says so (C2, G17)."""
    path = tmp_path / "gone_module.py"
    module = load(path, BEFORE)
    path.unlink()
    linecache.checkcache()
    with pytest.raises(WithBlockNotFoundError, match="cannot be read") as caught:
        module.f()
    assert not isinstance(caught.value, SourceChangedError)
