"""Instrumented copies of functions: compiled once, with true lines, and bound for each call."""

from __future__ import annotations

import ast
import builtins
import copy
from collections.abc import Callable
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType
from typing import Any

from midstream.errors import SourceNotAvailableError
from midstream.interleaving.source.functions import Definition, copy_function, find_definition
from midstream.interleaving.source.operations import HOOK, Instrument, Site
from midstream.tracing.verifying import is_same_function

Hook = Callable[..., Any]

_FUTURE_FLAGS = 0x1FF0000
"""The bits of `co_flags` that `from __future__` imports set."""


@dataclass(frozen=True)
class Template:
    """One function's instrumented code.

    Attributes:
        code: its code, which takes the hook from a variable of an enclosing function.
        sites: its operations, in the order in which they are numbered.
        definition: the `def` statement.
        lines: all lines of the file.
    """

    code: CodeType
    sites: tuple[Site, ...]
    definition: Definition
    lines: list[str]

    def bind(self, function: FunctionType, hook: Hook) -> FunctionType:
        """A copy of the function whose operations go through a hook."""
        own = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        own[HOOK] = CellType(hook)
        closure = tuple(own[name] for name in self.code.co_freevars)
        return copy_function(function, self.code, closure)

    def callee(self, site: Site, function: FunctionType, receiver: Any) -> Any:
        """What an operation calls, as far as that is known before the function runs.

        Raises:
            LookupError: it is known only then.
        """
        return _evaluate(site.callee, function, receiver)


def template_of(function: FunctionType, what: str) -> Template:
    """The template of a function, made at the first call.

    Raises:
        SourceNotAvailableError: its source cannot be read, or is not what runs.
    """
    code = function.__code__
    known = _templates.get(id(code))
    if known is None:
        known = _templates[id(code)] = (code, _make(function, what))
    return known[1]


_templates: dict[int, tuple[CodeType, Template]] = {}
"""By identity, as code objects of different files may compare equal; each is kept alive here."""


def _make(function: FunctionType, what: str) -> Template:
    definition, lines = find_definition(function, what)
    plain = _compile(copy.deepcopy(definition), function)
    running = function.__code__
    if running.co_freevars != plain.co_freevars or not is_same_function(running, plain, definition):
        raise SourceNotAvailableError(
            f"{what} has no source: the text of '{function.__qualname__}' in "
            f"{function.__code__.co_filename} is not what runs. Was the file edited since it was "
            "imported, or the function compiled by another tool?"
        )
    instrument, tree = Instrument(), copy.deepcopy(definition)
    tree.body = [instrument.visit(statement) for statement in tree.body]
    code = _compile(tree, function)
    return Template(code, tuple(instrument.sites), definition, lines)


def _compile(definition: Definition, function: FunctionType) -> CodeType:
    """Compile a `def` in surroundings that give its names the meaning they had.

    An enclosing function has its outside variables, an enclosing class mangles private names and
    provides `super()`; neither is ever run.
    """
    code = function.__code__
    _strip(definition)
    name = _class_name(function)
    body: list[ast.stmt] = [definition]
    if name is not None:
        body = [ast.copy_location(_class(name, definition), definition)]
    names = [HOOK, *(free for free in code.co_freevars if free != "__class__")]
    outer = ast.parse(f"def outer({', '.join(names)}): pass")
    enclosing = outer.body[0]
    assert isinstance(enclosing, ast.FunctionDef)
    bound = name or definition.name
    if bound not in code.co_freevars:  # its own name is a global one, as it was
        body.insert(0, ast.copy_location(ast.Global([bound]), definition))
    enclosing.body = body
    flags = code.co_flags & _FUTURE_FLAGS
    ast.fix_missing_locations(outer)
    compiled = compile(outer, code.co_filename, "exec", flags=flags, dont_inherit=True)
    found = _descend(compiled, ["outer", *([name] if name else []), definition.name])
    return found.replace(co_qualname=code.co_qualname)


def _strip(definition: Definition) -> None:
    """Take off what was evaluated when the function was made, and is kept on it."""
    arguments = definition.args
    definition.decorator_list, definition.returns = [], None
    if hasattr(definition, "type_params"):
        definition.type_params = []
    arguments.defaults = []
    arguments.kw_defaults = [ast.Constant(None) for _ in arguments.kwonlyargs]
    for node in ast.walk(arguments):
        if isinstance(node, ast.arg):
            node.annotation = None


def _class(name: str, definition: Definition) -> ast.ClassDef:
    node = ast.parse(f"class {name}: pass").body[0]
    assert isinstance(node, ast.ClassDef)
    node.body = [definition]
    return node


def _class_name(function: FunctionType) -> str | None:
    """The class a function was defined in, which mangles its private names."""
    parent = function.__code__.co_qualname.rpartition(".")[0].rpartition(".")[2]
    if parent and parent != "<locals>":
        return parent
    return "Class" if "__class__" in function.__code__.co_freevars else None


def _descend(code: CodeType, names: list[str]) -> CodeType:
    for name in names:
        inner = (const for const in code.co_consts if isinstance(const, CodeType))
        code = next(const for const in inner if const.co_name == name)
    return code


def _evaluate(node: ast.expr | None, function: FunctionType, receiver: Any) -> Any:
    """A dotted path as the function sees it, without running any of it."""
    if isinstance(node, ast.Attribute):
        value = _evaluate(node.value, function, receiver)
        try:
            return getattr(value, node.attr)
        except Exception as error:  # a property of the model's may raise anything
            raise LookupError(node.attr) from error
    if isinstance(node, ast.Name):
        return _variable(node.id, function, receiver)
    raise LookupError(node)


def _variable(name: str, function: FunctionType, receiver: Any) -> Any:
    code = function.__code__
    if name in code.co_freevars:
        cell = (function.__closure__ or ())[code.co_freevars.index(name)]
        try:
            return cell.cell_contents
        except ValueError:
            raise LookupError(name) from None
    if code.co_argcount and name == code.co_varnames[0] and receiver is not None:
        return receiver
    if name in (*code.co_varnames, *code.co_cellvars):
        raise LookupError(name)
    for names in (function.__globals__, vars(builtins)):
        if name in names:
            return names[name]
    raise LookupError(name)
