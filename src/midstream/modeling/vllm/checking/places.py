"""The places of a decoder, found by name in vLLM's module tree and in HuggingFace's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from midstream.errors import UnsupportedError
from midstream.modeling.vllm.checking.streams import overwrites_residual

STREAM, ATTENTION, MLP, ROUTER, NORM = "stream", "attention", "mlp", "router", "final norm"

_ATTENTION = (
    *("self_attn", "attn", "attention", "self_attention", "linear_attn", "short_conv", "conv"),
    *("mixer", "mamba"),
)
_MLP = ("mlp", "feed_forward", "ffn", "block_sparse_moe", "moe", "fc2")
_ROUTER = ("gate", "router", "router.layer")
_NORM = (
    *("norm", "ln_f", "final_layernorm", "final_layer_norm", "norm_f", "embedding_norm"),
    *("final_norm", "layer_norm"),
)
_NOT_TEXT = frozenset(
    {"vision", "visual", "vision_tower", "vision_model", "audio", "audio_tower", "encoder"}
)


@dataclass(frozen=True)
class Place:
    """One place of a decoder in both trees.

    Attributes:
        kind: `STREAM` (what leaves the layer), `ATTENTION`, `MLP`, `ROUTER` or `NORM`.
        layer: the layer's index; None for what lies behind the layers.
        engine: the module's path on vLLM.
        local: the module's path on HuggingFace.
        overwrites: of a layer, whether the second element of its pair is left over, see
            ``streams.overwrites_residual``.
    """

    kind: str
    layer: int | None
    engine: str
    local: str
    overwrites: bool = False

    @property
    def name(self) -> str:
        """How tables and requests call it."""
        return self.kind if self.layer is None else f"{self.kind} {self.layer}"


class Decoder:
    """The decoder in two trees of one checkpoint.

    Args:
        engine: modules by path, as vLLM has them; without weights is enough.
        local: the same of HuggingFace.
        count: number of its layers.

    Raises:
        UnsupportedError: a tree has no list of that many layers.
    """

    def __init__(self, engine: Mapping[str, nn.Module], local: Mapping[str, nn.Module], count: int):
        self.count = count
        self._trees = engine, local
        self._lists = tuple(
            _layers(tree, count, whose)
            for tree, whose in ((engine, "vLLM's"), (local, "HuggingFace's"))
        )

    def of_layer(self, layer: int) -> Iterator[Place]:
        """Places of a layer in the order in which a forward leaves them."""
        paths = self._layer_paths(layer)
        for kind, names in ((ATTENTION, _ATTENTION), (MLP, _MLP)):
            found = self._children(paths, names)
            if found is None:
                continue
            if kind == MLP and (router := self._router(found, layer)) is not None:
                yield router
            yield Place(kind, layer, *found)
        overwrites = overwrites_residual(self._trees[0][paths[0]])
        yield Place(STREAM, layer, *paths, overwrites=overwrites)

    def _router(self, mlp: tuple[str, str], layer: int) -> Place | None:
        """The router of a mixture of experts, if that is what the MLP is."""
        found = self._children(mlp, _ROUTER)
        if found is None or getattr(self._trees[1][found[1]], "weight", None) is None:
            return None
        return Place(ROUTER, layer, *found)

    def behind(self) -> Iterator[Place]:
        """The final norm, where both trees have one beside the layers."""
        beside = tuple(path.rpartition(".")[0] for path in self._lists)
        if (found := self._children(beside, _NORM)) is not None:
            yield Place(NORM, None, *found)

    def _layer_paths(self, layer: int) -> tuple[str, str]:
        engine, local = self._lists
        return f"{engine}.{layer}", f"{local}.{layer}"

    def _children(self, parents: Sequence[str], names: Sequence[str]) -> tuple[str, str] | None:
        found = [
            next((p for p in (f"{at}.{name}".strip(".") for name in names) if p in tree), None)
            for tree, at in zip(self._trees, parents, strict=True)
        ]
        engine, local = found
        return None if engine is None or local is None else (engine, local)


def _layers(tree: Mapping[str, nn.Module], count: int, whose: str) -> str:
    """Path of the list of the decoder's layers: the outermost of that length."""
    found = [
        path
        for path, module in tree.items()
        if isinstance(module, torch.nn.ModuleList)
        and len(module) == count
        and _NOT_TEXT.isdisjoint(path.split("."))
    ]
    if not found:
        raise UnsupportedError(
            f"model.check() found no list of {count} layers in {whose} tree of this model, so it "
            "cannot tell which modules belong together. Compare by hand: read what you need in a "
            "trace, and the same with a hook on `model.transformers().module`."
        )
    return min(found, key=lambda path: path.count("."))
