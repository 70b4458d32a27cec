"""From a block's source to code that runs with the user's file and line numbers."""

from __future__ import annotations

import ast
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType

from midstream.errors import BlockSyntaxError
from midstream.tracing import backward
from midstream.tracing.block import Call, Code, Compiled
from midstream.tracing.forms import form_of
from midstream.tracing.mangling import mangle
from midstream.tracing.names import outside_reads
from midstream.tracing.plain import is_plain
from midstream.tracing.rewriting import find_saves, flatten, rewrite_saves
from midstream.tracing.saves import HELPER_NAMES

__all__ = ["compile_code", "find_calls", "parse_block", "quietly"]


_filters_lock = threading.RLock()


@contextmanager
def quietly() -> Iterator[None]:
    """Keep the compiler's warnings down: the user has seen them when the file was compiled."""
    # The filters are the process's: two threads that set and restore them must not overlap.
    with _filters_lock, warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        warnings.simplefilter("ignore", DeprecationWarning)  # bad escapes, up to Python 3.11
        yield


def parse_block(code: Code) -> ast.If:
    """Parse the source under a header that gives it its indentation and its lines."""
    text = "\n" * (code.first_line - 2) + "if 1:\n" + code.source
    with quietly():
        header = ast.parse(text, code.filename).body[0]
    assert isinstance(header, ast.If)
    if code.first_line < 2:  # there is no line above it for the header to stand on
        ast.increment_lineno(header, code.first_line - 2)
    return header


def compile_code(code: Code) -> Compiled:
    """Compile a block as the code of a module, whose globals are the names it reads and binds.

    Nested functions and comprehensions therefore see the block's own names. Nodes keep the
    positions they have in the file.

    Raises:
        BlockSyntaxError: the source is no valid block.
    """
    try:
        body = flatten(parse_block(code).body)
        mangle(body, code.class_name)
        written = ast.Module(body=body, type_ignores=[])
        plain, form = is_plain(written), form_of(written)
        saves = find_saves(body)
        body = backward.rewrite_backward(rewrite_saves(body, saves.names))
        module = ast.Module(body=body, type_ignores=[])
        with quietly():
            compiled = compile(module, code.filename, "exec", flags=code.flags, dont_inherit=True)
    except SyntaxError as error:
        raise _explained(error, code) from error
    reads = _reads(compiled)
    methods = tuple(call.lineno for call in saves.bare if _is_method(call))
    functions = tuple((_first_name(c), c.lineno) for c in saves.bare if not _is_method(c))
    return Compiled(
        _renamed(compiled, code),
        reads,
        methods,
        functions,
        find_calls(module),
        _attributes(module, reads),
        plain,
        form,
    )


def find_calls(tree: ast.Module) -> tuple[Call, ...]:
    """Return all calls ``name.method(...)``, those in functions and classes included."""
    statements = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return tuple(
        Call(node.func.value.id, node.func.attr, node.lineno, node in statements)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
    )


def _reads(compiled: CodeType) -> frozenset[str]:
    return outside_reads(compiled) - {*HELPER_NAMES, *backward.HELPER_NAMES}


def _attributes(module: ast.Module, reads: frozenset[str]) -> dict[str, frozenset[str]]:
    """Return what is taken of the names that are used as `name.attribute` and in no other way."""
    used: dict[str, set[str]] = {}
    owners: set[ast.expr] = set()
    for node in ast.walk(module):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            used.setdefault(node.value.id, set()).add(node.attr)
            owners.add(node.value)
    names = (n for n in ast.walk(module) if isinstance(n, ast.Name) and n not in owners)
    whole = {node.id for node in names}
    return {name: frozenset(used[name]) for name in reads & used.keys() - whole}


def _is_method(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and not call.args


def _first_name(call: ast.Call) -> str:
    return ast.unparse(call.func).split(".", maxsplit=1)[0]


def _renamed(compiled: CodeType, code: Code) -> CodeType:
    """Name the code as the function it was written in, for tracebacks."""
    name = code.name.rsplit(".", maxsplit=1)[-1]
    return compiled.replace(co_name=name, co_qualname=code.name)


def _explained(error: SyntaxError, code: Code) -> BlockSyntaxError:
    message, line = error.msg, error.lineno or code.first_line
    if message.startswith("no binding for nonlocal"):
        message += ": the names of a block are globals to its functions; write `global` instead"
    span = (error.offset or 1, code.line(line), error.end_lineno, error.end_offset)
    return BlockSyntaxError(message, (code.filename, line, *span))
