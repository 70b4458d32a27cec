"""Headers, first statements and surroundings of every shape."""

from __future__ import annotations

import pytest

from .helpers import Trace


def test_nested_control_flow():
    """A trace is captured inside for, while, if, try, except, finally, else and match."""
    got = []
    for i in range(2):
        while True:
            try:
                if i:
                    with Trace():
                        a = [i, "if"].save()
                    got.append(a)
                else:
                    match i:
                        case 0:
                            with Trace():
                                a = [i, "match"].save()
                            got.append(a)
                {}[i]
            except KeyError:
                with Trace():
                    b = [i, "except"].save()
                got.append(b)
                break
            finally:
                with Trace():
                    c = [i, "finally"].save()
                got.append(c)
    assert got == [
        *([0, "match"], [0, "except"], [0, "finally"]),
        *([1, "if"], [1, "except"], [1, "finally"]),
    ]


def test_headers_of_every_shape():
    """Parentheses, several lines, lambdas, other items before ours, and no `as` all work (C4)."""
    with Trace():
        a = [1].save()
    with Trace(
        "trace",
    ) as trace:
        b = [2].save()
    with pytest.MonkeyPatch.context() as patch, Trace() as trace:
        c = [3, patch is not None].save()
    with (lambda: Trace())() as trace:
        d = [(lambda x: x)(4)].save()
    with Trace() as (trace.attribute if False else trace).first:
        e = [5].save()
    assert (a, b, c, d, e) == ([1], [2], [3, True], [4], [5])


def test_first_statements_of_every_shape():
    """Decorated definitions, other `with`s, loops over a `try`, and `pass` before `try` work."""
    with Trace():

        @staticmethod
        def decorated():
            return 1

        a = [decorated()].save()  # fmt: skip
    with Trace():
        with pytest.MonkeyPatch.context():
            b = [2].save()
        pass
    with Trace():
        while True:
            try:
                c = [3].save()
            finally:
                pass
            break
    with Trace():
        pass
        try:
            d = [4].save()
        finally:
            pass
    with Trace():
        e = (
            [5]
        ).save()  # fmt: skip
    assert (a, b, c, d, e) == ([1], [2], [3], [4], [5])


def test_idle_bodies():
    """A body of `pass`, a docstring or constants gives a block that does nothing (C5)."""
    with Trace() as first:
        """Only text."""
    with Trace() as second:
        pass
    with Trace() as third:
        pass
        ...
    for trace in (first, second, third):
        assert trace.block.values == {}
        assert trace.execution.saves() == {}


def test_bodies_that_compile_to_nothing():
    """A body that Python compiles to nothing is like one of `pass` (C5)."""
    with Trace() as annotated:
        first: int  # noqa: F842
    with Trace() as folded:
        -1
        (1, 2)
    with Trace() as unreachable:
        if 0:
            second = 1
    for trace in (annotated, folded, unreachable):
        assert trace.execution.saves() == {}


def test_a_lone_statement_with_a_constant_is_a_body_like_any_other():
    """A body whose only statement assigns a constant or deletes is skipped where it stands."""
    items = [1, 2]
    with Trace(run=False) as first:
        items[0] = 5
    with Trace(run=False) as second:
        del items[0]
    with Trace(run=False) as third:
        items[0] += 1
    assert items == [1, 2]
    sources = [trace.block.code.source.strip() for trace in (first, second, third)]
    assert sources == ["items[0] = 5", "del items[0]", "items[0] += 1"]
