"""Which of a block's values go by value and which by name, and pickles that say so.

Functions and classes of the user's own modules go by value, since the process that runs the block
may be unable to import them. What is installed (the standard library, site-packages) goes by name.
"""

from __future__ import annotations

import importlib.metadata
import io
import pickle
import sys
import sysconfig
import threading
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import cloudpickle

from midstream.tracing.block import Block
from midstream.tracing.tensors import reduce_tensor

__all__ = ["BY_VALUE_LOCK", "Pickler", "Unpickler", "pruned"]

_ENGINE_PACKAGES = frozenset({"midstream", "torch", "transformers", "triton", "vllm"})
"""Importable wherever a block runs, however they were installed."""


class Pickler(cloudpickle.Pickler):  # type: ignore[misc] # cloudpickle has no types
    """One pickler for all values of a block, so that what two of them share is sent once."""

    def __init__(self, stream: io.BytesIO, persistent_id: Callable[[Any], str | None]) -> None:
        super().__init__(stream, protocol=5)
        self._identify = persistent_id
        self._registered: list[ModuleType] = []

    def persistent_id(self, obj: Any) -> str | None:
        """Give the text of an object that the other side has of its own."""
        return self._identify(obj)

    def reducer_override(self, obj: Any) -> Any:
        """Write code, tensors and what goes by value in ways of our own."""
        if isinstance(obj, _PrunedModule):
            return _module, (obj.name, obj.attributes)
        if isinstance(obj, CodeType):
            # cloudpickle leaves the file's name out, and tracebacks would not tell the user's line
            return _code, (*self.dispatch_table[CodeType](obj), obj.co_filename)
        reduced = reduce_tensor(obj)
        if reduced is not None:
            return reduced
        if isinstance(obj, FunctionType | type):
            self._send_by_value(obj.__module__)
        return super().reducer_override(obj)

    def _send_by_value(self, module_name: str | None) -> None:
        module = sys.modules.get(module_name or "")
        if module is None or module_name in cloudpickle.list_registry_pickle_by_value():
            return
        if _is_users(module):
            cloudpickle.register_pickle_by_value(module)
            self._registered.append(module)

    def release_modules(self) -> None:
        """Undo the registrations, which are the whole process's."""
        for module in self._registered:
            cloudpickle.unregister_pickle_by_value(module)


BY_VALUE_LOCK = threading.RLock()
"""Held while a ``Pickler`` writes: what goes by value is registered for the whole process."""


class Unpickler(pickle.Unpickler):
    """Reads what a ``Pickler`` wrote."""

    def __init__(self, stream: io.BytesIO, persistent_load: Callable[[str], Any]) -> None:
        super().__init__(stream)
        self._find = persistent_load

    def persistent_load(self, pid: str) -> Any:
        """Give the object that a text stands for."""
        return self._find(pid)


def _is_users(module: ModuleType) -> bool:
    """Whether a module is the user's own: from a file that no installation put there."""
    file = getattr(module, "__file__", None)
    package = module.__name__.partition(".")[0]
    if not file or package in _ENGINE_PACKAGES or package in _installed_packages():
        return False
    return _is_users_file(file)


@lru_cache(maxsize=1)
def _installed_packages() -> frozenset[str]:
    """Top-level packages of all installed distributions, wherever they lie on the path."""
    return frozenset(importlib.metadata.packages_distributions())


@lru_cache(maxsize=1024)
def _is_users_file(file: str) -> bool:
    path = Path(file).resolve()
    if {"site-packages", "dist-packages"} & set(path.parts):
        return False
    installed = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
    return not any(path.is_relative_to(Path(root).resolve()) for root in installed)


def _code(make: Callable[..., CodeType], args: tuple[Any, ...], filename: str) -> CodeType:
    return make(*args).replace(co_filename=filename)


class _PrunedModule:
    """Of a user's module, the attributes that the block uses."""

    def __init__(self, name: str, attributes: dict[str, Any]) -> None:
        self.name, self.attributes = name, attributes


def pruned(block: Block, name: str, value: Any) -> Any:
    """Return what to send for a value: of a user's module only what the block uses."""
    if block.code is None or not isinstance(value, ModuleType) or not _is_users(value):
        return value
    used = block.code.compiled().attributes.get(name)
    if used is None:
        return value
    known = vars(value)
    return _PrunedModule(value.__name__, {key: known[key] for key in used if key in known})


def _module(name: str, attributes: dict[str, Any]) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(attributes)
    return module
