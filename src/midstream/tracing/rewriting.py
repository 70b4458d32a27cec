"""What a block's syntax tree is changed into before it is compiled.

`x.save()` becomes a call of a hidden helper, so that it works on values whose type has no `save`.
Positions of all nodes stay those of the user's file.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

from midstream.tracing.saves import HELPER_NAMES

__all__ = ["Saves", "find_saves", "flatten", "rewrite_saves"]

_METHOD_HELPER, _CALL_HELPER = HELPER_NAMES
_CONTAINERS = (
    *(ast.Call, ast.keyword, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.Starred),
    *(ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp),
)
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


@dataclass
class Saves:
    """The save calls of a block.

    Attributes:
        names: for each call, the variables that it is bound to.
        bare: calls of block level whose value is bound to no variable.
    """

    names: dict[ast.Call, tuple[str, ...]] = field(default_factory=dict)
    bare: list[ast.Call] = field(default_factory=list)


def flatten(body: list[ast.stmt]) -> list[ast.stmt]:
    """Take out what a module keeps and a function does not: docstring, variable annotations."""
    if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        body = [ast.copy_location(ast.Pass(), body[0]), *body[1:]]
    return [_Annotations().visit(statement) for statement in body]


class _Annotations(ast.NodeTransformer):
    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.stmt:
        if node.value is None:
            return ast.copy_location(ast.Pass(), node)
        return ast.copy_location(ast.Assign(targets=[node.target], value=node.value), node)

    def _leave(self, node: ast.AST) -> ast.AST:
        return node  # annotations inside are the nested scope's own

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = _leave  # noqa: N815


def is_save(node: ast.AST) -> bool:
    """Whether a node is `x.save(...)` or `save(...)`."""
    if not isinstance(node, ast.Call):
        return False
    function = node.func
    return (isinstance(function, ast.Attribute) and function.attr == "save") or (
        isinstance(function, ast.Name) and function.id == "save"
    )


def _subject(call: ast.Call) -> ast.expr | None:
    """Return the expression whose value a save call saves."""
    if isinstance(call.func, ast.Attribute) and not call.args:
        return call.func.value
    return call.args[0] if len(call.args) == 1 else None


def find_saves(body: list[ast.stmt]) -> Saves:
    """Find the block-level saves and what each is bound to."""
    saves = Saves()
    parents = {child: node for node, child in _pairs(body)}
    nodes = [*body, *parents]
    for node in nodes:
        for target, value in _assignments(node):
            _bind(target, value, saves.names)
    for node in nodes:
        if is_save(node):
            assert isinstance(node, ast.Call)
            _judge(node, parents.get(node), saves)
    return saves


def _pairs(body: list[ast.stmt]) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Yield (parent, child) for all nodes of block level: nested functions and classes left out."""
    stack: list[ast.AST] = [node for node in reversed(body) if not isinstance(node, _SCOPES)]
    while stack:
        node = stack.pop()
        children = [c for c in ast.iter_child_nodes(node) if not isinstance(c, _SCOPES)]
        for child in children:
            yield node, child
        stack.extend(reversed(children))


def _assignments(node: ast.AST) -> list[tuple[ast.expr, ast.expr]]:
    if isinstance(node, ast.Assign):
        return [(target, node.value) for target in node.targets]
    if isinstance(node, ast.NamedExpr):
        return [(node.target, node.value)]
    return []


def _bind(target: ast.expr, value: ast.expr, names: dict[ast.Call, tuple[str, ...]]) -> None:
    """Note the variables of `target` with the saves that reach them unchanged."""
    if isinstance(value, ast.NamedExpr):
        _bind(target, value.value, names)
    elif isinstance(value, ast.IfExp):
        _bind(target, value.body, names)
        _bind(target, value.orelse, names)
    elif isinstance(value, ast.BoolOp):
        for operand in value.values:
            _bind(target, operand, names)
    elif isinstance(target, ast.Name):
        if is_save(value):
            assert isinstance(value, ast.Call)
            names[value] = (*names.get(value, ()), target.id)
    elif isinstance(target, ast.Tuple | ast.List) and isinstance(value, ast.Tuple | ast.List):
        for one, other in _matched(target.elts, value.elts):
            _bind(one, other, names)


def _matched(
    targets: list[ast.expr], values: list[ast.expr]
) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Pair targets and values of an unpacking from both ends up to a starred item."""
    for left, right in ((targets, values), (targets[::-1], values[::-1])):
        for one, other in zip(left, right, strict=False):
            if isinstance(one, ast.Starred) or isinstance(other, ast.Starred):
                break
            yield one, other
        else:
            return


def _judge(call: ast.Call, parent: ast.AST | None, saves: Saves) -> None:
    subject = _subject(call)
    if call in saves.names or subject is None:
        return
    named = isinstance(subject, ast.Name)
    if isinstance(subject, ast.Name):
        saves.names[call] = (subject.id,)  # `x.save()`: it comes back as x
    if not named or isinstance(parent, _CONTAINERS):
        saves.bare.append(call)


def rewrite_saves(body: list[ast.stmt], names: dict[ast.Call, tuple[str, ...]]) -> list[ast.stmt]:
    """Return the body with every save call, nested functions' included, going through a helper."""
    rewriter = _SaveRewriter(names)
    return [rewriter.visit(statement) for statement in body]


class _SaveRewriter(ast.NodeTransformer):
    def __init__(self, names: dict[ast.Call, tuple[str, ...]]) -> None:
        self._names = names

    def visit_Call(self, node: ast.Call) -> ast.AST:
        names = self._names.get(node, ())
        self.generic_visit(node)
        if not is_save(node):
            return node
        function = node.func
        if isinstance(function, ast.Attribute):
            helper, first = _METHOD_HELPER, function.value
        else:
            helper, first = _CALL_HELPER, function
        hidden = [ast.Name(helper, ast.Load()), ast.Constant(cast(Any, names))]
        for new in hidden:
            ast.copy_location(new, function)
        arguments = [first, hidden[1], *node.args]
        call = ast.Call(func=hidden[0], args=arguments, keywords=node.keywords)
        return ast.copy_location(call, node)
