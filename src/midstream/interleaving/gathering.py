"""What blocks append to a list in every step alike, read in their place and for all together.

The rows of a location are copied once for all requests, as for blocks that read themselves; what
is spared is to let each block execute, for each value, in each step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

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
        held: the memory of one of the copies, and the bytes of a row in all of them: they go home,
            or are dropped, together.
    """

    runs: list[Run] = field(default_factory=list)
    found: dict[Access, Sequence[Any]] = field(default_factory=dict)
    held: tuple[Storage, int] | None = None

    def take(self, access: Access, event: Event, index: int, rows: Mapping[Run, Rows]) -> None:
        """Take in one location's copies."""
        self.found[access] = event.columns(index, [rows[run] for run in self.runs])
        held = event.held(index)
        if held is not None:
            before = self.held[1] if self.held is not None else 0
            self.held = (held[0], before + held[1])


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
        try:
            event = self._interleaver.event(location, value, [rows[run] for run in runs])
            for access, groups in wanted.items():
                index = leaf_of(value, event, access.item)
                for group in groups:
                    group.take(access, event, index, rows)
        except Exception as error:  # noqa: BLE001  # no memory left, say: never the engine's
            for run in runs:
                run.fail(error)

    def finish_step(self) -> None:
        """Append what was read to the blocks' lists."""
        for accesses, group in self._groups.items():
            if any(access not in group.found for access in accesses):
                continue  # a location that the step did not reach, or an error
            columns = [group.found[access] for access in accesses]
            held = [group.held] if group.held is not None else []
            for run, values in zip(group.runs, zip(*columns, strict=True), strict=True):
                if run.error is None:
                    _append(run, list(values), held)
        self._groups.clear()
        self._wanted.clear()

    @property
    def left(self) -> Iterator[tuple[Location, Run]]:
        """What the step did not get to, with who reads it."""
        for location, wanted in self._wanted.items():
            for groups in wanted.values():
                yield from ((location, run) for group in groups for run in group.runs)


def _append(run: Run, values: list[Any], held: Sequence[tuple[Storage, int]]) -> None:
    reads = run.habit
    rows = reads.rows if isinstance(reads, Reads) else None
    if rows is None or not isinstance(reads, Reads):
        return
    try:
        run.snapshots.hold(held, 1)
    except LimitExceededError as error:
        run.fail(error)
    else:
        rows.append(reads.build(values))


def leaf_of(value: Any, event: Event, item: int | None) -> int:
    """Which leaf a form means: the value itself (or its only row), or an item of a flat tuple.

    Raises:
        ValueError: there is no such leaf.
    """
    count = len(event.leaves)
    if item is None and count == 1 and event.leaves[0] is value:
        return 0
    if item is not None and isinstance(value, tuple | list) and len(value) == count:
        return range(count)[item]
    raise ValueError("The value has another structure than when the block met it itself.")
