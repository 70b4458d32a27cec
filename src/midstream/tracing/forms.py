"""Loops over steps that do one and the same thing in each, so that it can be done for many at once.

    for step in tracer.iter[:]:
        layer.output[0][:] += 4.0 * vector

What is recognised: a loop with one such edit in it, written in one or two statements (``stream =
layer.output[0]`` first), whose operand is made of names, numbers and arithmetic and nothing that
the loop binds; and a loop that appends what it reads, and nothing that is worked out of it, to a
list. Whoever runs the block may then do it in its place, see ``standing`` and ``gathering``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Literal, NamedTuple

__all__ = ["READ", "Form", "Gathering", "form_of"]

READ = "__midstream_read__"
"""What stands in the source of a ``Gathering`` for reading a module's output."""

_OPERATIONS = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div"}
_METHODS = {"add_": "add", "sub_": "sub", "mul_": "mul", "div_": "div", "copy_": ""}
_OPERAND = (ast.Name, ast.Constant, ast.BinOp, ast.UnaryOp, ast.Load)
_ARITHMETIC = (*_OPERATIONS, ast.USub)
_LOOPS = frozenset(("iter", "all", "next"))

How = Literal["in place", "assigned", "replaced"]
"""``x += y``; ``x[:] = x + y``; ``module.output = module.output + y``."""


class Form(NamedTuple):
    """An edit of one location's value in each step.

    Attributes:
        how: in what way the value is changed.
        operation: "add", "sub", "mul" or "div" with the operand; "" puts the operand there.
        operand: its source.
        names: the names in it.
        item: which item of the value is changed; None if it is the value itself.
        last: whether the last row of that is changed, or what else its last entry is.
    """

    how: How
    operation: str
    operand: str
    names: tuple[str, ...]
    item: int | None
    last: bool = False


class Gathering(NamedTuple):
    """Values that are appended to a list in each step.

    Attributes:
        name: the list's.
        source: what is appended: an expression of names, lists and tuples, in which
            ``READ(module, item)`` stands for a module's output, or an item of it.
    """

    name: str
    source: str


class _Target(NamedTuple):
    """What is changed: an expression for a value, its text, and which item and entry of it."""

    text: str
    item: int | None
    last: bool = False


def form_of(tree: ast.Module) -> Form | Gathering | None:
    """The form of a block's only loop over steps; None if it has no such loop, or does more."""
    loops = [node for node in tree.body if isinstance(node, ast.For) and _is_over_steps(node.iter)]
    mentions = sum(isinstance(n, ast.Attribute) and n.attr in _LOOPS for n in ast.walk(tree))
    if len(loops) != 1 or mentions != 1 or loops[0].orelse:
        return None
    loop = loops[0]
    bound = _bound(loop)
    behind = tree.body[tree.body.index(loop) + 1 :]
    if not isinstance(loop.target, ast.Name) or bound & _names(behind):
        return None
    gathering = _gathering(loop)
    if gathering is not None:
        return gathering
    form = _of_body(loop.body)
    return form if form is not None and _is_unchanging(loop, bound, form) else None


def _bound(loop: ast.For) -> set[str]:
    """The names that a loop gives to something; those of a comprehension are its own."""
    inner = {n.target for n in ast.walk(loop) if isinstance(n, ast.comprehension)}
    names = (n for n in ast.walk(loop) if isinstance(n, ast.Name) and not _is_load(n))
    return {name.id for name in names if name not in inner}


def _is_over_steps(node: ast.expr) -> bool:
    """`tracer.iter[...]` or `tracer.all()`."""
    if isinstance(node, ast.Call):
        called = node.func
        plain = not node.args and not node.keywords
        return plain and isinstance(called, ast.Attribute) and called.attr == "all"
    return (
        isinstance(node, ast.Subscript)
        and isinstance(node.slice, ast.Slice)
        and node.slice.step is None
        and isinstance(node.value, ast.Attribute)
        and node.value.attr == "iter"
    )


