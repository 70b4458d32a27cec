"""What a `with` body must not contain, found before it is captured."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import NoReturn

from midstream.errors import BlockLayoutError, BlockSyntaxError

__all__ = ["check_body", "check_layout", "does_nothing", "syntax_error"]

Header = ast.With | ast.AsyncWith
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_AWAITS = "a block runs inside the engine, beside the forward pass, and cannot await"

_ADVICE: tuple[tuple[type[ast.AST], str], ...] = (
    (ast.Return, "`return` in a block: the body is a block of its own; return after the `with`"),
    (ast.Yield, "`yield` in a block: the body is a block of its own; yield after the `with`"),
    (
        ast.YieldFrom,
        "`yield from` in a block: the body is a block of its own; yield after the `with`",
    ),
    (ast.Await, f"`await` in a block: {_AWAITS}; await before the `with`"),
    (ast.AsyncFor, f"`async for` in a block: {_AWAITS}; loop around the `with`"),
    (ast.AsyncWith, f"`async with` in a block: {_AWAITS}; put it around the trace's `with`"),
    (
        ast.Nonlocal,
        "`nonlocal` in a block: the body's names are its own; save the value, and it is bound to "
        "the variable when the `with` ends",
    ),
)


class _Context:
    """Where the body stands: the file, its lines, and the objects the header names."""

    def __init__(self, filename: str, lines: list[str], header: Header, item: ast.withitem):
        self.filename, self.lines = filename, lines
        self.header, self.item = header, item
        target = item.optional_vars
        self.tracer = target.id if isinstance(target, ast.Name) else None
        self.model: str | None = None
        function = item.context_expr.func if isinstance(item.context_expr, ast.Call) else None
        if isinstance(function, ast.Attribute):
            if function.attr == "invoke":
                self.tracer = ast.unparse(function.value)
            else:
                self.model = ast.unparse(function.value)


def syntax_error(message: str, filename: str, line_text: str, node: ast.AST) -> BlockSyntaxError:
    """Build the error for a node: its position and text are shown as for any syntax error."""
    line, column = getattr(node, "lineno", 0), getattr(node, "col_offset", 0)
    end_line, end = getattr(node, "end_lineno", line), getattr(node, "end_col_offset", column)
    span = (line, column + 1, line_text, end_line, end + 1)
    return BlockSyntaxError(message, (filename, *span))


def check_layout(
    filename: str, lines: list[str], header: Header, item: ast.withitem, what: str
) -> None:
    """Refuse bodies that cannot be told from their header.

    Raises:
        BlockLayoutError: another context manager after ours, or a body on the header's line.
    """
    first = header.body[0]
    where = f"{filename}:{header.lineno}: "
    if header.items[-1] is not item:
        raise BlockLayoutError(
            f"{where}another context manager follows {what}(...) in the same `with`; "
            f"put {what}(...) last, or give it a `with` of its own"
        )
    before = lines[first.lineno - 1].encode()[: first.col_offset]
    if not isinstance(first, _DECORATED) and before.strip():
        raise BlockLayoutError(f"{where}the body of {what}(...) must start on a line of its own")


_DECORATED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def check_body(filename: str, lines: list[str], header: Header, item: ast.withitem) -> None:
    """Refuse what is valid where it stands but not in a block of its own.

    Raises:
        BlockSyntaxError: with the user's line and what to write instead.
    """
    context = _Context(filename, lines, header, item)
    for node, in_loop in _block_level(header.body, in_loop=False):
        _check_scope(context, node, in_loop)
    for statement in header.body:
        for node in ast.walk(statement):
            _check_spelling(context, node)


def _block_level(nodes: list[ast.stmt], in_loop: bool) -> Iterator[tuple[ast.AST, bool]]:
    """Yield the nodes of the block's own scope, and whether a loop of the block holds them."""
    stack: list[tuple[ast.AST, bool]] = [(node, in_loop) for node in nodes]
    while stack:
        node, looped = stack.pop()
        yield node, looped
        if isinstance(node, ast.ClassDef):
            continue  # what a class body may not hold, the file's own compilation has refused
        if isinstance(node, _FUNCTIONS):
            continue
        if isinstance(node, _LOOPS):
            stack += [(child, True) for child in node.body]
            stack += [(child, looped) for child in node.orelse]
            heads = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
            stack += [(child, looped) for child in heads]
            continue
        stack += [(child, looped) for child in ast.iter_child_nodes(node)]


def _check_scope(context: _Context, node: ast.AST, in_loop: bool) -> None:
    for kind, advice in _ADVICE:
        if isinstance(node, kind):
            _refuse(context, node, advice)
    if isinstance(node, ast.Break | ast.Continue) and not in_loop:
        word = "break" if isinstance(node, ast.Break) else "continue"
        advice = (
            f"`{word}` of a loop around the block: save what decides it, and test after the `with`"
        )
        _refuse(context, node, advice)
    if isinstance(node, ast.comprehension) and node.is_async:
        _refuse(context, node.target, f"asynchronous comprehension in a block: {_AWAITS}")
    if isinstance(node, ast.Call) and not node.args and _is_name(node.func, "super"):
        _refuse(context, node, "`super()` in a block: write `parent = super()` before the `with`")


def _check_spelling(context: _Context, node: ast.AST) -> None:
    """Refuse the spellings that other tools have for what a loop or a call does here."""
    tracer = context.tracer or "tracer"
    loop = f"`for step in {tracer}.iter[...]:`"
    as_name = "" if context.tracer else f" (name it: `with ... as {tracer}:`)"
    if isinstance(node, ast.With | ast.AsyncWith):
        for with_item in node.items:
            subject = with_item.context_expr
            if isinstance(subject, ast.Subscript) and _is(subject.value, context.tracer, "iter"):
                _refuse(
                    context, subject, f"`with {tracer}.iter[...]:` is a loop here: write {loop}"
                )
            called = isinstance(subject, ast.Call) and _is(subject.func, context.tracer, "all")
            if called:
                _refuse(context, subject, f"write `for step in {tracer}.all():`")
    if _is(node, context.model, "iter"):
        _refuse(context, node, f"steps belong to the tracer: write {loop}{as_name}")
    if isinstance(node, ast.Call) and _is(node.func, context.model, "all"):
        _refuse(context, node, f"steps belong to the tracer: write `{tracer}.all()`{as_name}")
    if isinstance(node, ast.Call) and _is(node.func, context.tracer, "backend"):
        _refuse(context, node, f"`backend` is a value, not a method: write `{tracer}.backend`")


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _is(node: ast.AST, owner: str | None, attribute: str) -> bool:
    """Whether a node is `owner.attribute`."""
    if owner is None or not isinstance(node, ast.Attribute) or node.attr != attribute:
        return False
    return ast.unparse(node.value) == owner


def _refuse(context: _Context, node: ast.AST, message: str) -> NoReturn:
    text = context.lines[getattr(node, "lineno", 1) - 1]
    raise syntax_error(message, context.filename, text, node)


def does_nothing(body: Sequence[ast.stmt]) -> bool:
    """Whether statements are `pass` and constants only, which may run no line at all."""
    return all(
        isinstance(line, ast.Pass)
        or (isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant))
        for line in body
    )
