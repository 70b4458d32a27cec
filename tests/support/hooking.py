"""Plain PyTorch hooks, to compare with, and what must not be left of anything on a module."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

__all__ = ["first", "hooked", "leftovers", "reading"]

Change = Callable[[Any], Any]
"""Called with a module's output; what it returns, unless None, stands in its place."""


@contextmanager
def hooked(module: nn.Module, changes: Mapping[str, Change]) -> Iterator[None]:
    """Forward hooks on submodules, by path."""
    with ExitStack() as hooks:
        for path, change in changes.items():
            handle = module.get_submodule(path).register_forward_hook(
                lambda _, args, output, change=change: change(output)
            )
            hooks.callback(handle.remove)
        yield


@contextmanager
def reading(module: nn.Module, *paths: str) -> Iterator[dict[str, list[Any]]]:
    """What submodules return, call by call, by path; the tensors themselves."""
    seen: dict[str, list[Any]] = {path: [] for path in paths}
    with hooked(module, {path: seen[path].append for path in paths}):
        yield seen


def first(output: Any) -> torch.Tensor:
    """The hidden states of what a layer or sublayer returned."""
    found: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return found


def leftovers(module: nn.Module) -> list[str]:
    """Paths of modules on which a forward or a method was replaced."""
    names = ("forward", "_get_stopping_criteria")
    return [
        path for path, each in module.named_modules() if any(name in vars(each) for name in names)
    ]
