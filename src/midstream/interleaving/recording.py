"""Recording a request's rows of many modules into a cache, beside whatever blocks do."""

from __future__ import annotations

import re
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from midstream.errors import LimitExceededError
from midstream.interleaving.batches import Call, Form, Kept
from midstream.interleaving.caches import Cache
from midstream.interleaving.copies import Rows
from midstream.interleaving.locations import Location
from midstream.interleaving.node import Node, Tree
from midstream.interleaving.shares import Share, Sheet, Unseen
from midstream.interleaving.snapshots import Snapshots

if TYPE_CHECKING:
    from midstream.interleaving.declared import Declared
    from midstream.interleaving.mirroring import Mirroring
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
        detach: take values out of the graph of gradients.
        only: the locations that were declared; None where all are served.
    """

    paths: tuple[str, ...]
    sides: frozenset[str]
    device: torch.device | None = None
    dtype: torch.dtype | None = None
    non_blocking: bool = False
    detach: bool = True
    only: frozenset[Location] | None = None

    @property
    def form(self) -> Form:
        """In what form values are kept."""
        return Form(self.device, self.dtype, self.non_blocking, self.detach)

    @cached_property
    def locations(self) -> frozenset[Location]:
        """What is recorded."""
        found = frozenset(Location(path, side) for path in self.paths for side in self.sides)
        return found if self.only is None else found & self.only


def wanted(
    device: torch.device | str | None,
    *,
    include_output: bool,
    include_inputs: bool,
    **others: Any,
) -> dict[str, Any]:
    """The fields of ``Wanted`` beside the paths, from the arguments of `tracer.cache`."""
    sides = {"output": include_output, "input": include_inputs}
    return {
        "sides": frozenset(side for side, included in sides.items() if included),
        "device": None if device is None else torch.device(device),
        **others,
    }


def open_cache(run: Run, tree: Tree, modules: Any, wanted: dict[str, Any]) -> Cache:
    """Begin to record for a block, in this step and all later ones of its request.

    Args:
        modules: nodes or paths, one or several; None for all.
        wanted: the other fields of ``Wanted``.

    Raises:
        ValueError: the block has met the forward already, or a module is not in the model.
        OutOfOrderError: a module was not declared, on an engine with declared taps.
    """
    interleaver = run.interleaver
    if run.marks is not None or interleaver is None or not interleaver.in_step:
        where = f" (line {run.marks.line} has)" if run.marks is not None else ""
        raise ValueError(
            "`tracer.cache()` has to be opened before the block reads or writes anything"
            f"{where}: what the model has passed cannot be recorded any more."
        )
    paths = _paths(tree, modules)
    asked = Wanted(tuple(paths), **wanted)
    if interleaver.declared is not None:
        asked = _declared(asked, interleaver.declared, chosen=modules is not None)
    cache = Cache({}, _aliases(tree, asked.paths))
    recorder = Recorder(cache, asked, run.snapshots)
    # of several processes, each would see at another time that nobody holds it
    recorder.stays_open = interleaver.across is not None
    run.recorders.append(recorder)
    return cache


def _declared(wanted: Wanted, declared: Declared, *, chosen: bool) -> Wanted:
    """What a cache records where locations were declared."""
    only = declared.recorded(sorted(wanted.locations), chosen=chosen)
    there = {location.path for location in only}
    paths = tuple(path for path in wanted.paths if path in there)
    return replace(wanted, paths=paths, only=only)


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
        unseen = Unseen(snapshots)
        cache._follow(unseen)
        self._cache, self._unseen = weakref.ref(cache), weakref.ref(unseen)
        self.wanted, self.snapshots = wanted, snapshots
        self.stays_open = False

    @property
    def open(self) -> bool:
        """Whether somebody holds the cache, or it is taken to be held."""
        return self.stays_open or self._cache() is not None

    def expect(self, share: Share) -> None:
        """Take part in what a sheet is going to keep."""
        unseen = self._unseen()
        if unseen is not None:
            unseen.shares.append(share)

    def settle(self, *, may_travel: bool = False) -> bool:
        """Put all that was recorded into the cache, which is to leave the engine.

        Args:
            may_travel: not if copies of all of it are sent home in another way.

        Returns:
            Whether they are.
        """
        cache, unseen = self._cache(), self._unseen()
        if may_travel and unseen is not None and unseen.parts():
            return True
        if cache is not None and unseen is not None:
            unseen.settle(cache.__dict__["visits"])
        return False


class Member(NamedTuple):
    """Who records."""

    run: Run
    recorder: Recorder


class Batch:
    """Caches that are filled with the same copies, for some locations of a step.

    Args:
        members: in the order of their rows.
        mirroring: is told of the copies.
    """

    def __init__(
        self,
        members: Sequence[Member],
        rows: Mapping[Run, Rows],
        form: Form,
        mirroring: Mirroring | None = None,
    ):
        spans = [rows[member.run] for member in members]
        self._mirroring = mirroring if form.device == torch.device("cpu") else None
        stays = self._mirroring is not None and self._mirroring.takes_caches
        self._sheet, self._rows = Sheet(spans, form._replace(stays=stays)), rows
        self._form = form
        self._runs: frozenset[Run] = frozenset()
        self._members: list[tuple[Member, Share]] = []
        self._counted = 0  # bytes of the largest member that its block's limit knows of
        for member, span, place in zip(members, spans, self._sheet.spans.places, strict=True):
            share = Share(self._sheet, place, span.stop - span.start)
            member.recorder.expect(share)
            self._members.append((member, share))
        self._grain = min(member.recorder.snapshots.grain for member in members)

    def keep(self, location: Location, number: int, call: Call) -> None:
        """Copy the members' rows of a value."""
        if not any(member.recorder.open for member, _ in self._members):
            return
        kept = self._add(location, number, call)
        if self._mirroring is not None and self._sheet.form.stays:
            if len(self._runs) != len(self._members):
                self._runs = frozenset(member.run for member, _ in self._members)
            kept.send(self._mirroring, self._runs)
        size = self._sheet.bytes_of(self._sheet.spans.most)
        if size - self._counted > self._grain:
            self._counted = size
            self._count()

    def _add(self, location: Location, number: int, call: Call) -> Kept:
        try:
            return self._sheet.add(location, number, call)
        except torch.OutOfMemoryError:
            if not self._sheet.form.stays:
                raise
            self._sheet.form = self._form  # no room there: it goes where it is wanted, at once
            return self._sheet.add(location, number, call)

    def alone(self) -> list[Batch]:
        """The members one by one; none if it has only one."""
        members = self._members if len(self._members) > 1 else ()
        return [Batch([member], self._rows, self._form, self._mirroring) for member, _ in members]

    def fail(self, error: Exception) -> None:
        """Let the members' blocks fail."""
        for member, _ in self._members:
            member.run.fail(error)

    def end(self) -> None:
        """The step has ended."""
        self._sheet.ended = True
        self._count()

    def _count(self) -> None:
        for each in list(self._members):
            member, share = each
            try:
                share.count(member.recorder.snapshots)
            except LimitExceededError as error:
                self._members.remove(each)
                member.run.fail(error)


