"""Telling whether a text is what the running code was compiled from.

The instructions of the `with` body are compared with those of the compiled text: their positions,
kinds, names, constants and operators.
"""

from __future__ import annotations

import ast
import dis
import sys
import types
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from inspect import CO_VARARGS, CO_VARKEYWORDS
from typing import Any

__all__ = ["Body", "is_empty", "is_same", "is_same_function", "is_skippable"]

_IGNORED = frozenset(
    {"NOP", "RESUME", "CACHE", "EXTENDED_ARG", "PRECALL", "PUSH_NULL", "POP_TOP", "PRINT_EXPR"}
    # the way out of a `finally`, whose lines depend on what follows
    | {"COPY", "POP_EXCEPT", "RERAISE"}
)
_PRINT = 1  # CALL_INTRINSIC_1's argument that prints an expression in an interactive session
_VERBS = ("LOAD", "STORE", "DELETE")
# From 3.13 on one instruction may do two, where the function has few variables: the second has the
# column of the first. Pytest's asserts bring variables, so what counts is the order on the line.
_HAS_PAIRS = sys.version_info >= (3, 13)
_VARIABLES = ("FAST", "DEREF", "GLOBAL", "NAME", "CLASSDEREF", "CLOSURE")


@dataclass(frozen=True)
class Body:
    """The lines of a statement's body, and the statements in it that are not compared.

    Attributes:
        first: its first line.
        last: its last line.
        asserts: (line, column) ranges of `assert` statements, which pytest replaces.
    """

    first: int
    last: int
    asserts: tuple[tuple[tuple[int, int], tuple[int, int]], ...] = ()

    @classmethod
    def of(cls, node: ast.With | ast.AsyncWith | ast.FunctionDef) -> Body:
        """Return a statement's body, decorators of its first statement included."""
        head = node.body[0]
        first = min([head.lineno, *(d.lineno for d in getattr(head, "decorator_list", []))])
        last = node.body[-1].end_lineno or node.body[-1].lineno
        found = (n for statement in node.body for n in ast.walk(statement))
        return cls(first, last, tuple(_span(n) for n in found if isinstance(n, ast.Assert)))

    def holds(self, line: int, column: int | None) -> bool:
        """Whether an instruction at this place belongs to the compared part."""
        place = (line, column or 0)
        inside = self.first <= line <= self.last
        return inside and not any(start <= place < end for start, end in self.asserts)


def _span(node: ast.stmt) -> tuple[tuple[int, int], tuple[int, int]]:
    end = (node.end_lineno or node.lineno, node.end_col_offset or node.col_offset)
    return (node.lineno, node.col_offset), end


def is_same(
    running: types.CodeType, lasti: int, candidates: list[types.CodeType], body: Body
) -> bool:
    """Whether one of the candidates has the running code's instructions in the body.

    Args:
        running: the code of the frame that is entering the `with` statement.
        lasti: offset of the instruction that enters it.
        candidates: code objects compiled from the text in question.
        body: the body as that text has it.
    """
    if _last_protected_line(running, lasti) > body.last:
        return False  # the running body goes on below the one in the text
    if not _has_pytest_asserts(running):
        body = replace(body, asserts=())
    expected = _fingerprint(running, body)
    return any(_fingerprint(candidate, body) == expected for candidate in candidates)


def is_same_function(
    running: types.CodeType, candidate: types.CodeType, node: ast.FunctionDef
) -> bool:
    """Whether code compiled from a `def` statement has the instructions of a running function."""
    body = Body.of(node)
    if not _has_pytest_asserts(running):
        body = replace(body, asserts=())
    return _fingerprint(running, body) == _fingerprint(candidate, body)


def _has_pytest_asserts(code: types.CodeType) -> bool:
    names = (*code.co_names, *code.co_varnames)
    inner = (const for const in code.co_consts if isinstance(const, types.CodeType))
    return any(name.startswith("@py") for name in names) or any(map(_has_pytest_asserts, inner))


def _last_protected_line(code: types.CodeType, lasti: int) -> int:
    """Return the last line from which an exception goes to this `with` statement's exit."""
    lines = [positions[0] or 0 for positions in code.co_positions()]
    protected = [line for span in _protected(code, lasti) for line in lines[_units(span)]]
    return max(protected, default=0)


