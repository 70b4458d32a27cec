"""Runs of blocks: their saves, their errors, the function form."""

from __future__ import annotations

import functools
import linecache

import pytest

from midstream.tracing import Block, Code, Execution, save, user_traceback

from .helpers import Trace, load


def run(block, *arguments):
    execution = Execution(block, *arguments)
    execution.run()
    return execution.saves()


def test_saves_are_there_after_an_exception():
    """What was saved before a block failed is returned, and the exception comes out as it is."""
    with pytest.raises(ZeroDivisionError), Trace() as trace:
        before = [1].save()
        1 / 0
        after = [2].save()
    assert trace.execution.saves() == {"before": [1]}
    assert before == [1]


def test_extra_names_win():
    """Names given to a run stand in for the block's own values."""
    block = Block(code=Code("    x = [y, z].save()\n", "f.py", 2), values={"y": 1, "z": 2})
    execution = Execution(block, extra={"z": 3})
    execution.run()
    assert execution.saves() == {"x": [1, 3]}
    assert block.values == {"y": 1, "z": 2}


def test_own_names_do_not_come_back():
    """The names that midstream puts beside the block's are never among its saves."""
    block = Block(code=Code("    x = __name__\n    save(__builtins__)\n", "f.py", 2))
    block.values["save"] = save
    assert run(block) == {}


def test_function_form_returns_its_saved_variables():
    """Local variables that hold a saved object when the function returns are its saves."""

    def fn(model, tracer):
        first = save([model])
        second = save([tracer])
        second = [0]
        return

    assert run(Block(function=fn), "m", "t") == {"first": ["m"]}


@pytest.mark.parametrize(
    ("returned", "saves"),
    [
        ({"a": 1, "b": True}, {"a": 1, "b": True}),
        (None, {}),
        (5, {"return": 5}),
        ({1: 2}, {"return": {1: 2}}),
    ],
)
def test_function_form_return_value(returned, saves):
    """A dict with text keys gives a save per key, any other value is saved as "return"."""
    assert run(Block(function=lambda model, tracer: returned)) == saves


def test_function_form_joins_variables_and_dict():
    """Saved variables and the returned dict are merged; the dict wins."""

    def fn(model, tracer):
        x, y = save([1]), save([2])
        return {"y": 3}

    assert run(Block(function=fn)) == {"x": [1], "y": 3}


def test_function_form_after_an_exception():
    """The saved variables of a function that failed are returned."""

    def fn(model, tracer):
        x = save([1])
        raise LookupError("late")

    execution = Execution(Block(function=fn))
    with pytest.raises(LookupError):
        execution.run()
    assert execution.saves() == {"x": [1]}


def test_function_form_of_every_kind():
    """Methods, partials, wrapped functions and callable objects work, saves in helpers too."""

    def helper(value):
        return save([value])

    def fn(model, tracer, extra=0):
        x = helper(extra)

    @functools.wraps(fn)
    def wrapped(*args):
        return fn(*args, 2)

    class Own:
        def method(self, model, tracer):
            x = helper(3)

        def __call__(self, model, tracer):
            x = helper(4)

    functions = [functools.partial(fn, extra=1), wrapped, Own().method, Own()]
    assert [run(Block(function=f)) for f in functions] == [{"x": [n]} for n in (1, 2, 3, 4)]


FAILING = """
def helper(x):
    return x / 0
def f():
    with Trace() as trace:
        first = 1

        def inner(x):
            return helper(x)
        inner(
            first
        )
def g(trace):
    with trace:
        1 / 0
"""


def test_traceback_shows_the_users_lines(tmp_path):
    """The text has the user's file, true lines and the block's own text, if the file is gone.

    (C13).
    """
    path = tmp_path / "failing_module.py"
    module = load(path, FAILING)
    trace = Trace()
    module.Trace = lambda: trace
    with pytest.raises(ZeroDivisionError) as caught:
        module.f()
    path.write_text("# nothing of what ran\n" * 20)
    linecache.clearcache()
    text = user_traceback(trace.block, caught.value)
    assert f'File "{path}", line 10, in f\n    inner(\n' in text
    assert f'File "{path}", line 9, in inner\n    return helper(x)\n' in text
    assert f'File "{path}", line 3, in helper\n' in text
    assert "nothing of what ran" not in text
    assert "tracing/execute.py" not in text
    assert text.endswith("ZeroDivisionError: division by zero\n")


def test_traceback_drops_our_frames_from_causes_too():
    """Chained exceptions are shown, without midstream's frames in any of them (C98)."""
    source = "    try:\n        save_it()\n"
    source += "    except Exception as e:\n        raise KeyError('k') from e\n"
    block = Block(code=Code(source, "f.py", 2), values={"save_it": lambda: save.nothing})
    block.code.compiled()
    with pytest.raises(KeyError) as caught:
        run(block)
    text = user_traceback(block, caught.value)
    assert "AttributeError" in text
    assert "The above exception was the direct cause" in text
    assert 'File "f.py", line 3, in <module>\n    save_it()' in text
    assert "midstream/tracing" not in text


def test_traceback_of_exception_groups():
    """The members of an exception group show the block's lines."""
    source = "    try:\n        1 / 0\n    except ZeroDivisionError as e:\n        error = e\n"
    source += "    raise ExceptionGroup('several', [error])\n"
    block = Block(code=Code(source, "f.py", 2))
    with pytest.raises(ExceptionGroup) as caught:
        run(block)
    text = user_traceback(block, caught.value)
    assert "line 3, in <module>" in text
    assert "1 / 0" in text
    assert "several" in text


def test_traceback_of_the_function_form(tmp_path):
    """A function's lines are shown as they were when the block was made."""
    path = tmp_path / "function_module.py"
    module = load(path, "def fn(model, tracer):\n    x = 1\n    return x / 0\n")
    block = Block(function=module.fn)
    path.write_text("# edited\n" * 5)
    linecache.clearcache()
    with pytest.raises(ZeroDivisionError) as caught:
        run(block)
    assert "line 3, in fn\n    return x / 0" in user_traceback(block, caught.value)


def test_traceback_has_no_trace_of_the_skipped_body():
    """What an error meets while a `with` body is being skipped stays out of its text."""
    block = Block(code=Code("    1 / 0\n", "f.py", 2))
    with pytest.raises(ZeroDivisionError) as failure, Trace():
        1 / 0
    error = failure.value
    assert error.__context__ is not None  # raised where the signal was being handled
    assert "_BodySkipped" not in user_traceback(block, error)
    assert error.__context__ is None