class Group(NamedTuple):
    """Blocks that record the same in the same form."""

    wanted: Wanted
    members: list[Member]
    runs: list[Run]


class Recordings(dict[str, list[Group]]):
    """The recorders of one step, by the path of the module.

    Attributes:
        locations: what is recorded.
        mirroring: is told of the copies, if anybody is.
    """

    def __init__(self) -> None:
        super().__init__()
        self.mirroring: Mirroring | None = None
        self.locations: set[Location] = set()
        self._groups: dict[Wanted, Group] = {}
        self._numbers = count()
        self._begin_phase({})
        self._begun: list[Batch] = []

    def _begin_phase(self, rows: Mapping[Run, Rows]) -> None:
        self._rows = rows
        self._batches: dict[Any, list[Batch]] = {}

    def clear(self) -> None:
        """The step has ended."""
        begun, self._begun = self._begun, []
        for batch in begun:
            batch.end()
        super().clear()
        self.locations.clear()
        self._groups.clear()
        self._begin_phase({})

    def add(self, run: Run) -> None:
        """Take in what a block records."""
        for recorder in run.recorders:
            wanted = recorder.wanted
            group = self._groups.get(wanted) or self._new_group(wanted)
            group.members.append(Member(run, recorder))
            group.runs.append(run)
            run.visited |= group.wanted.locations

    def _new_group(self, wanted: Wanted) -> Group:
        group = self._groups[wanted] = Group(wanted, [], [])
        self.locations |= wanted.locations
        for path in wanted.paths:
            self.setdefault(path, []).append(group)
        return group

    def runs(self, path: str) -> list[Run]:
        """The blocks that record a module."""
        groups = self[path]
        return groups[0].runs if len(groups) == 1 else [run for each in groups for run in each.runs]

    def keep(
        self,
        location: Location,
        value: Any,
        rows: Mapping[Run, Rows],
        sizes: Sequence[int],
        hidden: Collection[Run] = (),
    ) -> None:
        """Let the recorders take a value: copied once for all that want it in the same form.

        Args:
            rows, sizes: as in ``Interleaver.phase``.
            hidden: blocks for whose request the module did not run.
        """
        groups = [group for group in self[location.path] if _records(group.wanted, location)]
        if groups:
            call = Call.of(value, sizes)
            for batch in self._of(groups, rows, hidden):
                self._keep(batch, location, call)

    def _keep(self, batch: Batch, location: Location, call: Call) -> None:
        try:
            batch.keep(location, next(self._numbers), call)
        except Exception as error:  # noqa: BLE001  # no memory left is the block's error, never the engine's
            several = self._begin(batch.alone())
            for one in several:
                self._keep(one, location, call)
            if not several:
                batch.fail(error)

    def _of(
        self, groups: Sequence[Group], rows: Mapping[Run, Rows], hidden: Collection[Run]
    ) -> list[Batch]:
        """The batches of some groups, without the hidden blocks."""
        if rows is not self._rows:
            self._begin_phase(rows)
        key = (*map(id, groups), frozenset(hidden))
        if key not in self._batches:
            self._batches[key] = self._begin(list(_batches(groups, rows, hidden, self.mirroring)))
        return self._batches[key]

    def _begin(self, batches: list[Batch]) -> list[Batch]:
        self._begun += batches
        return batches


