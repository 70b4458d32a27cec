"""What blocks append to a list in every step alike, read in their place and for all together.

The rows of a location are copied once for all requests, as for blocks that read themselves; what
is spared is to let each block execute, for each value, in each step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from midstream.errors import LimitExceededError
from midstream.interleaving.copies import Rows
from midstream.interleaving.events import Event
from midstream.interleaving.locations import Location
from midstream.interleaving.node import Node
from midstream.interleaving.snapshots import Storage
from midstream.interleaving.structure import flatten
from midstream.tracing.forms import READ, Gathering

if TYPE_CHECKING:
    from midstream.interleaving.interleaver import Interleaver
    from midstream.interleaving.run import Run


class Access(NamedTuple):
    """A module's output, or an item of it."""

    location: Location
    item: int | None


class Reads:
    """What one block's loop reads.

    Args:
        form: what the loop does.
        names: the block's names.

    Attributes:
        accesses: what is read, in the order in which it stands in what is appended; empty until
            the block has read it once itself.
        build: makes what is appended of the values.
    """

    def __init__(self, form: Gathering, names: Mapping[str, Any]):
        self._form, self._names = form, names
        self.accesses: tuple[Access, ...] = ()
        self.build: Callable[[list[Any]], Any] = list

    def learn(self, run: Run) -> None:
        """Take in what the loop reads; no other step can read anything else."""
        names = {**self._names, READ: _access}
        try:
            # an expression of names, items, lists and tuples, as `forms` has seen to
            found = eval(self._form.source, {"__builtins__": {}}, names)
            leaves, self.build = flatten(found)
        except Exception:  # noqa: BLE001  # the block will meet it at its own line
            leaves = []
        usable = leaves and all(isinstance(leaf, _Leaf) for leaf in leaves)
        self.accesses = tuple(leaf.access for leaf in leaves) if usable else ()

    @property
    def rows(self) -> list[Any] | None:
        """The list that is appended to; None if the name has become something else."""
        found = self._names.get(self._form.name)
        return found if type(found) is list else None


class _Leaf:
    """Stands for a value where its place in what is appended is looked for."""

    def __init__(self, access: Access):
        self.access = access


def _access(module: Any, item: int | None) -> Any:
    return _Leaf(Access(Location(module._path, "output"), item)) if type(module) is Node else None


@dataclass
class _Group:
    """Blocks that read the same.

    Attributes:
        found: each block's value, by what is read.
        columns: each block's copy of a leaf.
        loose: tensors in these that are not among the held ones, by block.
        held: memory of copies that may be dropped each for itself, and the bytes of a row in it.
        together: the memory of one of the other copies, and the bytes of a row in all of them:
            they go home, or are dropped, together.
    """

    runs: list[Run] = field(default_factory=list)
    found: dict[Access, Sequence[Any]] = field(default_factory=dict)
    columns: dict[tuple[Location, int], Sequence[Any]] = field(default_factory=dict)
    loose: dict[Run, list[torch.Tensor]] = field(default_factory=dict)
    held: list[tuple[Storage, int]] = field(default_factory=list)
    together: tuple[Storage, int] | None = None

    def take(self, access: Access, event: Event, value: Any, rows: Mapping[Run, Rows]) -> None:
        """Take in one location's copies."""
        spans = [rows[run] for run in self.runs]
        index = leaf_of(value, event, access.item)
        if index is not None:
            self.found[access] = self._column(access.location, event, index, spans, together=True)
            return
        columns = [
            self._column(access.location, event, index, spans, together=False)
            for index in range(len(event.leaves))
        ]
        leaves = zip(*columns, strict=True) if columns else [()] * len(spans)
        wholes = [event.built(list(each)) for each in leaves]
        item = access.item
        self.found[access] = wholes if item is None else [whole[item] for whole in wholes]

    def _column(
        self,
        location: Location,
        event: Event,
        index: int,
        spans: Sequence[Rows],
        *,
        together: bool,
    ) -> Sequence[Any]:
        """Each block's copy of one leaf, made and counted once."""
        known = self.columns.get((location, index))
        if known is not None:
            return known
        column = self.columns[location, index] = event.columns(index, spans)
        held = event.held(index)
        if held is not None and together:
            before = self.together[1] if self.together is not None else 0
            self.together = (held[0], before + held[1])
        elif held is not None:
            self.held.append(held)
        elif isinstance(event.leaves[index], torch.Tensor):
            for run, tensor in zip(self.runs, column, strict=True):
                self.loose.setdefault(run, []).append(tensor)
        return column


