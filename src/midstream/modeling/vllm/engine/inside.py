"""What `model` and `tracer` are inside a block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NoReturn

import torch

from midstream.errors import UnsupportedError
from midstream.interleaving.node import Node, Tree
from midstream.interleaving.run import current_run
from midstream.interleaving.steps import Steps
from midstream.modeling.vllm.engine.attributes import shown
from midstream.modeling.vllm.engine.controls import Controls
from midstream.modeling.vllm.engine.layers import HEAD, heads
from midstream.modeling.vllm.engine.parallel.tensor_parameters import Parameters
from midstream.modeling.vllm.engine.readonly import ReadOnlyTensor
from midstream.modeling.vllm.engine.refusals import refused
from midstream.modeling.vllm.locations import EngineModel

Rename = Mapping[str, str | list[str]]
"""Further names for modules, by path or last part of one."""


class BlockModel(EngineModel):
    """What `model` is inside a block.

    Args:
        root: the model vLLM loaded.
        tokenizer: gives the checkpoint's tokenizer.
        rename: further names for modules.
    """

    def __init__(self, root: torch.nn.Module, tokenizer: Callable[[], Any], rename: Rename | None):
        super().__init__(root, rename)
        self.tree.shown = shown
        self.tree.parameter = partial(_whole, Parameters(self.tree.modules, 1))
        self._load_tokenizer = tokenizer
        self.refuse_calls()

    def refuse_calls(self) -> None:
        """Note which of the tree's modules no block can call."""
        self.tree.uncallable.update(dict.fromkeys(_with_attention(self.tree), _ATTENTION))
        self.tree.uncallable.update(dict.fromkeys(heads(self.tree), HEAD))

    @property
    def tokenizer(self) -> Any:
        """The checkpoint's tokenizer."""
        return self._load_tokenizer()

    @property
    def stored(self) -> Mapping[str, Any]:
        """What clients had put into the engine when this request began, by name."""
        return current_run("`model.stored`").context  # type: ignore[no-any-return]

    def trace(self, *args: Any, **settings: Any) -> NoReturn:
        """Refuse: a block runs beside one request.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            "A trace inside a trace is not supported. Save what the other trace needs, and trace "
            "again after the `with`."
        )

    generate = refused("generate", "Generate before or after the `with`.")
    put = refused("put", "Put it in before the request.")
    session = refused("session", "Open it around the traces.")
    edit = refused("edit", "Install the edit before the request.")
    clear_edits = refused("clear_edits", "Clear edits before the request, or leave them out there.")
    run = refused("run", "Run it after the `with`.")
    stats = refused("stats", "Ask for them before or after the `with`.")
    dispatch = refused("dispatch", "The engine is up.")
    close = refused("close", "Close it after the `with`; `tracer.stop()` ends the request.")


def _whole(mine: Parameters, node: Node, name: str) -> torch.Tensor:
    """A module's whole parameter, read-only; from all ranks where each has a piece."""
    run = current_run("`param()`")
    assert run.interleaver is not None
    across = run.interleaver.across
    if across is not None:
        return ReadOnlyTensor.of(across.parameter(run, node.path, name))
    tensor, _, rows = mine.of(node.path, name)
    return ReadOnlyTensor.of(tensor if rows is None else tensor[:rows])


_ATTENTION = (
    "it contains attention or a state, which reads and writes the cache of all requests in the "
    "step. Call the modules around it (norms, projections, the MLP), or edit its input"
)


def _with_attention(tree: Tree) -> list[str]:
    """Paths of the modules that use the KV cache, or contain one that does."""
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    return [
        path
        for path, module in tree.modules.items()
        if any(isinstance(inner, AttentionLayerBase) for inner in module.modules())
    ]


class BlockTracer(Controls):
    """What `tracer` is inside a block. All blocks of the engine share it, so none may change it."""

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(
            f"`tracer.{name}` cannot be assigned: the tracer has no state in a block. Use a "
            "variable of the block."
        )

    @property
    def iter(self) -> Steps:
        """The request's steps: ``for step in tracer.iter[:3]``, see ``Steps``."""
        return Steps(current_run("`tracer.iter`"))

    def all(self) -> Iterator[int]:
        """All steps from the one the block is in: ``for step in tracer.all()``."""
        return self.iter[:]

    def invoke(self, *args: Any, **settings: Any) -> NoReturn:
        """Refuse: a block runs beside one request.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            "`tracer.invoke()` inside a block is not supported: the block runs beside its own "
            "request. Open the trace without a prompt to give it several invokes."
        )

    def stop(self) -> None:
        """End this request here. What the block saved comes back; the rest of it does not run.

        The finish reason is "stop", the stop reason "tracer.stop", whatever `ignore_eos` and
        `min_tokens` say. The step's token counts only if the block had reached `model.samples`.
        """
        current_run("`tracer.stop()`").stop()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"`tracer.{name}` is not available inside a block; there are `iter`, `all()`, "
            "`stop()`, `cache()` and `result`. Saved values are bound to their names when the "
            "`with` ends."
        )
