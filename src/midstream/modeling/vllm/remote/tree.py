"""A module tree as data, and modules that stand for it where there is no vLLM."""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from midstream.interleaving.node import Node

_DEEPEST = 64
_MOST = 1_000_000


class Branch(msgspec.Struct, array_like=True):
    """A module: the name of its class, what its `repr` adds, and its submodules by name.

    One that is reached by several paths is written once; ``same`` is its number elsewhere, in the
    order in which modules are first met, 0 for the root; -1 for one that is written here.
    """

    kind: str
    about: str = ""
    children: dict[str, Branch] = {}
    same: int = -1


def write(node: Node) -> Branch:
    """The tree below a node."""
    return _write(node, {})


def _write(node: Node, seen: dict[int, int]) -> Branch:
    kind = type(node._module).__name__
    if id(node) in seen:
        return Branch(kind, same=seen[id(node)])
    seen[id(node)] = len(seen)
    names = {name: child for name, child in node._module._modules.items() if child is not None}
    children = {name: _write(_at(node, child), seen) for name, child in names.items()}
    return Branch(kind, node._module.extra_repr(), children)


def _at(node: Node, module: torch.nn.Module) -> Node:
    found = node._tree.find(module)
    assert found is not None
    return found


def stand_in(branch: Branch) -> torch.nn.Module:
    """Modules with the names and classes' names of a tree, and nothing in them.

    Raises:
        ValueError: it is nested too deep, or makes no sense.
    """
    return _stand_in(branch, [], 0)


def _stand_in(branch: Branch, made: list[torch.nn.Module], depth: int) -> torch.nn.Module:
    if depth > _DEEPEST or len(made) > _MOST:
        raise ValueError("The server's module tree is too large.")
    if branch.same >= 0:
        if branch.same >= len(made):
            raise ValueError("The server's module tree makes no sense.")
        return made[branch.same]
    kind: Any = type(branch.kind, (_StandIn,), {})
    module = kind(branch.about)
    made.append(module)
    for name, child in branch.children.items():
        module.add_module(name, _stand_in(child, made, depth + 1))
    return module  # type: ignore[no-any-return]


class _StandIn(torch.nn.Module):
    """A module of a server's model."""

    def __init__(self, about: str):
        super().__init__()
        self._about = about

    def extra_repr(self) -> str:
        return self._about
