"""One forward on random tokens, when a model has been loaded: which tensors are divided, and how.

What all ranks have alike is whole. Of what differs, vLLM's own linear layers and attention are
known (`tensor_rules`), and what lies between them follows from these: the same memory under
another name, a stretch of it, or what a module without weights made of it in the same shape.
What remains is not known, and no block is given it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from midstream.interleaving.copies import Rows
from midstream.interleaving.events import Check
from midstream.interleaving.interleaver import Interleaver
from midstream.interleaving.locations import Location
from midstream.interleaving.run import Run
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
    def place(self) -> tuple[Any, ...]:
        """Its memory, as it is looked at."""
        return self.tensor.data_ptr(), self.tensor.stride(), self.tensor.shape


class Watching(Interleaver):
    """Accompanies a forward without blocks: shows what is at all locations.

    Args:
        modules: the model's modules by path.
        show: called with each location and its value.
        operations: whether those inside forwards are locations too.
    """

    def __init__(
        self,
        modules: Mapping[str, torch.nn.Module],
        show: Callable[[Location, Any], None],
        *,
        operations: bool,
    ):
        super().__init__(modules)
        self._show = show
        self._observing = self.order.learning = True
        self.sources.wanted.update(filter(None, modules) if operations else ())

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While the forward runs; the root's own is the caller's."""
        for path in filter(None, self._modules):
            self.replacing.replace(path)
        try:
            yield
        finally:
            self.replacing.restore()

    def hand_over(
        self,
        location: Location,
        value: Any,
        rows: Mapping[Run, Rows] | None = None,
        sizes: Sequence[int] = (),
        check: Check | None = None,
    ) -> Any:
        """Show a value, which the model goes on with."""
        self._show(location, value)
        return value


class Survey:
    """What one forward shows.

    Args:
        modules: the model's modules by path.
        group: the ranks.
        heads: heads of keys in the whole model.
    """

    def __init__(self, modules: Mapping[str, torch.nn.Module], group: Group, heads: int):
        self._modules, self._group, self._heads = modules, group, heads
        self._attention = {path for path, module in modules.items() if _fills_cache(module)}
        self._seen: dict[Location, list[Seen]] = {}
        self._counts: dict[Location, int] = {}
        self._kinds: dict[tuple[Any, ...], Kind] = {}
        self._sources: dict[int, list[Seen]] = {}

    def note(self, location: Location, value: Any) -> None:
        """Keep what is at a location, the first time."""
        if location.path in self._attention and location.side == "output":
            self._make_up(value)
        if location in self._seen:
            return
        leaves = flatten(value)[0]
        tensors = [(i, leaf) for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self._counts[location] = len(leaves)
        self._seen[location] = [
            Seen(location, index, number, leaf, _digest(leaf))
            for number, (index, leaf) in enumerate(tensors)
        ]

    def _make_up(self, value: Any) -> None:
        """Numbers for what attention returns: without a cache it has computed none."""
        maker = torch.Generator().manual_seed(1 + self._group.rank)
        for leaf in flatten(value)[0]:
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
                leaf.copy_(torch.randn(leaf.shape, generator=maker))

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
        """Rules first; then what follows from what is known, as long as anything does."""
        found = [each for each in differing if self._know(each, self._by_rule(each))]
        while found:
            unknown = [each for each in differing if each.kind is None]
            found = [each for each in unknown if self._know(each, self._derived(each))]

    def _know(self, each: Seen, kind: Kind | None) -> bool:
        each.kind = kind
        if kind is None:
            return False
        self._kinds.setdefault(each.place, kind)
        if isinstance(kind, Layout) and kind.axis == -1 and each.tensor.dim() == 2:
            memory = each.tensor.untyped_storage().data_ptr()
            self._sources.setdefault(memory, []).append(each)
        return True

    def _by_rule(self, each: Seen) -> Kind | None:
        if each.location.within is not None:
            return None
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

    def _derived(self, each: Seen) -> Kind | None:
        if each.place in self._kinds:
            return self._kinds[each.place]
        for other in self._sources.get(each.tensor.untyped_storage().data_ptr(), ()):
            if (kind := _stretch(each.tensor, other)) is not None:
                return kind
        return self._made(each) if each.location.within is None else None

    def _made(self, each: Seen) -> Kind | None:
        """What a module without weights to multiply by made, of what it was called with."""
        path, side, _ = each.location
        if side != "output" or _mixes(self._modules[path]):
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


def _mixes(module: torch.nn.Module) -> bool:
    """Whether what a module returns may be mixed from all of a row it is called with."""
    has_parts = next(module.children(), None) is not None
    return has_parts or any(weight.dim() > 1 for weight in module.parameters(recurse=False))


def _digest(tensor: torch.Tensor) -> int:
    held = tensor.detach().cpu().contiguous().view(-1)
    if tensor.is_floating_point() and (not held.numel() or bool((held == held[0]).all())):
        return 0
    return zlib.crc32(held.view(torch.uint8).numpy().tobytes()) | 1 << 32


def _in_heads(rule: Rule, each: Seen) -> Kind | None:
    """The rule's layout for a tensor whose last axis is split into heads."""
    kind = rule.kinds[min(each.number, len(rule.kinds) - 1)]
    heads = kind.in_heads(each.tensor.shape[-1]) if isinstance(kind, Layout) else None
    return heads if heads is not None and heads.fits(each.tensor) else None


def _stretch(tensor: torch.Tensor, other: Seen) -> Layout | None:
    """The layout of a view into some columns of a tensor, perhaps split into heads."""
    kind, source = other.kind, other.tensor
    if not isinstance(kind, Layout) or tensor.dim() not in (2, 3) or len(tensor) != len(source):
        return None
    start = int(tensor.storage_offset()) - int(source.storage_offset())
    width = tensor[0].numel()
    if tensor.stride(0) != source.stride(0) or not tensor[0].is_contiguous():
        return None
    if tensor.dtype != source.dtype or start < 0 or start + width > source.shape[1]:
        return None
    found = kind.between(start, start + width)
    if found is None or tensor.dim() == 2:
        return found
    return found.in_heads(tensor.shape[-1])


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
