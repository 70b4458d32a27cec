"""Which outside names a block reads, and where a frame keeps a name."""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from inspect import CO_OPTIMIZED
from types import CodeType, FrameType
from typing import Any

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
    instructions = list(dis.get_instructions(code))
    is_bound = _bound_before(code, instructions)
    reads: set[str] = set()
    for instruction in instructions:
        for name in _names_read(instruction):
            if not is_bound(name, instruction.offset):
                reads.add(name)
    return frozenset(reads)


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


def _bound_before(
    code: CodeType, instructions: list[dis.Instruction]
) -> Callable[[str, int], bool]:
    """Return a test: whether a name is certainly bound when the instruction at an offset runs."""
    jumps = [(i.offset, i.argval) for i in instructions if i.opcode in dis.hasjrel]
    entries = getattr(dis.Bytecode(code), "exception_entries", ())
    # An exception can leave from anywhere in the protected range, its first instruction included.
    jumps += [(entry.start - 1, entry.target) for entry in entries]
    stores: dict[str, int] = {}
    deleted = {i.argval for i in instructions if i.opname in _DELETES}
    for i in instructions:
        if i.opname in ("STORE_NAME", "STORE_GLOBAL"):
            stores.setdefault(i.argval, i.offset)

    def is_bound(name: str, offset: int) -> bool:
        store = stores.get(name)
        if store is None or offset < store or name in deleted:
            return False
        return not any(start < store < target <= offset for start, target in jumps)

    return is_bound


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


def _global_names(code: CodeType) -> frozenset[str]:
    key = id(code)
    found = _global_names_of.get(key)
    if found is None or found[0] is not code:
        # In a class body a comprehension may read as global what the body itself binds.
        ops = _GLOBAL_WRITES | ({"LOAD_GLOBAL"} if code.co_flags & CO_OPTIMIZED else set())
        names = (i.argval for i in dis.get_instructions(code) if i.opname in ops)
        # The code object is kept with its entry so that its id cannot pass to another one.
        found = _global_names_of[key] = (code, frozenset(names))
        while len(_global_names_of) > 512:
            _global_names_of.pop(next(iter(_global_names_of)), None)
    return found[1]


_global_names_of: dict[int, tuple[CodeType, frozenset[str]]] = {}


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
