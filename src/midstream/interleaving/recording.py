"""Recording a request's rows of many modules into a cache, beside whatever blocks do."""

from __future__ import annotations

import re
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from midstream.interleaving.caches import Cache
from midstream.interleaving.copies import Rows, counting_edits, cut, row_axis
from midstream.interleaving.locations import Location
from midstream.interleaving.node import Node, Tree
from midstream.interleaving.snapshots import Snapshots
from midstream.interleaving.structure import PLAIN, flatten

if TYPE_CHECKING:
    from midstream.interleaving.run import Run


@dataclass(frozen=True)
class Wanted:
    """What a cache records, and in what form.

    Attributes:
        paths: the modules.
        sides: "input" and "output", or one of them.
        device: where values are kept; None leaves them where they are.
        dtype: what floating-point values are converted to; None leaves them as they are.
        non_blocking: copy to the CPU beside the forward, into page-locked memory.
    """

    paths: tuple[str, ...]
    sides: frozenset[str]
    device: torch.device | None = None
    dtype: torch.dtype | None = None
    non_blocking: bool = False


def open_cache(run: Run, tree: Tree, modules: Any, wanted: dict[str, Any]) -> Cache:
    """Begin to record for a block, in this step and all later ones of its request.

    Args:
        modules: nodes or paths, one or several; None for all.
        wanted: the other fields of ``Wanted``.

    Raises:
        ValueError: the block has met the forward already, or a module is not in the model.
    """
    interleaver = run.interleaver
    if run.marks is not None or interleaver is None or not interleaver.in_step:
        where = f" (line {run.marks.line} has)" if run.marks is not None else ""
        raise ValueError(
            "`tracer.cache()` has to be opened before the block reads or writes anything"
            f"{where}: what the model has passed cannot be recorded any more."
        )
    paths = _paths(tree, modules)
    cache = Cache(aliases=_aliases(tree, paths))
    run.recorders.append(Recorder(cache, Wanted(tuple(paths), **wanted), run.snapshots))
    return cache


def _paths(tree: Tree, modules: Any) -> list[str]:
    if modules is None:
        return list(tree.nodes)
    one = isinstance(modules, str | Node) or not isinstance(modules, Iterable)
    several = [modules] if one else list(modules)
    nodes = [called for module in several for called in _called(_node(tree, module))]
    return list(dict.fromkeys(node.path for node in nodes))


def _called(node: Node) -> list[Node]:
    """The node; in place of a list of modules, which no model calls, the modules in it."""
    listed = isinstance(node._module, torch.nn.ModuleList | torch.nn.ModuleDict)
    return [inner for child in node for inner in _called(child)] if listed else [node]


def _node(tree: Tree, module: Any) -> Node:
    if isinstance(module, Node):
        return module
    if not isinstance(module, str):
        raise TypeError(
            "`tracer.cache(modules=...)` takes modules and their paths; "
            f"got {type(module).__name__}."
        )
    for path in (module, module.removeprefix("model.")):
        node = _below(tree.root, path)
        if node is not None:
            return node
    raise ValueError(f"`tracer.cache()`: the model has no module '{module}'.")


def _below(node: Node | None, path: str) -> Node | None:
    for part in path.split("."):
        node = node and (node._children.get(part) or node._aliases.get(part))
    return node


def _aliases(tree: Tree, paths: Iterable[str]) -> dict[str, str]:
    """Names, other than their own path, of the modules and of those around them."""
    around = {path[: at.start()] for path in paths for at in re.finditer(r"\.|$", path)}
    return {name: path for name, path in tree.other_names.items() if path in around}


class Recorder:
    """Fills one cache, for as long as the block, or its caller, can still read it."""

    def __init__(self, cache: Cache, wanted: Wanted, snapshots: Snapshots):
        self._cache, self._wanted = weakref.ref(cache), wanted
        self._snapshots = snapshots
        self._pending = False
        if wanted.non_blocking:
            cache._settle = self.settle  # type: ignore[assignment]

    @property
    def paths(self) -> tuple[str, ...]:
        """The modules it records."""
        return self._wanted.paths

    @cached_property
    def locations(self) -> frozenset[Location]:
        """What it records."""
        return frozenset(
            Location(path, side) for path in self._wanted.paths for side in self._wanted.sides
        )

    @property
    def open(self) -> bool:
        """Whether somebody holds the cache."""
        return self._cache() is not None

    def take(self, location: Location, value: Any, rows: Rows, sizes: Sequence[int]) -> None:
        """Keep a copy of one request's rows.

        Args:
            value: what the module was called with (``(args, kwargs)``) or returned.
            sizes: lengths along which a tensor counts as one row a token.

        Raises:
            LimitExceededError: the block would hold too much.
        """
        cache = self._cache()
        if cache is None or location.side not in self._wanted.sides:
            return
        leaves, build = flatten(value)
        copies = [self._kept(leaf, rows, sizes) for leaf in leaves]
        self._snapshots.add(copies)
        kept = build(copies)
        side = "inputs" if location.side == "input" else location.side
        cache.visits.setdefault(location.path, {}).setdefault(side, []).append(kept)

    def _kept(self, leaf: Any, rows: Rows, sizes: Sequence[int]) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf if isinstance(leaf, PLAIN) else None
        wanted = self._wanted
        own = cut(leaf, row_axis(leaf, sizes), rows.start, rows.stop).detach()
        beside = wanted.non_blocking and own.is_cuda
        self._pending |= beside
        with counting_edits():
            return own.to(
                device=wanted.device or own.device,
                dtype=wanted.dtype if wanted.dtype and own.is_floating_point() else own.dtype,
                non_blocking=beside,
                copy=True,
            )

    def settle(self) -> None:
        """Wait for copies that are under way."""
        if self._pending:
            torch.cuda.synchronize()
            self._pending = False


class Recordings(dict[str, list["tuple[Run, Recorder]"]]):
    """The recorders of one step, by the path of the module.

    Attributes:
        locations: what is recorded.
    """

    def __init__(self) -> None:
        super().__init__()
        self.locations: set[Location] = set()

    def clear(self) -> None:
        """The step has ended."""
        super().clear()
        self.locations.clear()

    def add(self, run: Run) -> None:
        """Take in what a block records."""
        for recorder in run.recorders:
            run.visited |= recorder.locations
            self.locations |= recorder.locations
            for path in recorder.paths:
                self.setdefault(path, []).append((run, recorder))

    def runs(self, path: str) -> list[Run]:
        """The blocks that record a module."""
        return [run for run, _ in self[path]]

    def keep(
        self,
        location: Location,
        value: Any,
        rows: Mapping[Run, Rows],
        sizes: Sequence[int],
        hidden: Collection[Run] = (),
    ) -> None:
        """Let the recorders take a value.

        Args:
            rows, sizes: as in ``Interleaver.phase``.
            hidden: blocks for whose request the module did not run.
        """
        for run, recorder in self[location.path]:
            if run in hidden:
                continue
            try:
                recorder.take(location, value, rows[run], sizes)
            except Exception as error:  # noqa: BLE001  # no memory left is the block's error, never the engine's
                run.fail(error)
