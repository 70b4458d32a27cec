"""Modules whose `forward` is another one for a while, on the instance."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
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
        self._held: dict[str, Forward] = {}

    @contextmanager
    def held(self, path: str, forward: Forward) -> Iterator[None]:
        """Let a forward stand in a module's place beyond the steps; ``replace`` leaves it alone."""
        module = self._modules[path]
        own = module.__dict__.get("forward")
        self._held[path] = module.forward
        module.__dict__["forward"] = _standing_in(forward, self._held[path])
        try:
            yield
        finally:
            del self._held[path]
            _put_back(module, own)

    def replace_all(self, paths: Iterable[str]) -> None:
        """Replace the forwards of several modules, unless that has been done."""
        for path in paths:
            if path not in self._replaced:  # asked here too: most of those around others are
                self.replace(path)

    def replace(self, path: str) -> None:
        """Replace a module's forward, unless that has been done."""
        module = self._modules.get(path)
        if module is None or path in self._replaced or path in self._held:
            return
        # into the instance's dictionary: a module's own attribute setter takes microseconds
        own = module.__dict__.get("forward")
        self._replaced[path] = (module, own)
        made = self._made.get(path)  # wrapping anew in every step would cost as much as a visit
        if made is None or made[0] is not own:
            forward = module.forward  # one object, which the wrapper is seen to hold
            made = self._made[path] = (own, _told(self._wrap(path, forward), forward))
        module.__dict__["forward"] = made[1]

    def restore(self) -> None:
        """Put all modules' own forwards back."""
        for module, own in self._replaced.values():
            _put_back(module, own)
        self._replaced.clear()

    def forward_of(self, path: str) -> Forward:
        """A module's own forward, whatever stands in its place."""
        if path in self._held:
            return self._held[path]
        module, own = self._replaced.get(path, (self._modules[path], None))
        if own is not None or path not in self._replaced:
            return own or module.forward
        return type(module).forward.__get__(module)  # type: ignore[no-any-return]


def _standing_in(forward: Forward, own: Forward) -> Forward:
    """A function in the place of a method, which can be told what it stands for."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    return _told(call, own)


def _told(forward: Forward, own: Forward) -> Forward:
    """A forward that says that it takes what the module's own does: transformers looks at that."""
    forward.__dict__["__wrapped__"] = own
    return forward


def _put_back(module: torch.nn.Module, own: Any) -> None:
    if own is None:
        del module.__dict__["forward"]
    else:
        module.__dict__["forward"] = own
