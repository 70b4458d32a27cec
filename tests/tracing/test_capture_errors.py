"""Bodies that are refused at capture, each with the user's line and what to write."""

from __future__ import annotations

import contextlib
import importlib
import linecache
import os

import pytest

from midstream.errors import (
    BlockLayoutError,
    BlockSyntaxError,
    SourceChangedError,
    UnboundSaveWarning,
    WithBlockNotFoundError,
)

from .helpers import Trace, load


def run_in_function(tmp_path, body, header="with Trace() as tracer:", around="def f(model=None):"):
    """Put a body under a `with` in a function of a module of its own, and call it."""
    lines = [around, f"    {header}", *(f"        {line}" for line in body.split("\n"))]
    module = load(tmp_path / "refused_module.py", "\n".join(lines) + "\n")
    return module.f()


@pytest.mark.parametrize(
    ("body", "line", "advice"),
    [
        ("x = 1\nreturn x", 4, "`return` in a block"),
        ("x = 1\nif x:\n    return", 5, "`return` in a block"),
        ("for i in range(2):\n    pass\nelse:\n    return i", 6, "return after the `with`"),
    ],
)
def test_return_at_block_level(tmp_path, body, line, advice):
    """`return` names its line and what to do."""
    with pytest.raises(BlockSyntaxError, match=advice) as caught:
        run_in_function(tmp_path, body)
    assert caught.value.lineno == line
    assert caught.value.filename.endswith("refused_module.py")
    assert "return" in caught.value.text
    assert isinstance(caught.value, SyntaxError)


def test_break_of_an_outer_loop(tmp_path):
    """`break` and `continue` of a loop around the block are refused, of one inside it are not."""
    module = load(
        tmp_path / "breaks_module.py",
        """
        def outer(word):
            for i in range(3):
                if word == "break":
                    with Trace():
                        x = 1
                        break
                with Trace():
                    x = 1
                    continue
        def inner():
            with Trace():
                for i in range(9):
                    if i == 2:
                        break
                    continue
                got = [i].save()
            return got
        """,
    )
    with pytest.raises(BlockSyntaxError, match="`break` of a loop around"):
        module.outer("break")
    with pytest.raises(BlockSyntaxError, match="`continue` of a loop around"):
        module.outer("continue")
    assert module.inner() == [2]


@pytest.mark.parametrize("body", ["x = 1\nyield x", "x = yield", "yield from ()"])
def test_yield_at_block_level(tmp_path, body):
    """`yield` in a block is refused."""
    lines = ["def g():", "    with Trace():", *(f"        {line}" for line in body.split("\n"))]
    module = load(tmp_path / "yields_module.py", "\n".join(lines))
    with pytest.raises(BlockSyntaxError, match="`yield"):
        list(module.g())


@pytest.mark.parametrize(
    "body",
    [
        "x = await y",
        "async for x in y:\n    pass",
        "async with y:\n    pass",
        "x = [i async for i in y]",
        "x = [await i for i in y]",
    ],
)
def test_await_at_block_level(tmp_path, body):
    """Everything that awaits is refused at block level."""
    lines = ["async def g(y=()):", "    with Trace():"]
    lines += [f"        {line}" for line in body.split("\n")]
    module = load(tmp_path / "awaits_module.py", "\n".join(lines))
    with pytest.raises(BlockSyntaxError, match=r"await|asynchronous"):
        module.g().send(None)


def test_what_belongs_to_nested_functions_is_left_alone():
    """Functions of the block may return, yield and await."""
    with Trace():

        def generate():
            yield 1
            return

        async def wait(x):
            return await x

        got = [*generate(), (lambda: (yield))().__name__].save()
    assert got == [1, "<lambda>"]


def test_nonlocal_at_block_level():
    """`nonlocal` in a block is refused with what to do instead."""
    count = 0

    def inner():
        with Trace():
            nonlocal count
            count = 1

    with pytest.raises(BlockSyntaxError, match="`nonlocal` in a block"):
        inner()


def test_nonlocal_of_a_block_name_in_a_nested_function():
    """`nonlocal` that means a block's own name says to write `global`."""
    with pytest.raises(BlockSyntaxError, match="write `global` instead"), Trace():
        count = 0

        def bump():
            nonlocal count
            count += 1


def test_super_without_arguments():
    """`super()` has no class to start from in a block."""

    class Child(dict):
        def read(self):
            with Trace():
                x = super().get(1)

    with pytest.raises(BlockSyntaxError, match="before the `with`"):
        Child().read()


