"""Modules whose `forward` is another one for a while, on the instance."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

Forward = Callable[..., Any]


class Replacing:
    """Puts other forwards in the place of modules' own, and takes them out again.

    Args:
        modules: the modules by path.
        wrap: gives what stands in a module's place, from its path and its own forward.
    """

    def __init__(
        self, modules: Mapping[str, torch.nn.Module], wrap: Callable[[str, Forward], Forward]
    ):
        self._modules, self._wrap = modules, wrap
        self._replaced: dict[str, tuple[torch.nn.Module, Any]] = {}
        self._made: dict[str, tuple[Any, Forward]] = {}

    def replace(self, path: str) -> None:
        """Replace a module's forward, unless that has been done."""
        module = self._modules.get(path)
        if module is None or path in self._replaced:
            return
        # into the instance's dictionary: a module's own attribute setter takes microseconds
        own = module.__dict__.get("forward")
        self._replaced[path] = (module, own)
        made = self._made.get(path)  # wrapping anew in every step would cost as much as a visit
        if made is None or made[0] is not own:
            made = self._made[path] = (own, self._wrap(path, module.forward))
        module.__dict__["forward"] = made[1]

    def restore(self) -> None:
        """Put all modules' own forwards back."""
        for module, own in self._replaced.values():
            if own is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = own
        self._replaced.clear()

    def forward_of(self, path: str) -> Forward:
        """A module's own forward, whatever stands in its place."""
        module, own = self._replaced.get(path, (self._modules[path], None))
        if own is not None or path not in self._replaced:
            return own or module.forward
        return type(module).forward.__get__(module)  # type: ignore[no-any-return]
