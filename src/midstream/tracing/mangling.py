"""Private names (`self.__x`) of a block in a class, spelled as the class's code has them."""

from __future__ import annotations

import ast
from typing import Any

__all__ = ["mangle"]


def mangle(body: list[ast.stmt], class_name: str | None) -> None:
    """Rewrite private names in place, as Python does inside ``class class_name``."""
    stem = (class_name or "").lstrip("_")
    if stem:
        visitor = _Mangler(f"_{stem}")
        for statement in body:
            visitor.visit(statement)


class _Mangler(ast.NodeVisitor):
    """Renames every identifier field; the body of a nested class is left to its own class."""

    _FIELDS = ("id", "attr", "name", "arg", "asname", "module", "rest")

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def _private(self, name: str) -> str:
        private = name.startswith("__") and not name.endswith("__") and "." not in name
        return self._prefix + name if private else name

    def generic_visit(self, node: ast.AST) -> None:
        for field in self._FIELDS:
            value = getattr(node, field, None)
            if isinstance(value, str):
                setattr(node, field, self._private(value))
        super().generic_visit(node)

    def _visit_names(self, node: Any) -> None:
        node.names = [self._private(name) for name in node.names]

    visit_Global = visit_Nonlocal = _visit_names  # noqa: N815 - the names NodeVisitor looks up

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        node.name = self._private(node.name)
        for part in (*node.decorator_list, *node.bases, *node.keywords):
            self.visit(part)
