"""`with loss.backward():` in a block: its body reads and edits the gradients of that pass.

Such a call, and each `.grad` in the body, goes through a hidden helper. What the helpers do is for
whoever runs the block to say; those here do what the source says.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["BACKWARD", "GRAD", "HELPER_NAMES", "helpers", "rewrite_backward"]

T = TypeVar("T")

BACKWARD = "__midstream_backward__"
"""Called in place of `x.backward(...)` in a `with` item, as ``helper(x, ...)``; gives its value."""

GRAD = "__midstream_grad__"
"""Called with `x` for each `x.grad` in the body; it gives what has it in `x`'s place."""

HELPER_NAMES = (BACKWARD, GRAD)


def helpers() -> dict[str, Callable[..., Any]]:
    """Return helpers that change nothing."""
    return {BACKWARD: _backward, GRAD: _itself}


def _backward(subject: Any, /, *args: Any, **kwargs: Any) -> Any:
    return subject.backward(*args, **kwargs)


def _itself(subject: T, /) -> T:
    return subject


def rewrite_backward(body: list[ast.stmt]) -> list[ast.stmt]:
    """Return the body with its backward statements, nested functions' included, going through them.

    Nodes that are no such call and no `.grad` stay the same objects.
    """
    rewriter = _BackwardRewriter()
    return [rewriter.visit(statement) for statement in body]


class _BackwardRewriter(ast.NodeTransformer):
    def __init__(self) -> None:
        self._depth = 0

    def visit_With(self, node: ast.With) -> ast.With:
        depth = self._depth
        for item in node.items:  # an item runs inside those before it
            self.generic_visit(item)
            match item.context_expr:
                case ast.Call(func=ast.Attribute(value=subject, attr="backward")) as call:
                    item.context_expr = _through(BACKWARD, subject, call, call)
                    self._depth += 1
        node.body = [self.visit(statement) for statement in node.body]
        self._depth = depth
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.Attribute:
        self.generic_visit(node)
        if self._depth and node.attr == "grad":
            node.value = _through(GRAD, node.value, node.value)
        return node

    def visit_match_case(self, node: ast.match_case) -> ast.match_case:
        """Leave patterns alone: they hold names with dots, and no calls."""
        node.guard = self.visit(node.guard) if node.guard is not None else None
        node.body = [self.visit(statement) for statement in node.body]
        return node


def _through(
    helper: str, subject: ast.expr, place: ast.expr, call: ast.Call | None = None
) -> ast.Call:
    """A call of a helper with `subject` and the arguments of `call`, where `place` stands."""
    name = ast.copy_location(ast.Name(helper, ast.Load()), place)
    args, keywords = (call.args, call.keywords) if call is not None else ([], [])
    return ast.copy_location(ast.Call(name, [subject, *args], keywords), place)