def is_skippable(code: types.CodeType, lasti: int, body: Body) -> bool:
    """Whether an exception at the body's first line goes to this `with` statement's exit."""
    lines = [positions[0] for positions in code.co_positions()]
    for offset in range(lasti + 2, len(code.co_code), 2):
        line = lines[offset // 2]
        if line is not None and body.first <= line <= body.last:
            return any(offset in span for span in _protected(code, lasti))
    return False


def is_empty(code: types.CodeType, body: Body) -> bool:
    """Whether the body compiled to no instruction that does anything."""
    places = ((_place(i)[0], i.opname) for i in dis.get_instructions(code))
    return all(
        name in ("NOP", "RESUME") or line is None or not body.first <= line <= body.last
        for line, name in places
    )


def _protected(code: types.CodeType, lasti: int) -> list[range]:
    """Return the offsets of the instructions whose exceptions go first to this `with`'s exit."""
    first = _entered(code, lasti)
    entries = getattr(dis.Bytecode(code), "exception_entries", ())
    targets = [entry.target for entry in entries if entry.start <= first < entry.end]
    return [range(e.start, e.end) for e in entries if e.target in targets]


def _entered(code: types.CodeType, lasti: int) -> int:
    """Return the offset of the first instruction behind the entering, which may await."""
    if dis.opname[code.co_code[lasti]] != "BEFORE_ASYNC_WITH":
        return lasti + 2
    names = [(i.offset, i.opname) for i in dis.get_instructions(code) if i.offset > lasti]
    end = next(i for i, (_, name) in enumerate(names) if name == "JUMP_BACKWARD_NO_INTERRUPT")
    return next(offset for offset, name in names[end + 1 :] if name != "END_SEND")


def _units(span: range) -> slice:
    return slice(span.start // 2, span.stop // 2)


def _fingerprint(code: types.CodeType, body: Body) -> Counter[Any]:
    return Counter(_keys(code, body))


def _keys(code: types.CodeType, body: Body) -> Iterator[Any]:
    instructions = list(dis.get_instructions(code))
    places = {i.offset: _place(i) for i in instructions}
    variables: Counter[int] = Counter()
    for instruction, following in zip(instructions, [*instructions[1:], None], strict=True):
        line, column = places[instruction.offset]
        if line is None or instruction.opname in _IGNORED or _is_shown(instruction, following):
            continue
        if not body.holds(line, column):
            continue
        for operation in _operations(instruction, _value(instruction, code), bool(body.asserts)):
            if _HAS_PAIRS and operation[0] in _VERBS:
                variables[line] += 1
                yield (line, variables[line], operation)
            else:
                yield (line, column, operation)
        if instruction.opcode in dis.hasjrel and not body.asserts:
            yield (line, column, "TO", _inside(body, *places[instruction.argval]))
        if isinstance(instruction.argval, types.CodeType):
            yield from _keys(instruction.argval, body)


def _inside(body: Body, line: int | None, column: int | None) -> tuple[int, int | None] | None:
    return (line, column) if line is not None and body.holds(line, column) else None


def _place(instruction: dis.Instruction) -> tuple[int | None, int | None]:
    positions = instruction.positions
    return (positions.lineno, positions.col_offset) if positions is not None else (None, None)


def _is_shown(instruction: dis.Instruction, following: dis.Instruction | None) -> bool:
    """Whether a constant is loaded to be shown, which code that is not interactive leaves out."""
    if following is None or not instruction.opname.startswith("LOAD_CONST"):
        return False
    prints = following.opname == "CALL_INTRINSIC_1" and following.arg == _PRINT
    return prints or following.opname == "PRINT_EXPR"


def _value(instruction: dis.Instruction, code: types.CodeType) -> Any:
    if instruction.opname == "KW_NAMES":  # of which dis tells the number only, in 3.11
        return code.co_consts[instruction.arg or 0]
    return instruction.argval


def _operations(instruction: dis.Instruction, value: Any, has_asserts: bool) -> Iterator[Any]:
    """Yield what an instruction does, in terms that do not depend on the code around it."""
    name = instruction.opname
    if instruction.opcode in dis.hasjrel:
        # Rewritten asserts move jump targets, and with them the kind of jump.
        if "IF" in name and not has_asserts:
            yield name.replace("FORWARD_", "").replace("BACKWARD_", "")
    elif name in ("RETURN_CONST", "RETURN_VALUE"):
        if name == "RETURN_CONST" and value is not None:
            yield ("CONST", _constant(value))
    elif name in ("LOAD_CONST", "KW_NAMES"):
        if value is not None or not has_asserts:
            yield ("CONST", _constant(value))
    elif name in ("IMPORT_NAME", "STORE_GLOBAL", "DELETE_GLOBAL"):
        yield (name, value)
    elif any(kind in name for kind in _VARIABLES) and isinstance(value, str | tuple):
        verbs = [word for word in name.split("_") if word in _VERBS]
        names = value if isinstance(value, tuple) else (value,)
        yield from zip(verbs, names, strict=False)
    elif name == "LOAD_METHOD":  # or LOAD_ATTR, where the module imports the object by that name
        yield ("LOAD_ATTR", value)
    elif name != "CALL_INTRINSIC_1" or instruction.arg != _PRINT:
        yield (name, value if isinstance(value, str) else _constant(instruction.arg))


def _constant(value: Any) -> Any:
    """Return a key that tells apart constants which compare equal (1, 1.0, True)."""
    if isinstance(value, types.CodeType):
        stars = value.co_flags & (CO_VARARGS | CO_VARKEYWORDS)
        count = value.co_argcount + value.co_kwonlyargcount + stars.bit_count()
        arguments = value.co_varnames[:count]
        return ("code", value.co_name, arguments, value.co_posonlyargcount, stars)
    if isinstance(value, frozenset):
        return ("frozenset", frozenset(map(_constant, value)))
    if isinstance(value, tuple):
        return ("tuple", tuple(map(_constant, value)))
    return (type(value).__name__, repr(value))
