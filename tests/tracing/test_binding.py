"""Results reach the caller's variables wherever they are kept."""

from __future__ import annotations

import sys

from midstream.tracing import bind

from .helpers import Trace

module_level = None

with Trace():
    bound_at_import = [1].save()


def here():
    return sys._getframe(1)


def test_module_level():
    """A trace at module level binds module globals (C24)."""
    assert bound_at_import == [1]


def test_fast_locals():
    """Plain local variables are bound, old values replaced, other variables kept (C24)."""
    kept, old, new = 1, 2, None
    del new
    bind(here(), {"old": 20, "new": 30})
    assert (kept, old, new) == (1, 20, 30)


def test_cell_and_free_variables():
    """Variables shared with functions inside and outside are bound for all of them (C24)."""
    free = 0

    def middle():
        nonlocal free
        cell = 0

        def inner():
            return cell

        bind(here(), {"cell": 1, "free": 2})
        return inner(), free

    assert middle() == (1, 2)
    assert free == 2


def test_arguments():
    """Arguments are variables like others, also those kept in cells."""

    def function(a, *b, **c):
        def inner():
            return a

        bind(here(), {"a": 1, "b": 2, "c": 3})
        return inner(), b, c

    assert function(0) == (1, 2, 3)


def test_declared_global():
    """A name declared global, before the block or in it, is bound in the module."""

    def function():
        global module_level, made_global
        with Trace():
            module_level = [1].save()
            made_global = [2].save()

    function()
    assert (module_level, made_global) == ([1], [2])


def test_global_that_is_only_read():
    """A module's list that the block fills and saves comes back to the module."""
    global module_level
    module_level = [1]

    def function():
        with Trace():
            module_level.append(2)
            module_level.save()

    function()
    assert module_level == [1, 2]


def test_class_body():
    """A class body binds its own names, globals it declares, and nonlocals of its function.

    (C24).
    """
    around = 0

    class Holder:
        nonlocal around
        global module_level
        module_level = around = 0
        bind(here(), {"around": 1, "module_level": 2, "own": 3})

    assert (around, module_level, Holder.own) == (1, 2, 3)


def test_class_body_in_a_mapping_of_its_metaclass():
    """A class body whose metaclass prepared a mapping is bound through that mapping."""

    class Doubling(dict):
        def __setitem__(self, key, value):
            super().__setitem__(key, value * 2)

    class Meta(type):
        @classmethod
        def __prepare__(cls, name, bases):
            return Doubling()

    class Made(metaclass=Meta):
        bind(here(), {"x": 1})

    assert Made.x == 2


def test_comprehension_variable_of_the_same_name_as_a_global():
    """A comprehension's variable does not hide the module's name from the block."""
    own = [global_list + 1 for global_list in (1, 2)]
    with Trace():
        got = [*global_list].save()
    assert (own, got) == ([2, 3], [7])


global_list = [7]


def test_comprehension_in_a_class_body():
    """A comprehension of a class body that reads a name does not make it global."""

    class Holder:
        value = ()
        with Trace():
            value = len("ab").save()
        seen = len([len(global_list) for _ in range(1)])

    assert Holder.value == 2


def test_generator_frame():
    """A generator's variables are bound while it runs and kept when it yields."""

    def generate():
        value = 0
        bind(here(), {"value": 1})
        yield value
        yield value

    assert list(generate()) == [1, 1]


def test_under_a_trace_function():
    """Binding holds while a debugger traces the frame and reads its variables."""

    def look(frame, event, arg):
        _ = frame.f_locals
        return look

    def function():
        value = shared = 0

        def inner():
            return shared

        bind(here(), {"value": 1, "shared": 2})
        after = 1
        return value, inner(), after

    previous = sys.gettrace()
    sys.settrace(look)
    try:
        result = function()
    finally:
        sys.settrace(previous)
    assert result == (1, 2, 1)
