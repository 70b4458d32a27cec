"""What a block gets of the engine's modules, which all requests share: not to change, untraced."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import torch

from midstream.errors import UnsupportedError
from midstream.interleaving.node import Node
from midstream.modeling.vllm.engine.readonly import ReadOnlyTensor

LISTING = frozenset(
    (
        "parameters",
        "named_parameters",
        "get_parameter",
        "buffers",
        "named_buffers",
        "get_buffer",
        "state_dict",
    )
)
"""Methods of a module that give its tensors."""
_HARMLESS = frozenset({"extra_repr"})


def shown(node: Node, name: str, value: Any) -> Any:
    """An attribute of a module, as a block gets it.

    Args:
        node: the module.
        name: what the attribute is called.
        value: a tensor is given read-only, and so are those that a method gives; a method of the
            model's own runs untraced on copies, and `forward` is a call of the module.

    Raises:
        UnsupportedError: a method that every module has and that may change it.
    """
    if name == "forward":
        return node.__call__
    if not callable(value):
        return _read_only(value)
    if _is_of_all_modules(name, value):
        return _common(name, value)
    return _untraced(node, value) if isinstance(value, MethodType) else value


def _common(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    if name in _HARMLESS:
        return method
    if name in LISTING:
        return _giving_read_only(method)
    raise UnsupportedError(
        f"`{name}()` of a module is not supported in a block: all requests share the model, so a "
        "block may read its weights and not change it. Submodules are attributes, and "
        "`.output = ...` replaces what a module returns."
    )


def _is_of_all_modules(name: str, value: Any) -> bool:
    common = getattr(torch.nn.Module, name, None)
    return common is not None and getattr(value, "__func__", None) is common


def _giving_read_only(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def giving(*args: Any, **keywords: Any) -> Any:
        return _read_only(method(*args, **keywords))

    return giving


def _untraced(node: Node, method: MethodType) -> Callable[..., Any]:
    @functools.wraps(method)
    def calling(*args: Any, **keywords: Any) -> Any:
        return node.run_untraced(method, args, keywords)

    return calling


def _read_only(found: Any) -> Any:
    if isinstance(found, torch.Tensor):
        return ReadOnlyTensor.of(found.detach())
    if type(found) in (tuple, list):
        return type(found)(map(_read_only, found))
    if isinstance(found, dict) and any(isinstance(each, torch.Tensor) for each in found.values()):
        return {name: _read_only(value) for name, value in found.items()}
    return map(_read_only, found) if isinstance(found, Iterator) else found
