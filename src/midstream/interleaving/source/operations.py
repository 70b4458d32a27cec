"""The operations of a function: its calls and assignments, named and rewritten."""

from __future__ import annotations

import ast
from collections import Counter
from dataclasses import dataclass
from typing import Any

HOOK = "__midstream_operation__"
"""The variable of an instrumented function that its operations go through."""

_BOUND_TO_THEIR_FRAME = frozenset(
    {"breakpoint", "dir", "eval", "exec", "globals", "locals", "super", "vars"}
)


@dataclass(frozen=True)
class Site:
    """One operation as it stands in the text.

    Attributes:
        name: what it is called by, such as "self_attn_0".
        line: the line of the file it stands on.
        callee: the called expression; None for an assignment.
    """

    name: str
    line: int
    callee: ast.expr | None = None


class Instrument(ast.NodeTransformer):
    """Turns calls and assigned values of a function's body into hand-overs, and lists them.

    ``f(x)`` becomes ``HOOK(i, f, x)`` and ``y = v`` becomes ``y = HOOK(i, None, v)``, where `i`
    counts the sites as they are executed: a call after the calls among its arguments. What a
    nested function, lambda or generator does is not the function's own doing, and stays as it is.

    Attributes:
        sites: the operations by their number.
    """

    def __init__(self) -> None:
        self.sites: list[Site] = []
        self._counts: Counter[str] = Counter()

    def visit_Call(self, node: ast.Call) -> ast.expr:
        """A call, unless what it does depends on the frame it stands in."""
        callee = node.func
        self.generic_visit(node)
        if _needs_its_frame(node):
            return _without_hook(node)
        line = callee.end_lineno or node.lineno
        hook, number = self._hook(node, _path(callee) or "call", line, callee)
        call = ast.Call(func=hook, args=[number, node.func, *node.args], keywords=node.keywords)
        return ast.copy_location(call, node)

    def visit_Assign(self, node: ast.Assign) -> ast.Assign:
        """A value given to one name, or a tuple written out given to as many."""
        target = node.targets[0] if len(node.targets) == 1 else None
        pairs = _pairs(target, node.value)
        if pairs is None:
            node.value = self.visit(node.value)
            if target is not None:
                node.value = self._assigned(target, node.value)
        else:
            assert isinstance(node.value, ast.Tuple | ast.List)
            node.value.elts = [self._assigned(one, self.visit(value)) for one, value in pairs]
        node.targets = [self.visit(target) for target in node.targets]
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AnnAssign:
        """The same with an annotation."""
        if node.value is not None:
            node.value = self._assigned(node.target, self.visit(node.value))
        return node

    def visit_ListComp(self, node: ast.ListComp) -> Any:
        """Loops first: that is the order in which a comprehension runs."""
        node.generators = [self.visit(part) for part in node.generators]
        node.elt = self.visit(node.elt)
        return node

    visit_SetComp = visit_ListComp  # type: ignore[assignment] # noqa: N815 - NodeVisitor's name

    def visit_DictComp(self, node: ast.DictComp) -> Any:
        """As the other comprehensions."""
        node.generators = [self.visit(part) for part in node.generators]
        node.key, node.value = self.visit(node.key), self.visit(node.value)
        return node

    def visit_GeneratorExp(self, node: ast.GeneratorExp) -> Any:
        """Only what it loops over is evaluated where it stands."""
        node.generators[0].iter = self.visit(node.generators[0].iter)
        return node

    def _leave(self, node: Any) -> Any:
        return node

    visit_Lambda = visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = _leave  # noqa: N815

    def _assigned(self, target: ast.expr, value: ast.expr) -> ast.expr:
        name = _path(target) if isinstance(target, ast.Name | ast.Attribute) else ""
        if not name:
            return value
        hook, number = self._hook(value, name, target.lineno, None)
        nothing = ast.copy_location(ast.Constant(None), value)
        return ast.copy_location(ast.Call(hook, [number, nothing, value], []), value)

    def _hook(
        self, node: ast.expr, name: str, line: int, callee: ast.expr | None
    ) -> tuple[ast.expr, ast.expr]:
        number = ast.copy_location(ast.Constant(len(self.sites)), node)
        self.sites.append(Site(f"{name}_{self._counts[name]}", line, callee))
        self._counts[name] += 1
        return ast.copy_location(ast.Name(HOOK, ast.Load()), node), number


def _needs_its_frame(node: ast.Call) -> bool:
    name = node.func.id if isinstance(node.func, ast.Name) else ""
    return name in _BOUND_TO_THEIR_FRAME and not (name == "super" and node.args)


def _without_hook(node: ast.Call) -> ast.expr:
    """`locals()` as the function had them before there was a hook among them."""
    assert isinstance(node.func, ast.Name)
    if node.func.id not in ("locals", "vars") or node.args:
        return node
    filtered = ast.parse(
        f"{{name: v for name, v in x.items() if name != {HOOK!r}}}", mode="eval"
    ).body
    assert isinstance(filtered, ast.DictComp)
    items = filtered.generators[0].iter
    assert isinstance(items, ast.Call)
    assert isinstance(items.func, ast.Attribute)
    items.func.value = node
    return _placed(filtered, node)


def _placed(tree: ast.expr, there: ast.expr) -> ast.expr:
    for part in ast.walk(tree):
        if part is not there:
            ast.copy_location(part, there)
    return tree


def _path(node: ast.expr) -> str:
    """A dotted path with underscores; of `f(x).g` and the like what follows the call."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_path(node.value)}_{node.attr}".lstrip("_") or node.attr
    return _path(node.value) if isinstance(node, ast.Subscript) else ""


def _pairs(target: ast.expr | None, value: ast.expr) -> list[tuple[ast.expr, ast.expr]] | None:
    """Targets with their values, where both sides are written out."""
    sides = ast.Tuple | ast.List
    if not (isinstance(target, sides) and isinstance(value, sides)):
        return None
    parts = [*target.elts, *value.elts]
    if len(target.elts) != len(value.elts) or any(isinstance(p, ast.Starred) for p in parts):
        return None
    return list(zip(target.elts, value.elts, strict=True))
