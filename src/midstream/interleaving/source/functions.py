"""From what a module calls its forward to the Python function behind it, and its text."""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from types import CellType, FunctionType, MethodType
from typing import Any

from midstream.errors import SourceNotAvailableError

Rebuild = Callable[[FunctionType], Callable[..., Any]]
Definition = ast.FunctionDef

_REFUSED = {
    inspect.CO_GENERATOR: "a generator",
    inspect.CO_COROUTINE: "a coroutine (`async def`)",
    inspect.CO_ASYNC_GENERATOR: "an asynchronous generator",
}


@dataclass(frozen=True)
class Found:
    """A Python function, and how the callable it was found in is made from another one.

    Attributes:
        function: the function whose text is written in a file.
        rebuild: gives the callable anew around another function: the same receiver, the same
            decorators.
        receiver: what the function is bound to; None for a plain function.
    """

    function: FunctionType
    rebuild: Rebuild
    receiver: Any = None


def find_function(value: Any, what: str) -> Found:
    """The Python function behind a callable: methods, `functools.partial`, decorators taken off.

    Args:
        value: the callable.
        what: how an error names it.

    Raises:
        SourceNotAvailableError: it is not written in Python, or runs in pieces.
    """
    found = _find(value, what)
    for flag, kind in _REFUSED.items():
        if found.function.__code__.co_flags & flag:
            raise SourceNotAvailableError(
                f"{what} has no operations to wait for: '{found.function.__qualname__}' is {kind}, "
                "which does not run in one piece."
            )
    return found


def _find(value: Any, what: str) -> Found:
    if isinstance(value, MethodType):
        inner = _find(value.__func__, what)
        return Found(
            inner.function,
            lambda new: MethodType(inner.rebuild(new), value.__self__),
            value.__self__,
        )
    if isinstance(value, functools.partial):
        inner = _find(value.func, what)
        return Found(
            inner.function,
            lambda new: functools.partial(inner.rebuild(new), *value.args, **value.keywords),
            inner.receiver,
        )
    if isinstance(value, FunctionType):
        wrapped = value.__dict__.get("__wrapped__")
        return Found(value, lambda new: new) if wrapped is None else _unwrap(value, wrapped, what)
    raise SourceNotAvailableError(
        f"{what} has no Python source: it is a {type(value).__name__}, not a Python function. Its "
        "input and output can be read and written."
    )


def _unwrap(wrapper: FunctionType, wrapped: Any, what: str) -> Found:
    """The function in a decorator, which keeps it in a variable of its own."""
    inner = _find(wrapped, what)
    cells = wrapper.__closure__ or ()
    places = [i for i, cell in enumerate(cells) if _holds(cell, wrapped)]
    if not places:
        raise SourceNotAvailableError(
            f"{what} is wrapped by the decorator '{wrapper.__qualname__}', which does not hold the "
            "function in a variable, so that its calls cannot be handed over."
        )

    def rebuild(new: FunctionType) -> Callable[..., Any]:
        closure = list(cells)
        for place in places:
            closure[place] = CellType(inner.rebuild(new))
        return copy_function(wrapper, wrapper.__code__, tuple(closure))

    return Found(inner.function, rebuild, inner.receiver)


def _holds(cell: CellType, value: Any) -> bool:
    try:
        return cell.cell_contents is value
    except ValueError:  # an empty cell
        return False


def copy_function(
    function: FunctionType, code: Any, closure: tuple[CellType, ...] | None
) -> FunctionType:
    """A function with other code or variables, and all else as it was."""
    new = FunctionType(code, function.__globals__, function.__name__, None, closure)
    new.__defaults__ = function.__defaults__
    new.__kwdefaults__ = function.__kwdefaults__
    new.__qualname__, new.__module__ = function.__qualname__, function.__module__
    new.__dict__.update(function.__dict__)
    return new


def find_definition(function: FunctionType, what: str) -> tuple[Definition, list[str]]:
    """The `def` statement a function was made by, and the lines of its file.

    Raises:
        SourceNotAvailableError: there is no text, or none that has this function.
    """
    code = function.__code__
    lines = linecache.getlines(code.co_filename, function.__globals__)
    if not lines:
        raise SourceNotAvailableError(
            f"{what} has no source: the file of '{code.co_qualname}', {code.co_filename}, cannot "
            "be read."
        )
    for node in _definitions(code.co_filename, "".join(lines)):
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        if node.name == code.co_name and first == code.co_firstlineno:
            return node, lines
    raise SourceNotAvailableError(
        f"{what} has no source: line {code.co_firstlineno} of {code.co_filename} does not define "
        f"'{code.co_qualname}'" + _lambda_or_edited(code.co_name)
    )


def _lambda_or_edited(name: str) -> str:
    if name == "<lambda>":
        return ", since a lambda has no statements to look into."
    return ". Was the file edited since it was imported?"


@lru_cache(maxsize=32)
def _definitions(filename: str, text: str) -> list[Definition]:
    try:
        tree = ast.parse(text, filename)
    except SyntaxError:
        return []
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