@pytest.mark.parametrize(
    ("body", "spelling"),
    [
        ("with tracer.iter[:3]:\n    pass", "for step in tracer.iter"),
        ("with tracer.iter[:3] as step:\n    pass", "for step in tracer.iter"),
        ("with tracer.all():\n    pass", "for step in tracer.all"),
        ("for step in model.iter[:3]:\n    pass", "for step in tracer.iter"),
        ("with model.iter[0]:\n    pass", "for step in tracer.iter"),
        ("for step in model.all():\n    pass", "tracer.all()"),
        ("x = tracer.backend()", "write `tracer.backend`"),
    ],
)
def test_old_spellings(tmp_path, body, spelling):
    """Spellings of other tools are refused with the one to use."""
    header = "with model.trace('x') as tracer:"
    around = "def f(model=type('M', (), {'trace': lambda s, p: Trace()})()):"
    with pytest.raises(BlockSyntaxError, match=r"write|loop") as caught:
        run_in_function(tmp_path, body, header, around)
    assert spelling in str(caught.value)


def test_unrelated_names_keep_their_methods():
    """`iter`, `all` and `backend` of other objects are no old spellings."""

    class Other:
        iter = (1, 2)
        all = backend = staticmethod(lambda: 3)

    other = Other()
    with Trace() as tracer:
        seen = [*other.iter, other.all(), other.backend()].save()
        method = [tracer.invoke.__name__].save()
    assert (seen, method) == ([1, 2, 3, 3], ["invoke"])


def test_body_on_the_header_line(tmp_path):
    """A body on the header's line has no line of its own to be skipped at."""
    module = load(
        tmp_path / "layout_module.py",
        """
        def one():
            with Trace(): x = 1
        def several():
            with (
                Trace()
            ): x = 1
        """,
    )
    for function in (module.one, module.several):
        with pytest.raises(BlockLayoutError, match="line of its own") as caught:
            function()
        assert isinstance(caught.value, ValueError)


def test_body_that_starts_with_try():
    """`try` as the first statement is refused with the remedy."""
    with pytest.raises(BlockLayoutError, match="put any statement"), Trace():
        try:
            x = 1
        finally:
            pass


def test_another_item_after_ours():
    """A context manager after ours in the same `with` is refused."""
    with pytest.raises(BlockLayoutError, match="put trace"):
        with Trace() as t, contextlib.nullcontext():
            x = 1


def test_entered_without_a_with_statement():
    """ExitStack leaves no body to capture."""
    with contextlib.ExitStack() as stack, pytest.raises(WithBlockNotFoundError, match="ExitStack"):
        stack.enter_context(Trace())
    with pytest.raises(WithBlockNotFoundError, match="is not a `with` statement") as caught:
        Trace().__enter__()
    assert not isinstance(caught.value, SourceChangedError)


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
    """A file that no longer is the running code is an error, never another block's code."""
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
    """What was captured once from running code stays right whatever becomes of the file."""
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


def test_many_constants_and_names(tmp_path):
    """A body far into a function with hundreds of constants is verified like any other."""
    many = "".join(f"    v{i} = {i}.5\n" for i in range(400))
    text = f"def f():\n{many}    with Trace():\n        x = [v399, 1234.5].save()\n    return x\n"
    assert load(tmp_path / "many_module.py", text).f() == [399.5, 1234.5]


def test_file_that_is_gone(tmp_path):
    """Without its file, a module's block cannot be captured, and the error says so."""
    path = tmp_path / "gone_module.py"
    module = load(path, BEFORE)
    path.unlink()
    linecache.checkcache()
    with pytest.raises(WithBlockNotFoundError, match="cannot be read") as caught:
        module.f()
    assert not isinstance(caught.value, SourceChangedError)


def bare_lines(tmp_path, body):
    """Return the lines, counted within the body, of the saves that warn."""
    text = "import midstream\nfrom midstream.tracing import save\ndef f(v=[1], acts=[]):\n"
    text += "    with Trace(run=False):\n" + "".join(f"        {x}\n" for x in body.split("\n"))
    module = load(tmp_path / "bare_module.py", text)
    with pytest.MonkeyPatch.context() as patch:
        import midstream
        from midstream.tracing import save

        patch.setattr(midstream, "save", save, raising=False)
        import warnings

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
    """A save bound to no name warns at capture, in the user's file and line; others do not."""
    assert bare_lines(tmp_path, f"pass\n{statement}") == ([2] if warns else [])


def test_save_of_something_else_is_not_ours(tmp_path):
    """A function of the user's that is called `save` is no save of a value."""
    text = "def f(save=print):\n    with Trace(run=False):\n        print(save(1 + 1))\n"
    assert load(tmp_path / "own_save_module.py", text).f() is None


def test_bare_save_can_be_an_error():
    """With warnings as errors, the trace is not entered and no trace function stays."""
    with pytest.raises(UnboundSaveWarning, match="bound to no name"), Trace():
        [1][0].save()
