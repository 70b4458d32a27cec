"""Which outside names a block reads, and where a frame keeps a name."""

from __future__ import annotations

import dis
from collections.abc import Iterable, Iterator
from enum import Enum
from inspect import CO_OPTIMIZED
from types import CodeType, FrameType
from typing import Any

from midstream.tracing.percode import PerCode

__all__ = ["Home", "home", "nested", "outside_reads", "resolve"]

_READS = frozenset({"LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS"})
_DELETES = frozenset({"DELETE_NAME", "DELETE_GLOBAL"})
_GLOBAL_WRITES = frozenset({"STORE_GLOBAL", "DELETE_GLOBAL"})


def nested(code: CodeType) -> Iterator[CodeType]:
    """Yield `code` and every code object inside it."""
    yield code
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from nested(const)


def outside_reads(code: CodeType) -> frozenset[str]:
    """Return the names that module-level `code` may read before it has bound them itself.

    A name bound on every path before its first read is left out: a loop that traces again and again
    must not carry the last pass's results along.
    """
    flow = _Flow(code)
    reads: dict[str, set[int]] = {}
    for instruction in flow.instructions:
        for name in _names_read(instruction):
            reads.setdefault(name, set()).add(instruction.offset)
    return frozenset(name for name, offsets in reads.items() if offsets & flow.before_store(name))


def _names_read(instruction: dis.Instruction) -> Iterable[str]:
    if instruction.opname in _READS or instruction.opname in _DELETES:
        return (instruction.argval,)
    if isinstance(instruction.argval, CodeType):
        # A nested function reads when it is called, which is not before it is made.
        return {
            inner.argval
            for code in nested(instruction.argval)
            for inner in dis.get_instructions(code)
            if inner.opname in _READS
        }
    return ()


class _Flow:
    """The ways through a code object, from instruction to instruction by offset."""

    _ENDS = frozenset({"RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE"})

    def __init__(self, code: CodeType) -> None:
        self.instructions = list(dis.get_instructions(code))
        self._next: dict[int, list[int]] = {}
        self._raises: dict[int, list[int]] = {}
        entries = getattr(dis.Bytecode(code), "exception_entries", ())
        following = [i.offset for i in self.instructions[1:]]
        for i, after in zip(self.instructions, [*following, None], strict=True):
            jumps = i.opcode in dis.hasjrel
            always = i.opname.startswith("JUMP_") and "_IF_" not in i.opname
            leaves = always or i.opname in self._ENDS
            self._next[i.offset] = [i.argval] if jumps else []
            if after is not None and not leaves:
                self._next[i.offset].append(after)
            self._raises[i.offset] = [e.target for e in entries if e.start <= i.offset < e.end]

    def before_store(self, name: str) -> set[int]:
        """Return the offsets that can be reached while `name` is not bound by this code.

        A name that is deleted somewhere counts as never bound.
        """
        stores = {i.offset for i in self.instructions if _stores(i, name)}
        if any(i.opname in _DELETES and i.argval == name for i in self.instructions):
            stores = set()
        reached: set[int] = set()
        waiting = [0]
        while waiting:
            offset = waiting.pop()
            if offset not in reached:
                reached.add(offset)
                # A store that fails has not bound its name.
                passed = [] if offset in stores else self._next[offset]
                waiting += [*passed, *self._raises[offset]]
        return reached


def _stores(instruction: dis.Instruction, name: str) -> bool:
    return instruction.opname in ("STORE_NAME", "STORE_GLOBAL") and instruction.argval == name


class Home(Enum):
    """Where running code keeps a name."""

    LOCAL = "local"
    GLOBAL = "global"
    ENCLOSING = "enclosing"  # a class body that reads a variable of the function around it


def home(code: CodeType, name: str) -> Home:
    """Return where code keeps `name`.

    An inlined comprehension leaves its variables among a function's local names, so a name that the
    code itself treats as global is global whatever that list says.
    """
    if name in _global_names(code):
        return Home.GLOBAL
    if code.co_flags & CO_OPTIMIZED:
        own = name in code.co_varnames or name in code.co_cellvars or name in code.co_freevars
        return Home.LOCAL if own else Home.GLOBAL
    return Home.ENCLOSING if name in code.co_freevars else Home.LOCAL


def _own_globals(code: CodeType) -> frozenset[str]:
    # In a class body a comprehension may read as global what the body itself binds.
    ops = _GLOBAL_WRITES | ({"LOAD_GLOBAL"} if code.co_flags & CO_OPTIMIZED else set())
    return frozenset(i.argval for i in dis.get_instructions(code) if i.opname in ops)


_global_names = PerCode(_own_globals)


def resolve(frame: FrameType, names: Iterable[str]) -> dict[str, Any]:
    """Return the values that `names` have in a frame; builtins and unbound names are left out."""
    code, local_names = frame.f_code, frame.f_locals
    values: dict[str, Any] = {}
    for name in names:
        where = home(code, name)
        if where is Home.ENCLOSING and frame.f_back is not None:
            values |= resolve(frame.f_back, [name])
        elif where is Home.LOCAL and name in local_names:
            values[name] = local_names[name]
        elif name in frame.f_globals and (where is Home.GLOBAL or not code.co_flags & CO_OPTIMIZED):
            values[name] = frame.f_globals[name]
    values.pop("__builtins__", None)
    return values
