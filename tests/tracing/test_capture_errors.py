"""Bodies that are refused at capture, each with the user's line and what to write."""

from __future__ import annotations

import contextlib

import pytest

from midstream.errors import (
    BlockLayoutError,
    BlockSyntaxError,
    SourceChangedError,
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
    """`return` names its line and what to do (C6)."""
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
    """Everything that awaits is refused at block level (C8)."""
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
    """Spellings of other tools are refused with the one to use (O24, C61)."""
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
    """A body on the header's line has no line of its own to be skipped at (C4, G18)."""
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
    """`try` as the first statement is refused with the remedy (C4, G19)."""
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