class Gatherings:
    """What a step reads in blocks' places.

    Args:
        interleaver: the model's steps.
    """

    def __init__(self, interleaver: Interleaver):
        self._interleaver = interleaver
        self._groups: dict[tuple[Access, ...], _Group] = {}
        self._wanted: dict[Location, dict[Access, list[_Group]]] = {}

    def take(self, run: Run, reads: Reads) -> bool:
        """Whether what a block would read in the step that begins will be read in its place."""
        if not reads.accesses or reads.rows is None:
            return False
        group = self._groups.get(reads.accesses)
        if group is None:
            group = self._groups[reads.accesses] = _Group()
            for access in dict.fromkeys(reads.accesses):
                self._wanted.setdefault(access.location, {}).setdefault(access, []).append(group)
        group.runs.append(run)
        return True

    @property
    def locations(self) -> Sequence[Location]:
        """What is read in this step."""
        return list(self._wanted)

    def read(self, location: Location, value: Any) -> None:
        """Copy the rows of a location."""
        wanted = self._wanted.pop(location, None)
        if not wanted:
            return
        runs = {run: None for groups in wanted.values() for group in groups for run in group.runs}
        rows = self._interleaver.rows
        event = self._interleaver.event(location, value, [rows[run] for run in runs])
        for access, groups in wanted.items():
            for group in groups:
                try:
                    group.take(access, event, value, rows)
                except Exception as error:  # noqa: BLE001  # no memory left, say: never the engine's
                    for run in group.runs:
                        run.refuse(error)

    def finish_step(self) -> None:
        """Append what was read to the blocks' lists."""
        for accesses, group in self._groups.items():
            if any(access not in group.found for access in accesses):
                continue  # a location that the step did not reach, or an error
            columns = [group.found[access] for access in accesses]
            held = group.held if group.together is None else [*group.held, group.together]
            for run, values in zip(group.runs, zip(*columns, strict=True), strict=True):
                if run.error is None:
                    _append(run, list(values), held, group.loose.get(run, ()))
        self._groups.clear()
        self._wanted.clear()

    @property
    def left(self) -> Iterator[tuple[Location, Run]]:
        """What the step did not get to, with who reads it."""
        for location, wanted in self._wanted.items():
            for groups in wanted.values():
                yield from ((location, run) for group in groups for run in group.runs)


def _append(
    run: Run,
    values: list[Any],
    held: Sequence[tuple[Storage, int]],
    loose: Sequence[torch.Tensor],
) -> None:
    reads = run.habit
    rows = reads.rows if isinstance(reads, Reads) else None
    if rows is None or not isinstance(reads, Reads):
        return
    try:
        run.snapshots.hold(held, 1)
        run.snapshots.add(loose)
    except LimitExceededError as error:
        run.refuse(error)
    else:
        rows.append(reads.build(values))


def leaf_of(value: Any, event: Event, item: int | None) -> int | None:
    """Which leaf an access is; None if it is none, as a whole tuple or an item of a tensor.

    Raises:
        IndexError, KeyError: there is no such item.
    """
    leaves = event.leaves
    if item is None or isinstance(value, torch.Tensor):
        return 0 if item is None and len(leaves) == 1 and leaves[0] is value else None
    found = value[item]
    if isinstance(value, tuple | list) and len(value) == len(leaves):  # most are flat
        index = range(len(leaves))[item]
        if leaves[index] is found:
            return index
    return next((index for index, leaf in enumerate(leaves) if leaf is found), None)
