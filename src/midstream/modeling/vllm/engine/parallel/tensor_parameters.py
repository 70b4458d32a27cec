"""Whole parameters of a model that is divided among ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from midstream.errors import UnsupportedError
from midstream.modeling.vllm.engine.parallel.sharding import SAME, Kind, Layout, Part
from midstream.modeling.vllm.engine.parallel.tensor_rules import bare, output_parts


class Parameters:
    """The parameters and buffers of a model, and how they are divided.

    Args:
        modules: the model's modules by path, as they are loaded on this rank.
        ranks: among how many it is divided.
    """

    def __init__(self, modules: Mapping[str, torch.nn.Module], ranks: int):
        self._modules, self._ranks = modules, ranks
        self._same: set[tuple[str, str]] = set()

    def of(self, path: str, name: str) -> tuple[torch.Tensor, Kind | None, int | None]:
        """A parameter as this rank has it.

        Returns:
            It, how it is divided (None: it is whole if all ranks have the same), and how many rows
            of the whole are the checkpoint's, if not all are.

        Raises:
            AttributeError: there is none of that name.
            UnsupportedError: the engine keeps it in a form of its own.
        """
        layer = bare(self._modules[path])
        tensor = parameter(layer, path, name)
        kind = SAME if self._ranks == 1 or (path, name) in self._same else self._kind(layer, tensor)
        rows = getattr(layer, "org_vocab_size", None)
        return tensor.detach(), kind, rows if name == "weight" and rows else None

    def same(self, path: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Note that all ranks have the same of a parameter, which is given back."""
        self._same.add((path, name))
        return tensor

    def _kind(self, layer: Any, tensor: torch.Tensor) -> Kind | None:
        """As vLLM's loaders mark parameters: along which axis a rank has a piece."""
        if getattr(layer, "tp_size", 1) != self._ranks or not _is_linear(layer):
            return None
        output, inputs = _axes(tensor)
        if output is not None and hasattr(layer, "org_vocab_size"):
            parts: tuple[Part, ...] | None = (Part(layer.num_embeddings_per_partition),)
            return _along(output, tensor, parts, self._ranks)
        if output is not None and hasattr(layer, "gather_output"):
            return _along(output, tensor, output_parts(layer), self._ranks)
        if inputs is not None and hasattr(layer, "input_is_parallel"):
            parts = (Part(layer.input_size_per_partition),)
            return _along(inputs, tensor, parts, self._ranks)
        return None


def _is_linear(layer: Any) -> bool:
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    return isinstance(layer, LinearBase | VocabParallelEmbedding)


def _axes(tensor: torch.Tensor) -> tuple[int | None, int | None]:
    """The axes of what a layer returns and takes, as vLLM's loaders mark them."""
    if isinstance(tensor, _Unpacked):
        return 0, 1
    return getattr(tensor, "output_dim", None), getattr(tensor, "input_dim", None)


class _Unpacked(torch.nn.Parameter):
    """A weight as it was before the CPU's kernels put it into a form of their own."""


def _unpacked(layer: Any) -> torch.Tensor:
    """The weight from what the layer makes of ones: each product has one term, and is exact."""
    width = getattr(layer, "input_size_per_partition", None) or layer.embedding_dim
    dtype = layer.params_dtype if hasattr(layer, "params_dtype") else layer.weight.dtype
    ones = torch.eye(int(width), dtype=dtype)
    return _Unpacked(layer.cpu_linear(ones, layer.weight, None).t(), requires_grad=False)


def _along(
    axis: int, tensor: torch.Tensor, parts: tuple[Part, ...] | None, ranks: int
) -> Layout | None:
    if parts is None:
        return None
    layout = Layout(parts, ranks, axis - tensor.dim())
    return layout if layout.fits(tensor) else None


def parameter(layer: Any, path: str, name: str) -> torch.Tensor:
    """A parameter or buffer of a module, as this process has it.

    Raises:
        AttributeError: there is none of that name.
        UnsupportedError: the engine keeps it in a form of its own.
    """
    tensor = layer._parameters.get(name)
    if tensor is None:
        tensor = layer._buffers.get(name)
    if tensor is None:
        held = ", ".join([*layer._parameters, *layer._buffers]) or "none"
        raise AttributeError(f"'{path or 'model'}' has no parameter '{name}'. It has: {held}.")
    if not tensor.numel() and name == "weight" and hasattr(layer, "cpu_linear"):
        return _unpacked(layer)
    if not tensor.numel():
        raise UnsupportedError(
            f"'{path}.{name}' is kept in a form of the engine's own, so it cannot be read. Read "
            "it from the checkpoint."
        )
    found: torch.Tensor = tensor
    return found
