"""What a save marks, and under which names it comes back."""

from __future__ import annotations

import contextvars
import ctypes
import enum
import gc
import weakref
from collections.abc import Iterator

import greenlet
import pytest

from midstream.errors import NotInTraceError
from midstream.tracing import Scope, save, scoped
from midstream.tracing.saves import save_call, save_method

from .helpers import Trace


class Colour(enum.Enum):
    """An enumeration, whose members are shared."""

    RED = 1


class Thing:
    """An object that can be weakly referenced."""


def test_save_outside_a_block():
    """Outside a running block a save is an error, which is a ValueError too (C21, G20)."""
    with pytest.raises(NotInTraceError, match="outside a running block"):
        save([1])
    with pytest.raises(ValueError, match="move the call"):
        save([1])


def test_save_returns_its_value_and_comes_back_by_identity():
    """A marked object comes back under every name that holds it, an equal one does not.

    (C19, C20).
    """
    scope, value = Scope(), [1]
    with scoped(scope):
        assert save(value) is value
    assert scope.collect({"a": value, "b": [1], "c": value}) == {"a": value, "c": value}


@pytest.mark.parametrize(
    "value",
    [True, None, 3, -5, 256, 0.5, "text", b"bytes", (), (1, "a"), Colour.RED, 1j, frozenset(), int],
)
def test_shared_objects_come_back_under_their_name_only(value):
    """An object that Python shares comes back under the name of its save and no other (C23)."""
    scope = Scope()
    scope.mark(value, "named")
    assert scope.collect({"named": value, "other": value}) == {"named": value}
    unnamed = Scope()
    unnamed.mark(value)
    assert unnamed.collect({"other": value}) == {}


def _as_c_does(function):
    """The function as extensions add one to a type."""
    make = ctypes.pythonapi.PyInstanceMethod_New
    make.restype, make.argtypes = ctypes.py_object, [ctypes.py_object]
    return make(function)


@pytest.fixture(params=[lambda function: function, _as_c_does], ids=["function", "method"])
def save_of_all_objects(request: pytest.FixtureRequest) -> Iterator[None]:
    """A `save` that another library has given to every object, as nnsight does."""

    def elsewhere(value):
        raise ValueError("outside of that library's trace")

    table = next(iter(gc.get_referents(object.__dict__)))
    table["save"] = request.param(elsewhere)
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(object))
    yield
    del table["save"]
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(object))


def test_save_where_another_library_gave_every_object_one(save_of_all_objects):
    """`.save()` marks values though another library has given every object such a method."""

    class Figure:
        def save(self, path):
            return f"{path}:own"

    with Trace():
        a, b = [1].save(), (2.5).save()
        c = Figure().save("b")
        c.save()
    assert (a, b, c) == ([1], 2.5, "b:own")


def test_rebound_name_does_not_come_back():
    """A name that was bound to something else after its save is not returned."""
    rebound = "before"
    with Trace() as trace:
        rebound = [1].save()
        rebound = [2]
        kept = [3].save()
        number = (4).save()
        number = 5
    assert rebound == "before"
    assert trace.execution.saves() == {"kept": [3]}


def test_save_on_any_value():
    """`.save()` works on numbers, strings, None, lists and dicts of a block (O1)."""
    with Trace():
        a = (1).save()
        b = "x".save()
        c = None.save()
        d = {}.save()
        e = True.save()
        f, (g, *h, i) = (2.5).save(), ((6).save(), 0, ().save() if a else None)
        flag = True
        d["k"] = 1
    assert (a, b, c, d, e) == (1, "x", None, {"k": 1}, True)
    assert (f, g, i) == (2.5, 6, ())


def test_unrelated_name_of_the_same_object_is_not_overwritten():
    """Saving True does not return other variables that are True (C23)."""
    flag = "mine"
    with Trace() as trace:
        flag = True
        found = (flag is True).save()
    assert flag == "mine"
    assert trace.execution.saves() == {"found": True}


