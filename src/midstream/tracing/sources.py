"""Finding the text of a running `with` statement."""

from __future__ import annotations

import ast
import linecache
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import CodeType, FrameType

from midstream.tracing.block import Code
from midstream.tracing.compiling import parse_block, quietly
from midstream.tracing.names import nested

__all__ = ["BLOCK_NAME", "Found", "Position", "Source", "sources", "with_position"]

BLOCK_NAME = "__midstream_block__"
"""Global of a running block that holds its Code: the source of traces inside it."""

Position = tuple[int, int | None, int | None, int | None]
"""First line, last line, first column, last column (UTF-8 bytes) of a piece of source."""

_FUTURE_FLAGS = 0x1FF0000
"""The bits of `co_flags` that `from __future__` imports set."""


@dataclass(frozen=True)
class Found:
    """A `with` statement, its item that is ours, and the class whose private names it sees."""

    node: ast.With | ast.AsyncWith
    item: ast.withitem
    class_name: str | None


class Source:
    """One text that may be what a frame runs, parsed once."""

    def __init__(self, filename: str, text: str, block: Code | None = None) -> None:
        self.filename = filename
        self.lines = text.split("\n")
        self._text = text
        self.block = block

    @cached_property
    def tree(self) -> ast.AST:
        """The syntax tree; for a block's own source, under the header that indents it."""
        if self.block is not None:
            return parse_block(self.block)
        with quietly():
            return ast.parse(self._text, self.filename)

    @cached_property
    def _withs(self) -> list[Found]:
        class_name = self.block.class_name if self.block is not None else None
        return list(_walk_withs(self.tree, class_name))

    def find(self, position: Position, index: int) -> Found | None:
        """Return the `with` item that a position in running code belongs to.

        Up to Python 3.12 the position is the whole statement's and `index` tells the item, in 3.13
        it is the item's own. Without columns (`-X no_debug_ranges`) the line alone decides.
        """
        matches = [found for found in self._withs if _at(found, position)]
        if not matches:
            return None
        return matches[index % len(matches)]

    def text(self, first: int, last: int) -> str:
        """Return whole lines, `first` to `last`, counted as in the file."""
        return "\n".join(self.lines[first - 1 : last]) + "\n"

    def codes(self, like: CodeType) -> list[CodeType]:
        """Compile the text and return its code objects that bear the name of `like`."""
        flags = future_flags(like)
        try:
            compiled = list(nested(self._compiled(flags)))
        except SyntaxError:
            # A notebook cell may await, and `like` be a statement of it that does not.
            compiled = list(nested(self._compiled(flags | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)))
        return [code for code in compiled if code.co_qualname == like.co_qualname] or compiled

    @lru_cache(maxsize=4)  # noqa: B019 - sources themselves live in a bounded cache
    def _compiled(self, flags: int) -> CodeType:
        with quietly():
            code: CodeType = compile(
                self._text, self.filename, "exec", flags=flags, dont_inherit=True
            )
        return code


def future_flags(code: CodeType) -> int:
    """Return the `from __future__` flags that code was compiled with."""
    return code.co_flags & _FUTURE_FLAGS


def _walk_withs(node: ast.AST, class_name: str | None) -> Iterator[Found]:
    if isinstance(node, ast.With | ast.AsyncWith):
        for item in node.items:
            yield Found(node, item, class_name)
    inner = node.name if isinstance(node, ast.ClassDef) else class_name
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case | ast.mod):
            yield from _walk_withs(child, inner)


def _at(found: Found, position: Position) -> bool:
    line, end_line, column, end_column = position
    nodes: tuple[ast.stmt | ast.expr, ...] = (found.node, found.item.context_expr)
    if column is None:
        return any(node.lineno == line for node in nodes)
    return any(
        (node.lineno, node.end_lineno, node.col_offset, node.end_col_offset)
        == (line, end_line, column, end_column)
        for node in nodes
    )


def with_position(frame: FrameType) -> tuple[Position, int]:
    """Return where the instruction that a frame is at stands in its source, and which item it is.

    The item is counted among the instructions with the same position that lie before it.
    """
    code = frame.f_code
    positions = list(code.co_positions())
    at = frame.f_lasti // 2
    line, *rest = positions[at]
    enters = range(0, at)
    opcode = code.co_code[frame.f_lasti]
    index = sum(positions[i] == positions[at] and code.co_code[2 * i] == opcode for i in enters)
    return (line or frame.f_lineno, rest[0], rest[1], rest[2]), index


def sources(frame: FrameType) -> Iterator[Source]:
    """Yield the texts that may be what a frame runs, the likeliest first.

    A file's text as remembered comes before the file as it is now: where the file was edited since,
    the older text may be the right one. Which one is right, the running code decides.
    """
    block = frame.f_globals.get(BLOCK_NAME)
    filename = frame.f_code.co_filename
    if isinstance(block, Code) and block.filename == filename:
        yield _block_source(block)
        return
    seen: set[str] = set()
    for text in _texts(frame, filename):
        if text and text not in seen:
            seen.add(text)
            yield _source(filename, text)


def _texts(frame: FrameType, filename: str) -> Iterator[str]:
    yield "".join(linecache.getlines(filename, frame.f_globals))
    if os.path.exists(filename):
        linecache.checkcache(filename)
        yield "".join(linecache.getlines(filename, frame.f_globals))
    if filename == "<string>" and frame.f_globals.get("__name__") == "__main__":
        yield from _command_line_texts()


def _command_line_texts() -> Iterator[str]:
    """Yield what may be the program of ``python -c program``."""
    for option, following in zip(sys.orig_argv, [*sys.orig_argv[1:], ""], strict=True):
        match = re.match(r"-[A-Za-z]*?c", option)
        if match:
            yield option[match.end() :] or following


@lru_cache(maxsize=32)
def _source(filename: str, text: str) -> Source:
    return Source(filename, text)


@lru_cache(maxsize=128)
def _block_source(block: Code) -> Source:
    return Source(block.filename, "\n" * (block.first_line - 1) + block.source, block)