def _is_load(name: ast.Name) -> bool:
    return isinstance(name.ctx, ast.Load)


def _names(several: list[ast.stmt]) -> set[str]:
    return {n.id for node in several for n in ast.walk(node) if isinstance(n, ast.Name)}


def _is_unchanging(loop: ast.For, bound: set[str], form: Form) -> bool:
    """Whether each turn does the same: of what the loop binds, it uses the value alone."""
    step = {n.id for n in ast.walk(loop.target) if isinstance(n, ast.Name)}
    used = {n.id for s in loop.body for n in ast.walk(s) if isinstance(n, ast.Name) and _is_load(n)}
    value = {n.id for n in _assigned(loop.body)}
    return not step & used and bound <= step | value and not bound & set(form.names)


def _assigned(body: list[ast.stmt]) -> Iterator[ast.Name]:
    """The name that the loop's first statement gives to the value."""
    if len(body) == 2 and isinstance(body[0], ast.Assign) and len(body[0].targets) == 1:
        target = body[0].targets[0]
        if isinstance(target, ast.Name):
            yield target


def _of_body(body: list[ast.stmt]) -> Form | None:
    if len(body) == 1:
        return _replacing(body[0]) or _editing(body[0], None, None)
    name = next(_assigned(body), None)
    if name is None or not isinstance(body[0], ast.Assign):
        return None
    location = _location(body[0].value)
    return _editing(body[1], name.id, location) if location is not None else None


def _location(node: ast.expr) -> _Target | None:
    """`<names, attributes, constant items>.output`, or one of its items."""
    if isinstance(node, ast.Subscript):
        item = _number(node.slice)
        inner = _location(node.value)
        return (
            None
            if item is None or inner is None or inner.item is not None
            else (_Target(inner.text, item))
        )
    if isinstance(node, ast.Attribute) and node.attr == "output" and _is_module(node.value):
        return _Target(ast.unparse(node), None)
    return None


def _is_module(node: ast.expr) -> bool:
    if isinstance(node, ast.Subscript):
        return _number(node.slice) is not None and _is_module(node.value)
    return isinstance(node, ast.Name) or (
        isinstance(node, ast.Attribute) and _is_module(node.value)
    )


def _number(node: ast.expr) -> int | None:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = _number(node.operand)
        return None if inner is None else -inner
    return node.value if isinstance(node, ast.Constant) and type(node.value) is int else None


def _target(node: ast.expr, name: str | None, location: _Target | None) -> _Target | None:
    """What a statement changes: the value under its name, or its rows, all of them."""
    if isinstance(node, ast.Name):
        return location if node.id == name else None
    if not isinstance(node, ast.Subscript) or not _is_all(node.slice):
        return None
    last = _number(node.slice) == -1
    if not isinstance(node.value, ast.Name):
        location = _location(node.value) if name is None else None
    elif node.value.id != name:
        return None
    return location._replace(last=last) if location is not None else None


def _is_all(node: ast.expr) -> bool:
    """`[:]`, `[...]`, and the last row, which is the only one where a request decodes."""
    if isinstance(node, ast.Slice):
        lower = node.lower is None or _number(node.lower) == -1
        return lower and node.upper is None and node.step is None
    return _number(node) == -1 or (isinstance(node, ast.Constant) and node.value is ...)


def _editing(node: ast.stmt, name: str | None, location: _Target | None) -> Form | None:
    if isinstance(node, ast.AugAssign):
        target = _target(node.target, name, location)
        if target is None and name is None and isinstance(node.target, ast.Attribute):
            target = _location(node.target)
        return _form("in place", target, _OPERATIONS.get(type(node.op)), node.value)
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        return _called(node.value, name, location)
    if not isinstance(node, ast.Assign) or len(node.targets) != 1:
        return None
    if not isinstance(node.targets[0], ast.Subscript):
        return None
    target, value = _target(node.targets[0], name, location), node.value
    if isinstance(value, ast.BinOp) and _same(value.left, node.targets[0], name):
        return _form("assigned", target, _OPERATIONS.get(type(value.op)), value.right)
    return _form("assigned", target, "", value)


