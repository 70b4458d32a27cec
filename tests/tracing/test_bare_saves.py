"""Saves that are bound to no name warn at capture."""

from __future__ import annotations

import warnings

import pytest

import midstream
from midstream.errors import UnboundSaveWarning
from midstream.tracing import save

from .helpers import Trace, load


def bare_lines(tmp_path, body):
    """Return the lines, counted within the body, of the saves that warn."""
    text = "import midstream\nfrom midstream.tracing import save\ndef f(v=[1], acts=[]):\n"
    text += "    with Trace(run=False):\n" + "".join(f"        {x}\n" for x in body.split("\n"))
    module = load(tmp_path / "bare_module.py", text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(midstream, "save", save, raising=False)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            module.f()
    assert all(w.category is UnboundSaveWarning for w in caught)
    assert all(w.filename.endswith("bare_module.py") for w in caught)
    return [w.lineno - 4 for w in caught]


@pytest.mark.parametrize(
    ("statement", "warns"),
    [
        ("v[0].save()", True),
        ("acts.append(v.save())", True),
        ("acts.append(v[0].save())", True),
        ("acts[0] = v[0].save()", True),
        ("hs = [x.save() for x in v]", True),
        ("h = v[0].save() * 2", True),
        ("a, b = v[0].save()", True),
        ("acts.append(save(v[0]))", True),
        ("acts.append(midstream.save(v))", True),
        ("v.save()", False),
        ("save(v)", False),
        ("midstream.save(v)", False),
        ("h = v[0].save()", False),
        ("h = v.save() * 2", False),
        ("h = midstream.save(v[0])", False),
        ("h: list = v[0].save()", False),
        ("print(h := v[0].save())", False),
        ("a = b = v[0].save()", False),
        ("a, *b, c = v[0].save(), 1, 2, v[0].save()", False),
        ("h = v[0].save() if v else None", False),
        ("hs = [x for x in v].save()", False),
        ("def f(): return v[0].save()", False),
        ("acts.append(v.save('file'))", False),
    ],
)
def test_bare_saves_warn_with_their_line(tmp_path, statement, warns):
    """A save bound to no name warns at capture, in the user's file and line; others do not.

    (O17).
    """
    assert bare_lines(tmp_path, f"pass\n{statement}") == ([2] if warns else [])


def test_save_of_something_else_is_not_ours(tmp_path):
    """A function of the user's that is called `save` is no save of a value."""
    text = "def f(save=print):\n    with Trace(run=False):\n        print(save(1 + 1))\n"
    assert load(tmp_path / "own_save_module.py", text).f() is None


def test_bare_save_can_be_an_error():
    """With warnings as errors, the trace is not entered and no trace function stays."""
    with pytest.raises(UnboundSaveWarning, match="bound to no name"), Trace():
        [1][0].save()
