"""Classes by name: written down on one side, found on the other without importing anything."""

from __future__ import annotations

import sys

# The user's script runs under another name in a child that multiprocessing spawned.
_MAIN_ALIASES = {"__mp_main__": "__main__"}


def class_name(cls: type) -> tuple[str, str]:
    """Return the module and qualified name under which another process finds `cls`.

    Raises:
        ValueError: `cls` was made inside a function, where no other process can find it.
    """
    if "<" in cls.__qualname__:
        raise ValueError(f"the class {cls.__qualname__} is defined inside a function")
    return module_of(cls), cls.__qualname__


def module_of(cls: type) -> str:
    """Return the name of a class's module as the client's process knows it."""
    return _MAIN_ALIASES.get(cls.__module__, cls.__module__)


def find_class(module: str, qualname: str) -> type | None:
    """Find the class of that name in a module that is already loaded, or None.

    Only namespaces are read: a module's ``__getattr__`` and a class's descriptors do not run.
    """
    found: object = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, "__dict__", {}).get(part)
    return found if isinstance(found, type) else None
