"""Where a body can be captured, and what is captured of it."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import weakref

import pytest

from midstream.errors import CaptureError
from midstream.tracing import Capture

from .helpers import Trace, load

outside = [1, 2, 3]
ran_in_place = []


def test_body_is_not_run_where_it_stands():
    """The body is skipped, and only the block runs it (C1)."""
    ran_in_place.clear()
    with Trace(run=False) as trace:
        ran_in_place.append(1)
    assert ran_in_place == []
    assert trace.block.values == {"ran_in_place": ran_in_place}


def test_block_has_true_lines_text_and_name():
    """The block's code says which file, which lines and which function it comes from."""
    here = sys._getframe().f_lineno
    with Trace(run=False) as trace:
        value = outside[0]

        other = value  # a comment
    code = trace.block.code
    assert code.filename == __file__
    assert (code.first_line, code.last_line) == (here + 2, here + 4)
    assert code.source == ("        value = outside[0]\n\n        other = value  # a comment\n")
    assert code.name == "test_block_has_true_lines_text_and_name"
    assert len(code.digest) == 32
    assert code.compiled().code.co_name == code.name


def test_only_names_that_are_read_are_carried():
    """Attribute names, names the block binds first, and builtins are not outside names (C12)."""
    unused, used, rebound = object(), [1], 2
    with Trace(run=False) as trace:
        rebound = len(used)
        local = rebound
        print(local.real)
    assert set(trace.block.values) == {"used"}


def test_a_name_read_before_it_is_bound_is_carried():
    """A name that some path reads before the block binds it keeps its outside value."""
    total, flag, last = 5, False, 7
    with Trace() as trace:
        total = total + 1
        if flag:
            last = 0
        result = (total + last).save()
    assert result == 13
    assert set(trace.block.values) == {"total", "flag", "last"}


def test_unbound_local_is_not_looked_up_elsewhere():
    """A variable that is local but unbound is an error when read, not the global of that name."""
    with pytest.raises(NameError, match="outside"), Trace() as trace:
        missing = outside  # noqa: F823 - that is the point
    outside = trace  # makes the name local to this function


def test_undefined_name_is_left_to_the_run():
    """A name found nowhere raises NameError when the block reads it."""
    with Trace(run=False) as trace:
        undefined_name
    assert trace.block.values == {}
    with pytest.raises(NameError, match="undefined_name"), Trace():
        undefined_name


def test_loop_captures_each_pass_values():
    """Each pass of a loop captures the values of that pass and binds its own results (C10)."""
    seen = []
    for factor in (1, 2, 3):
        with Trace() as trace:
            product = (factor * 10).save()
        seen.append((product, trace.block.values))
    assert seen == [(10, {"factor": 1}), (20, {"factor": 2}), (30, {"factor": 3})]


def test_method_and_private_names():
    """In a method, private names mean the class's own, on attributes and on variables."""

    class _Owner:
        def __init__(self):
            self.__secret = [4]

        def read(self):
            __mine = 3
            with Trace():
                __found = [*self.__secret, __mine].save()
            return [*__found, 5]

    assert _Owner().read() == [4, 3, 5]


def test_closures_are_read_and_bound():
    """Variables shared with nested functions are read from and written to their cells."""
    shared = [1]

    def inner():
        nonlocal_value = 2
        with Trace():
            both = [*shared, nonlocal_value].save()

        def show():
            return both

        return show()

    assert inner() == [1, 2]


def test_nested_functions_and_comprehensions_see_block_names():
    """Functions, lambdas and comprehensions of the block see what the block binds (C11)."""
    with Trace():
        base = 10

        def add(x):
            return x + base

        values = [add(i) + (lambda: base)() for i in range(2)].save()
    assert values == [20, 21]


def test_inside_async_function():
    """A trace works inside `async def`, also under an `async with`."""

    class Around:
        async def __aenter__(self):
            return 5

        async def __aexit__(self, *_):
            return False

    async def main():
        async with Around() as five:
            await asyncio.sleep(0)
            with Trace():
                got = [five].save()
            await asyncio.sleep(0)
        return got

    assert asyncio.run(main()) == [5]