def _records(wanted: Wanted, location: Location) -> bool:
    if location.side not in wanted.sides:
        return False
    return wanted.only is None or location in wanted.only


def _batches(
    groups: Iterable[Group],
    rows: Mapping[Run, Rows],
    hidden: Collection[Run],
    mirroring: Mirroring | None,
) -> Iterable[Batch]:
    forms: dict[Form, list[Member]] = {}
    for group in groups:
        seeing = [member for member in group.members if member.run not in hidden]
        forms.setdefault(group.wanted.form, []).extend(seeing)
    for form, members in forms.items():
        for several in _together(members, rows):
            yield Batch(several, rows, form, mirroring)


def _together(members: list[Member], rows: Mapping[Run, Rows]) -> Iterable[list[Member]]:
    """Members that may share copies.

    Not those with the same rows: what is written into one cache must not be in another. And not
    those with far more or fewer rows: copies live until the last member is done with them, so that
    one token of one request would keep another's whole prompt.
    """
    found: dict[int, list[list[Member]]] = {}
    for member in sorted(members, key=lambda member: rows[member.run].start):
        span = rows[member.run]
        alike = found.setdefault((span.stop - span.start).bit_length(), [])
        for several in alike:
            if rows[several[-1].run].stop <= span.start:
                several.append(member)
                break
        else:
            alike.append([member])
    return [several for alike in found.values() for several in alike]