def test_unpacking_names_each_save():
    """Tuple targets with matching saves, also around a star, return each value."""
    with Trace() as trace:
        a, b = (1).save(), (2).save()
        c, *d, e = (3).save(), 0, 0, (4).save()
        f = g = (5).save()
        h = (6).save() if a else None
        if i := (7).save():
            pass
    assert trace.execution.saves() == {
        **{"a": 1, "b": 2, "c": 3, "e": 4},
        **{"f": 5, "g": 5, "h": 6, "i": 7},
    }


def test_plain_calls_of_save():
    """`save(x)` and a module's `save(x)` work as calls and carry the name they are bound to."""
    import midstream.tracing as package

    with Trace() as trace:
        a = save(1)
        b = package.save(2)
        c = [3]
        save(c)
    assert trace.execution.saves() == {"a": 1, "b": 2, "c": [3]}


def test_saves_in_nested_functions():
    """A function of the block may save what it returns."""
    with Trace():

        def make(x):
            return [x].save()

        a = make(1)
    assert a == [1]


def test_container_filled_after_its_save():
    """A list saved empty comes back with what was appended later (C22)."""
    with Trace():
        steps = [].save()
        for i in range(3):
            steps.append(i)
    assert steps == [0, 1, 2]


def test_saved_outside_value_comes_back_changed():
    """A list of the caller's that the block fills and saves comes back."""
    collected = [0]
    with Trace():
        collected.append(1)
        collected.save()
    assert collected == [0, 1]


def test_own_save_methods_are_called():
    """An object or module with a `save` of its own gets the call, with its arguments."""

    class Figure:
        def save(self, path, quality=1):
            return f"{path}:{quality}"

    figure, scope = Figure(), Scope()
    with Trace():
        path = [figure.save("a", quality=2)].save()
    assert path == ["a:2"]
    with scoped(scope):
        assert save_method(figure, ("x",), "b") == "b:1"
        assert save_call(len, ("x",), [1, 2]) == 2
    assert scope.collect({"x": "b:1"}) == {}


def test_class_that_has_our_save_as_its_method():
    """`save = midstream.save` in a class is a save of the instance."""

    class Value:
        save = save

    with Trace() as trace:
        value = Value().save()
    assert trace.execution.saves() == {"value": value}


def test_save_with_arguments_on_a_value_that_has_none():
    """Arguments make it a call of the value's own method, which does not exist."""
    with pytest.raises(AttributeError, match="save"), Trace():
        x = [1].save("file")


def test_marks_of_dead_objects_are_gone():
    """A new object at the address of a saved one that died is not taken for saved (C26)."""
    scope = Scope()
    things = [Thing() for _ in range(5000)]  # so many that some of their places are taken next
    addresses, dead = set(map(id, things)), weakref.ref(things[0])
    for thing in things:
        scope.mark(thing)
    del thing, things
    others = {f"n{i}": Thing() for i in range(5000)}
    assert dead() is None
    assert addresses & set(map(id, others.values()))
    assert scope.collect(others) == {}
    lists = Scope()
    lists.mark([])
    assert lists.collect({f"n{i}": [] for i in range(200)}) == {}


def test_scopes_nest_and_belong_to_their_context():
    """A scope ends where it began, and another context or greenlet does not see it."""
    outer, inner = Scope(), Scope()
    with scoped(outer):
        with scoped(inner):
            a = save([1])
        b = save([2])
        with pytest.raises(NotInTraceError):
            contextvars.Context().run(save, [3])
        results = []

        def body():
            try:
                save([4])
            except NotInTraceError:
                results.append("refused")

        greenlet.greenlet(body).switch()
    assert results == ["refused"]
    assert inner.collect({"a": a, "b": b}) == {"a": a}
    assert outer.collect({"a": a, "b": b}) == {"b": b}
