"""An instrumented copy does what its function does, line by line, through its hook."""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Callable
from typing import Any

import pytest

from midstream.errors import SourceNotAvailableError
from midstream.interleaving.source.copies import template_of
from midstream.interleaving.source.functions import find_function
from tests.interleaving.source import samples
from tests.interleaving.source.samples import Derived, make


def run(value: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, list[tuple[str, Any]]]:
    """What a copy of a callable returns, and its operations with their results."""
    found = find_function(value, "it")
    template, seen = template_of(found.function, "it"), []

    def hook(number: int, callee: Any, /, *args: Any, **kwargs: Any) -> Any:
        result = args[0] if callee is None else callee(*args, **kwargs)
        seen.append((template.sites[number].name, result))
        return result

    return found.rebuild(template.bind(found.function, hook))(*args, **kwargs), seen


@pytest.mark.parametrize(
    ("value", "args", "expected", "operations"),
    [
        (make(3), (2,), 13, [("double_0", 4)]),
        (Derived().value, (2,), 12, [("double_0", 4), ("value_0", 5)]),
        (Derived().wrapped, (2,), 40, [("double_0", 4)]),
        (
            Derived().loops,
            (3,),
            [0, 2, 4],
            [("range_0", range(3))] + [("double_0", v) for v in (0, 2, 4)],
        ),
        (Derived().knows_its_frame, (1,), ["self", "x"], [("sorted_0", ["self", "x"])]),
    ],
)
def test_result(value: Any, args: Any, expected: Any, operations: Any) -> None:
    """Closures, defaults, `super()`, private names, decorators and comprehensions are kept."""
    assert value(*args) == expected
    assert run(value, *args) == (expected, operations)


def test_own_names() -> None:
    """A function or class that names itself means what it meant."""
    assert run(samples.recursive, 2) == (2, [("recursive_0", 1)])
    assert run(samples.make_class(3).value, 2) == ((12, "Local"), [("double_0", 4)])
    assert run(samples.Named().named)[0] is samples.Named


def test_arguments() -> None:
    """Defaults and keyword-only arguments are those of the function."""
    assert run(make(1), 2)[0] == 5
    assert run(make(1), 2, plus=7)[0] == 11
    assert run(Derived().value, 1, y=0)[0] == 8


def test_traceback_has_true_lines() -> None:
    """An error inside has the file, line and columns that it has without instruments."""

    def frames(call: Callable[[], Any]) -> list[Any]:
        with pytest.raises(RuntimeError) as failure:
            call()
        found = traceback.extract_tb(failure.value.__traceback__)
        there = [frame for frame in found if frame.filename == samples.__file__]
        return [(f.name, f.lineno, f.colno, f.end_colno) for f in there]

    right = frames(lambda: Derived().fails(1))
    assert [frame[0] for frame in right] == ["fails", "raises"]
    assert frames(lambda: run(Derived().fails, 1)) == right


def test_function_is_compiled_once() -> None:
    """Functions of one `def` share a template."""
    assert template_of(make(1), "it") is template_of(make(2), "it")


def defined(text: str, later: str) -> Any:
    """A function whose file was edited after it was compiled."""
    name = f"<edited {hash(later)}>"
    namespace: dict[str, Any] = {}
    exec(compile(text, name, "exec"), namespace)
    linecache.cache[name] = (len(later), None, later.splitlines(keepends=True), name)
    return namespace["f"]


@pytest.mark.parametrize(
    ("later", "reason"),
    [
        ("def f(x):\n    return g(x)\n", ""),
        ("def f(x):\n    return h(x)\n", "is not what runs"),
        ("def f(x):\n    return g(x, 1)\n", "is not what runs"),
        ("\ndef f(x):\n    return g(x)\n", "does not define 'f'"),
        ("def f(x:\n", "does not define 'f'"),
        ("", "cannot be read"),
    ],
)
def test_edited_file(later: str, reason: str) -> None:
    """Text that is not what runs is refused, never shown or compiled."""
    function = defined("def f(x):\n    return g(x)\n", later)
    if not reason:
        assert [site.name for site in template_of(function, "it").sites] == ["g_0"]
        return
    with pytest.raises(SourceNotAvailableError, match=reason):
        template_of(function, "it")
