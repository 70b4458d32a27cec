"""Attributes of modules in a block, where another stage may have them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from midstream.errors import UnsupportedError
from midstream.interleaving.node import Node
from midstream.interleaving.run import running
from midstream.modeling.vllm.engine.attributes import LISTING, shown
from midstream.modeling.vllm.engine.parallel.stages import Missing

if TYPE_CHECKING:
    from midstream.modeling.vllm.engine.parallel.pipeline_interleaver import StagedInterleaver


class Attributes:
    """Gives blocks the attributes of modules: those of another stage come from there.

    Args:
        interleaver: the stage's blocks.
    """

    def __init__(self, interleaver: StagedInterleaver):
        self._interleaver = interleaver

    def __call__(self, node: Node, name: str, value: Any) -> Any:
        """An attribute of a module, as a block gets it, see ``shown``."""
        run = running()
        if run is None:
            return shown(node, name, value)
        if name in LISTING and callable(value):
            return self._listing(node, name, value)
        on_class = hasattr(type(node._module), name)
        if callable(value) and on_class:
            return shown(node, name, value)
        if self._interleaver.stages.is_spanning(node.path) and not isinstance(value, Missing):
            return shown(node, name, value)
        what = f"Reading '{node.path}.{name}'"
        found = self._interleaver.perform(run, [node.path], what, lambda: _sent(what, value))
        return shown(node, name, found)

    def _listing(self, node: Node, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """A method that gives a module's tensors: all of them, from the stage that has them."""

        def giving(*args: Any, **keywords: Any) -> Any:
            def read() -> Any:
                found = method(*args, **keywords)
                return list(found) if isinstance(found, Iterator) else found

            what = f"Calling '{node.path}.{name}'"
            found = self._interleaver.perform(running(), [node.path], what, read)
            return shown(node, name, found)

        return giving


def _sent(what: str, value: Any) -> Any:
    if callable(value) and not isinstance(value, torch.nn.Module):
        raise UnsupportedError(
            f"{what} is not supported with pipeline parallelism: it is an object of one stage, "
            "which cannot travel to the others."
        )
    return value