def _called(call: ast.Call, name: str | None, location: _Target | None) -> Form | None:
    """`x.add_(y)` and the like."""
    method = call.func
    if not isinstance(method, ast.Attribute) or len(call.args) != 1 or call.keywords:
        return None
    item = _location(method.value) if name is None else None
    target = item or _target(method.value, name, location)
    return _form("in place", target, _METHODS.get(method.attr), call.args[0])


def _same(node: ast.expr, rows: ast.Subscript, name: str | None) -> bool:
    """Whether an expression is what the rows of a statement's target are taken of, or these."""
    if name is not None and isinstance(node, ast.Name):
        return node.id == name
    return ast.unparse(node) in (ast.unparse(rows.value), ast.unparse(rows))


def _replacing(node: ast.stmt) -> Form | None:
    """`module.output = module.output + y`."""
    if not isinstance(node, ast.Assign) or len(node.targets) != 1:
        return None
    target, value = node.targets[0], node.value
    if not isinstance(target, ast.Attribute) or not isinstance(value, ast.BinOp):
        return None
    if ast.unparse(value.left) != ast.unparse(target):
        return None
    return _form("replaced", _location(target), _OPERATIONS.get(type(value.op)), value.right)


def _form(
    how: How, target: _Target | None, operation: str | None, operand: ast.expr
) -> Form | None:
    if target is None or operation is None or not all(map(_is_operand, ast.walk(operand))):
        return None
    names = dict.fromkeys(n.id for n in ast.walk(operand) if isinstance(n, ast.Name))
    return Form(how, operation, ast.unparse(operand), tuple(names), target.item, target.last)


def _is_operand(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return type(node.value) in (int, float)
    return isinstance(node, (*_OPERAND, *_ARITHMETIC))


def _gathering(loop: ast.For) -> Gathering | None:
    """`rows.append(layer.output[0])`, or a list of such values."""
    statement = loop.body[0]
    if len(loop.body) != 1 or not isinstance(statement, ast.Expr):
        return None
    call = statement.value
    if not isinstance(call, ast.Call) or len(call.args) != 1 or call.keywords:
        return None
    method = call.func
    if not isinstance(method, ast.Attribute) or method.attr != "append":
        return None
    step = {n.id for n in ast.walk(loop.target) if isinstance(n, ast.Name)}
    if not isinstance(method.value, ast.Name) or step & _names([statement]):
        return None
    source = _read(call.args[0])
    return Gathering(method.value.id, source) if source is not None else None


def _read(node: ast.expr) -> str | None:
    """The source of what is appended, with calls in the place of outputs; None if it is more."""
    target = _location(node)
    if target is not None:
        module = target.text.removesuffix(".output")
        return f"{READ}({module}, {target.item})"
    if isinstance(node, ast.List | ast.Tuple):
        parts = [_read(each) for each in node.elts]
        if None in parts or not parts:
            return None
        inside = "".join(f"{part}, " for part in parts)
        return f"[{inside}]" if isinstance(node, ast.List) else f"({inside})"
    if isinstance(node, ast.ListComp) and len(node.generators) == 1:
        inner, each = _read(node.elt), node.generators[0]
        plain = not each.ifs and not each.is_async and isinstance(each.target, ast.Name)
        if inner is None or not plain or not _is_several(each.iter):
            return None
        return f"[{inner} for {ast.unparse(each.target)} in {ast.unparse(each.iter)}]"
    return None


def _is_several(node: ast.expr) -> bool:
    """Modules to go through: a name or attribute, or a slice of one with constant ends."""
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
        ends = (node.slice.lower, node.slice.upper, node.slice.step)
        return _is_module(node.value) and all(e is None or _number(e) is not None for e in ends)
    return _is_module(node)
