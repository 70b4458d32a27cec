"""One forward on random tokens, when a model has been loaded: which tensors are divided, and how.

What all ranks have alike is whole. Of what differs, vLLM's own linear layers and attention are
known (`tensor_rules`), and what lies between them follows from these: the same memory under
another name, a stretch of it, or what a module without collectives made of it in the same shape.
What remains is not known, and no block is given it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from midstream.interleaving.locations import Location
from midstream.interleaving.replacing import Replacing
from midstream.interleaving.structure import flatten
from midstream.modeling.vllm.engine.parallel.agreement import Group
from midstream.modeling.vllm.engine.parallel.sharding import SAME, Kind, Layout
from midstream.modeling.vllm.engine.parallel.tensor_layouts import Layouts, Leaf
from midstream.modeling.vllm.engine.parallel.tensor_rules import Rule, rules

TOKENS = 3


@dataclass
class Seen:
    """One tensor that the forward showed.

    Attributes:
        location, index: where.
        number: which of the location's tensors it is.
        tensor: it; held, so that its memory is not another's.
        digest: of what was in it then; 0 if all its numbers are one.
        kind: how it is divided, once that is known.
    """

    location: Location
    index: int
    number: int
    tensor: torch.Tensor
    digest: int
    kind: Kind | None = None

    @property
    def place(self) -> tuple[int, tuple[int, ...], torch.Size]:
        """Its memory, as it is looked at."""
        return self.tensor.data_ptr(), self.tensor.stride(), self.tensor.shape


class Survey:
    """What one forward shows.

    Args:
        modules: the model's modules by path.
        group: the ranks.
        heads: heads of keys in the whole model.
    """

    def __init__(self, modules: Mapping[str, torch.nn.Module], group: Group, heads: int):
        self._modules, self._group, self._heads = modules, group, heads
        self._seen: dict[Location, list[Seen]] = {}
        self._counts: dict[Location, int] = {}
        self._replacing = Replacing(modules, self._watched)

    def watch(self) -> None:
        """Have all modules show what they are called with and return, until ``done``."""
        for path in filter(None, self._modules):  # the root's is the caller's
            self._replacing.replace(path)

    def done(self) -> None:
        """Leave the modules as they were."""
        self._replacing.restore()

    def _watched(self, path: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        fills = _fills_cache(self._modules[path])

        def watched(*args: Any, **kwargs: Any) -> Any:
            self.note(Location(path, "input"), (args, kwargs))
            value = forward(*args, **kwargs)
            if fills:
                self._make_up(value)
            self.note(Location(path, "output"), value)
            return value

        return watched

    def _make_up(self, value: Any) -> None:
        """Numbers for what attention returns: without a cache it has computed none."""
        maker = torch.Generator().manual_seed(1 + self._group.rank)
        for leaf in flatten(value)[0]:
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
                leaf.copy_(torch.randn(leaf.shape, generator=maker))

    def note(self, location: Location, value: Any) -> None:
        """Keep what is at a location, the first time."""
        if location in self._seen:
            return
        leaves = flatten(value)[0]
        tensors = [(i, leaf) for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self._counts[location] = len(leaves)
        self._seen[location] = [
            Seen(location, index, number, leaf, _digest(leaf))
            for number, (index, leaf) in enumerate(tensors)
        ]

    def layouts(self) -> Layouts:
        """What follows from it, once the forward has run on all ranks."""
        seen = [each for several in self._seen.values() for each in several]
        self._compare(seen)
        self._follow([each for each in seen if each.kind is None and each.digest])
        found = Layouts()
        for location, several in self._seen.items():
            leaves = {each.index: Leaf(each.tensor.shape, each.kind) for each in several}
            found.put(location, self._counts[location], leaves)
        return found

    def _compare(self, seen: Sequence[Seen]) -> None:
        """What all ranks have alike is whole. Numbers that are all one tell nothing."""
        mine = {(*each.location, each.index): each.digest for each in seen}
        ranks = self._group.objects(mine)
        for each in seen:
            digests = {rank.get((*each.location, each.index)) for rank in ranks}
            if each.digest and digests == {each.digest}:
                each.kind = SAME

    def _follow(self, differing: list[Seen]) -> None:
        for each in differing:
            each.kind = self._by_rule(each)
        while True:
            known = [each for each in differing if each.kind is not None]
            unknown = [each for each in differing if each.kind is None]
            found = [(each, kind) for each in unknown if (kind := self._derived(each, known))]
            for each, kind in found:
                each.kind = kind
            if not found:
                return

    def _by_rule(self, each: Seen) -> Kind | None:
        for rule in self._rules(each.location.path):
            if rule.side == each.location.side:
                kind: Kind | None = rule.of(each.number, each.tensor)
                if kind is None and each.tensor.dim() == 3:
                    kind = _in_heads(rule, each)
                return kind
        return None

    def _rules(self, path: str) -> list[Rule]:
        parent = self._modules.get(path.rpartition(".")[0])
        return rules(self._modules[path], parent, self._group.size, self._heads)

    def _derived(self, each: Seen, known: Sequence[Seen]) -> Kind | None:
        for other in known:
            if other.place == each.place:
                return other.kind
        for other in known:
            if (kind := _stretch(each.tensor, other)) is not None:
                return kind
        return self._made(each)

    def _made(self, each: Seen) -> Kind | None:
        """What a module without parts of its own made, of what it was called with."""
        path, side, _ = each.location
        if side != "output" or next(self._modules[path].children(), None) is not None:
            return None
        inputs = self._seen.get(Location(path, "input"), [])
        given = [one for one in inputs if isinstance(one.kind, Layout)]
        alike = [one for one in given if one.tensor.shape == each.tensor.shape]
        before = [
            one
            for one in self._seen[each.location][: each.number]
            if one.tensor.shape == each.tensor.shape and one.kind is not SAME
        ]
        if len(before) < len(alike):
            return alike[len(before)].kind
        return _half(given, each.tensor)


def _fills_cache(module: torch.nn.Module) -> bool:
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    return isinstance(module, AttentionLayerBase)


def _digest(tensor: torch.Tensor) -> int:
    held = tensor.detach().cpu().contiguous()
    if tensor.is_floating_point() and (not held.numel() or bool((held == held.view(-1)[0]).all())):
        return 0
    return zlib.crc32(held.view(-1).view(torch.uint8).numpy().tobytes()) | 1 << 32


def _in_heads(rule: Rule, each: Seen) -> Kind | None:
    """The rule's layout for a tensor whose last axis is split into heads."""
    kind = rule.kinds[min(each.number, len(rule.kinds) - 1)]
    heads = kind.in_heads(each.tensor.shape[-1]) if isinstance(kind, Layout) else None
    return heads if heads is not None and heads.fits(each.tensor) else None


