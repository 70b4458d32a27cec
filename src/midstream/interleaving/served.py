"""One hand-over as one block sees it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from midstream.interleaving.copies import Edit, Rows
from midstream.interleaving.locations import Location
from midstream.interleaving.snapshots import Snapshots, Storage
from midstream.interleaving.structure import describe, flatten, same_shape

if TYPE_CHECKING:
    from midstream.interleaving.events import Event
    from midstream.interleaving.replays import WriteLog

Misfit = Callable[[str, Any, Any], str]
"""Text for a value that does not fit: of where, what was given, and what was expected."""


class Bundle(NamedTuple):
    """One request's copies of all leaves.

    Attributes:
        held: the memory of each tensor's copy, and the bytes of a row in it.
        counted: whether all leaves are tensors whose version counters tell of every edit.
    """

    leaves: list[Any]
    held: Sequence[tuple[Storage, int]]
    counted: bool


_version_of = attrgetter("_version")


class Served:
    """One event as one block sees it: its rows, and the way back for what it changes.

    Attributes:
        replaced: leaves in whose place the block has given the model another tensor.
        wrote: whether the block has changed what the model goes on with.
    """

    # Here and not set for each: there may be thousands of them in a step, and most are only read.
    _mine: list[Any] | None = None
    _shown: Any = None
    _versions: list[int] = []  # noqa: RUF012  # set when it is read
    _assigned: Mapping[int, torch.Tensor] = MappingProxyType({})
    _refused: Mapping[int, int] = MappingProxyType({})
    _counted = False
    replaced: tuple[int, ...] = ()
    wrote = False

    def __init__(
        self,
        event: Event,
        rows: Rows,
        build: Any,
        snapshots: Snapshots,
        location: Location,
        log: WriteLog | None,
    ):
        self._event, self._rows, self._build = event, rows, build
        self._snapshots, self._location, self._log = snapshots, location, log

    def read(self) -> Any:
        """The block's private copy; the same object at every read of this visit.

        Raises:
            LimitExceededError: the block would hold too much.
        """
        if self._mine is None:
            bundle = None if self._assigned else self._event.bundle(self._rows)
            mine = self._read_leaves() if bundle is None else bundle.leaves
            if bundle is not None:
                self._snapshots.hold(bundle.held, self._rows.stop - self._rows.start)
                self._counted = bundle.counted
            self._mine = mine
            self._versions = list(map(_version_of if self._counted else _version, mine))
            self._shown = self._build(mine)
        return self._shown

    @property
    def event(self) -> Event:
        """What it is one view of."""
        return self._event

    @property
    def is_as_read(self) -> bool:
        """Whether it can be seen at once that the block has changed nothing."""
        if self._mine is None:
            return not self._assigned
        return self._counted and list(map(_version_of, self._mine)) == self._versions

    @property
    def is_changed(self) -> bool:
        """Whether the block has changed something that was not taken back yet; or may have."""
        if self.is_as_read:
            return False
        if self._assigned or self._event.has_items:
            return True
        return any(
            isinstance(mine, torch.Tensor) and self._changed(index, mine)
            for index, mine in enumerate(self._mine or ())
        )

    def _read_leaves(self) -> list[Any]:
        mine = [self._own(index) for index in range(len(self._event.leaves))]
        self._snapshots.add(mine)
        return mine

    def expected(self) -> Any:
        """The value as the model has it, for this request: what a replacement must look like."""
        event = self._event
        return self._build([event.live(i, self._rows) for i in range(len(event.leaves))])

    def write(self, value: Any, where: str, misfit: Misfit | None = None) -> None:
        """Replace the whole value.

        Args:
            misfit: makes the error's text, if it is to be another.

        Raises:
            ValueError: ``value`` has not the served structure and shapes.
        """
        self._write(value, self.expected(), where, misfit or _misfit)

    def read_first(self, visit: int) -> Any:
        """The first argument of an input: the first positional, else the first keyword one.

        Raises:
            ValueError: the module was called without arguments.
        """
        return _first_argument(self.read(), self._location, visit)

    def write_first(self, value: Any, visit: int) -> None:
        """Replace the first argument of an input only.

        Raises:
            ValueError: ``value`` has not the served structure and shapes.
        """
        first = _first_argument(self.expected(), self._location, visit)
        self._write(value, first, self._location.label(visit), _misfit_of_first)

    def _write(self, value: Any, expected: Any, where: str, misfit: Misfit) -> None:
        """Replace the leaves of what is expected, which come before all others."""
        if not same_shape(value, expected):
            raise ValueError(misfit(where, value, expected))
        for index, new in enumerate(flatten(value)[0]):
            self._write_leaf(index, new, where)

    def _write_leaf(self, index: int, new: Any, where: str) -> None:
        if not isinstance(new, torch.Tensor):
            return
        if self._mine is not None and new is self._mine[index]:
            return  # the block's own copy: what changed in it is copied back when it waits
        self._refuse_shared(index, where)
        live = self._event.live(index, self._rows)
        own = self._event.private(new, live)
        self._put(index, own, replace=True)
        self._assigned = {**self._assigned, index: own}
        if self._mine is None:
            return
        self._mine[index] = own
        self._versions[index] = own._version
        self._shown = self._build(self._mine)

    def _own(self, index: int) -> Any:
        """The block's own leaf: what it assigned before it read, else a copy.

        The copies are of the rows as they were when the first of the step's blocks read.
        """
        assigned = self._assigned.get(index)
        return self._event.copy(index, self._rows) if assigned is None else assigned

    def settle(self, visit: int) -> None:
        """Copy back what the block changed in place since it was served.

        A write that is refused is dropped: called again, this copies back what is left.

        Raises:
            ValueError: it changed a tensor that belongs to all requests of the step, or put
                another into a list or dictionary, where the model does not see it.
        """
        if self._mine is None:
            return
        if self._event.has_items:
            self._refuse_new_items(visit)
        changed = [  # all before the first write: leaves of the model may share memory
            (index, mine)
            for index, mine in enumerate(self._mine)
            if isinstance(mine, torch.Tensor) and self._changed(index, mine)
        ]
        for index, mine in changed:
            self._versions[index] = mine._version
            self._refused = {**self._refused, index: mine._version}
            self._refuse_shared(index, self._location.label(visit))
            self._put(index, self._event.bare(mine), replace=index in self._assigned)
            self._refused = {i: v for i, v in self._refused.items() if i != index}

    def _put(self, index: int, value: torch.Tensor, *, replace: bool) -> None:
        self.wrote = True
        event, edit = self._event, Edit(self._rows, value, self._location, replace, self._log)
        if not replace:
            event.edit(index, edit)
            return
        self.replaced = (*self.replaced, index)
        event.put(index, self._rows, value, replace=True)
        if event.keeps(self._log):
            event.keep(index, edit, value.clone())  # the block may go on to change its own

    def _refuse_new_items(self, visit: int) -> None:
        own = {id(leaf) for leaf in self._mine or ()}
        for leaf in flatten(self._shown)[0]:
            if isinstance(leaf, torch.Tensor) and id(leaf) not in own:
                self._shown = self._build(self._mine or [])
                side, where = self._location.side, self._location.label(visit)
                side = "inputs" if side == "input" else side
                raise ValueError(
                    f"A tensor {describe(leaf)} was put into the list or dictionary that "
                    f"{where} was read as, which the model does not see. Assign "
                    f"the whole value to `.{side}`, or write into its tensor: `value[:] = ...`."
                )

    def _changed(self, index: int, mine: torch.Tensor) -> bool:
        """Whether a copy was written to."""
        if mine._version != self._versions[index]:
            return True
        if self._refused.get(index) == mine._version:
            return False
        return self._event.is_changed(index, mine, self._rows)

    def _refuse_shared(self, index: int, where: str) -> None:
        if self._event.is_shared(index, self._rows):
            held = describe(self._event.leaves[index])
            raise ValueError(f"{where} holds a tensor {held} {self._event.shared_since}")


def _misfit(where: str, value: Any, expected: Any) -> str:
    return (
        f"{where} was assigned {describe(value)}, but the model goes on with "
        f"{describe(expected)}: a replacement must have the served shape. "
        "To change some rows, write into them: `value[rows] = ...`."
    )


def _misfit_of_first(where: str, value: Any, expected: Any) -> str:
    return (
        f"{where} was assigned {describe(value)}, but the module's first argument is "
        f"{describe(expected)}: a replacement must have the served shape."
    )


def _first_argument(
    arguments: tuple[tuple[Any, ...], dict[str, Any]], location: Location, visit: int
) -> Any:
    args, kwargs = arguments
    if args:
        return args[0]
    if kwargs:
        return next(iter(kwargs.values()))
    raise ValueError(
        f"{location.label(visit)} does not exist: the module was called without arguments. "
        "`.inputs` gives its (empty) arguments."
    )


def _version(leaf: Any) -> int:
    return leaf._version if isinstance(leaf, torch.Tensor) else 0
