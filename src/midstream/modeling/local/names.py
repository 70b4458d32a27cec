"""Variables of blocks that see each other's: invokes of one trace, traces of one session."""

from __future__ import annotations

import dis
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import CodeType
from typing import Any

from midstream.tracing import Block
from midstream.tracing.percode import PerCode

_STORES = frozenset({"STORE_NAME", "STORE_GLOBAL"})


class Names(dict[str, Any]):
    """A block's variables. A name that it has not bound is looked up in other blocks'.

    Args:
        own: what it has from outside.
        others: where else to look, in order.

    Attributes:
        elsewhere: names that other blocks assign.
    """

    def __init__(self, own: Mapping[str, Any], others: Sequence[Mapping[str, Any]]):
        super().__init__(own)
        self._others = others
        self.elsewhere: frozenset[str] = frozenset()

    def part(self) -> None:
        """Stop looking in other blocks': they look in these, a cycle that would keep all values."""
        self._others = ()

    def __missing__(self, name: str) -> Any:
        for names in self._others:
            if name in names:  # not what those look up in turn: `in` knows their own alone
                return names[name]
        raise KeyError(name)


def bound(block: Block) -> frozenset[str]:
    """The variables that a block assigns."""
    if block.code is None:
        return frozenset()
    return _bound_by(block.code.compiled().code)


def _bound(code: CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname in _STORES:
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from (
                inner.argval
                for inner in dis.get_instructions(constant)
                if inner.opname == "STORE_GLOBAL"
            )


_bound_by = PerCode(lambda code: frozenset(_bound(code)))


def shared(blocks: Sequence[Block], earlier: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The variables of a trace's blocks, each able to see the others'.

    A name that a block reads and does not assign is, where another block assigns it, that block's,
    whatever the caller's own variable of that name is: in a notebook it is an earlier run's.

    Args:
        blocks: in the order of their invokes.
        earlier: what earlier traces of the session have bound.
    """
    if len(blocks) == 1 and not earlier:
        return [dict(blocks[0].values)]
    assigned = [bound(block) for block in blocks]
    spaces: list[Names] = []
    looked: list[list[Mapping[str, Any]]] = [[] for _ in blocks]
    for index, block in enumerate(blocks):
        theirs = frozenset().union(*_without(assigned, index)) - assigned[index]
        own = {name: value for name, value in block.values.items() if name not in theirs}
        spaces.append(Names(own, looked[index]))
        spaces[-1].elsewhere = theirs
    for index, block in enumerate(blocks):
        looked[index] += [*reversed(spaces[:index]), *spaces[index + 1 :], earlier, block.values]
    return list(spaces)


def _without(items: Sequence[frozenset[str]], index: int) -> Iterable[frozenset[str]]:
    return (item for at, item in enumerate(items) if at != index)
