"""The module tree as users hold it, and ways to walk it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from midstream.interleaving.node import Node, Tree

_SIDES = ("output", "input", "inputs")  # of the model's root module


class Navigable:
    """A model as users hold it: its attributes are the modules of the tree.

    Args:
        root: the `torch.nn.Module` whose tree is navigated; its tensors may be on the meta device.
        rename: further names for modules, see ``Tree``.

    Raises:
        ValueError: a further name that is taken, or a renamed path that does not exist.
    """

    _tree: Tree | None = None

    def __init__(self, root: torch.nn.Module, rename: Mapping[str, str | list[str]] | None = None):
        tree = Tree(root, rename)
        for name in tree.root.aliases:
            if hasattr(type(self), name):
                raise ValueError(f"rename: '{name}' is taken by {type(self).__name__}.{name}.")
        self._tree = tree

    @property
    def tree(self) -> Tree:
        """The module tree."""
        assert self._tree is not None
        return self._tree

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or self._tree is None:
            raise AttributeError(f"'{type(self).__name__}' has no attribute '{name}'")
        return getattr(self._tree.root, name)

    def __setattr__(self, name: str, value: Any) -> None:
        own = getattr(type(self), name, None)
        if self._tree is not None and name in _SIDES:
            setattr(self._tree.root, name, value)
            return
        if self._tree is not None and self._tree.grows and isinstance(value, torch.nn.Module):
            setattr(self.tree.root, name, value)
            return
        if self._tree is not None and not name.startswith("_") and not isinstance(own, property):
            raise AttributeError(
                f"'{name}' of the model cannot be assigned: it has no value of the forward pass "
                "by this name. A module's are `.output`, `.input` and `.inputs`."
            )
        object.__setattr__(self, name, value)

    def get(self, path: str) -> Any:
        """The node at a dotted path, such as "model.layers.3.mlp".

        Inside a block a trailing served name ("model.layers.3.mlp.output") gives the value.
        """
        return self.tree.root.get(path)

    def named_modules(self) -> list[tuple[str, Node]]:
        """(path, node) of all modules, children first."""
        return self.tree.root.named_modules()

    def modules(
        self, include_fn: Callable[[Node], bool] | None = None, names: bool = False
    ) -> list[Any]:
        """All nodes, children first, see ``Node.modules``."""
        return self.tree.root.modules(include_fn, names)

    def __iter__(self) -> Iterator[Node]:
        return iter(self.tree.root)

    def __dir__(self) -> list[str]:
        return [*object.__dir__(self), *(dir(self._tree.root) if self._tree else ())]

    def __repr__(self) -> str:
        return repr(self.tree.root)