def _stretch(tensor: torch.Tensor, other: Seen) -> Layout | None:
    """The layout of a view into some columns of a tensor, perhaps split into heads."""
    kind, source = other.kind, other.tensor
    if not isinstance(kind, Layout) or kind.axis != -1 or source.dim() != 2:
        return None
    if tensor.untyped_storage().data_ptr() != source.untyped_storage().data_ptr():
        return None
    width = tensor[0].numel() if tensor.dim() > 1 and len(tensor) == len(source) else 0
    start = int(tensor.storage_offset()) - int(source.storage_offset())
    if not width or tensor.stride(0) != source.stride(0) or not _is_dense(tensor[0]):
        return None
    if start < 0 or start + width > source.shape[1]:
        return None
    found = kind.between(start, start + width)
    if found is None or tensor.dim() == 2:
        return found
    return found.in_heads(tensor.shape[-1]) if tensor.dim() == 3 else None


def _is_dense(row: torch.Tensor) -> bool:
    return row.is_contiguous()


def _half(given: Sequence[Seen], tensor: torch.Tensor) -> Layout | None:
    """Half of a fused gate and up: what an activation makes of them."""
    for one in given:
        kind = one.kind
        if not isinstance(kind, Layout) or len(kind.parts) != 2 or len(set(kind.parts)) != 1:
            continue
        half = Layout(kind.parts[:1], kind.ranks, kind.axis)
        if half.fits(tensor) and tensor.shape[:-1] == one.tensor.shape[:-1]:
            return half
    return None