def test_inside_generator():
    """A trace works in a generator between two yields."""

    def steps():
        for i in range(2):
            yield "before"
            with Trace():
                got = [i].save()
            yield got

    assert list(steps()) == ["before", [0], "before", [1]]


def test_class_body():
    """A trace in a class body reads the function around it and binds class attributes."""
    around = 3

    class Holder:
        own = 4
        with Trace():
            total = [around, own, len(outside)].save()

    assert Holder.total == [3, 4, 3]
    assert around == 3


def test_several_nested_traces():
    """Traces inside a captured body are captured from the block's own source."""
    prompt = [7]
    with Trace() as tracer:
        with tracer.invoke("a"):
            first = [*prompt, 1].save()
        for i in range(2):
            with tracer.invoke("b"):
                second = [*prompt, i].save()
        both = [first, second].save()
    assert both == [[7, 1], [7, 1]]


def test_recursion_and_threads():
    """Captures of one statement at once, on a stack and in threads, do not meet."""

    def down(n):
        rest = down(n - 1) if n else []
        with Trace():
            result = [n, *rest].save()
        return list(result)

    results = {}
    threads = [threading.Thread(target=lambda i=i: results.update({i: down(i)})) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {i: list(range(i, -1, -1)) for i in range(4)}


def test_module_with_asserts_rewritten_by_pytest():
    """Asserts in the block, which pytest has rewritten in this very file, do not matter."""
    values = [1]
    with Trace():
        assert values, "said before"
        copy = list(values).save()
        assert [v + 1 for v in copy] == [2]
    assert copy == [1]
    with pytest.raises(AssertionError), Trace():
        assert not values


def test_future_flags_apply():
    """The block is compiled under the file's `from __future__` imports."""
    with Trace() as trace:

        def annotated(x: no_such_name) -> also_missing:
            return x

        kept = annotated.__annotations__.save()
    assert trace.block.code.flags
    assert kept == {"x": "no_such_name", "return": "also_missing"}


def test_annotated_assignment_and_walrus():
    """Annotated variables and assignment expressions of a block bind as in a function."""
    with Trace():
        first: no_such_type = [1].save()
        second: int  # noqa: F842
        if (third := [3].save()) and first:
            pass
    assert (first, third) == ([1], [3])


def test_foreign_exception_passes_and_tracing_is_restored():
    """An exception on the way into the body is not swallowed, and leaves no trace function."""

    class Target:
        @property
        def slot(self):
            return None

        @slot.setter
        def slot(self, value):
            raise LookupError("target")

    with pytest.raises(LookupError, match="target"), Trace() as Target().slot:
        ran_in_place.append(1)
    assert sys._getframe().f_trace is None


def test_body_run_in_place_is_an_error():
    """If another tool takes the trace function away, the body is not run a second time."""
    previous = sys.gettrace()

    class Thief(Trace):
        def __enter__(self):
            frame = sys._getframe(1)
            self.capture = Capture.begin(frame)
            frame.f_trace = None
            sys.settrace(None)

    with pytest.raises(CaptureError, match="ran in place"), Thief():
        ran_in_place.append(1)
    assert sys.gettrace() is previous


def test_capture_is_finished_once():
    """A second finish is an error instead of a second block."""
    with Trace(run=False) as trace:
        ran_in_place.append(1)
    with pytest.raises(CaptureError, match="finished already"):
        trace.capture.finish(None, None)


def test_capture_keeps_no_frame_alive(tmp_path):
    """After a trace, neither the caller's variables nor its code object are held."""
    module = load(
        tmp_path / "held_module.py",
        """
        def f(thing):
            with Trace() as trace:
                x = [1].save()
            return x
        """,
    )

    class Thing:
        pass

    thing = Thing()
    alive, code = weakref.ref(thing), weakref.ref(module.f.__code__)
    assert module.f(thing) == [1]
    del thing
    assert alive() is None
    del module, sys.modules["held_module"]
    gc.collect()
    assert code() is None
