"""One hand-over between the forward pass and the blocks that wait for it.

A block gets a private copy of its own rows. When it waits again, rows it changed are copied back
into the tensor the model goes on with. The engine reuses its buffers (a fused add-norm rewrites
the residual stream in place), so a view handed out would later hold another layer's numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from midstream.interleaving.copies import Copies, Edit, Put, Rows, counting_edits, cut, row_axis
from midstream.interleaving.locations import Location
from midstream.interleaving.snapshots import Snapshots, Storage
from midstream.interleaving.structure import describe, flatten, same_shape

if TYPE_CHECKING:
    from midstream.interleaving.replays import WriteLog


Misfit = Callable[[str, Any, Any], str]
"""Text for a value that does not fit: of where, what was given, and what was expected."""
Check = Callable[[int, torch.Tensor, Rows], None]
"""Called with a leaf's place, a tensor and the request's rows; raises if it must not be there."""


class Event:
    """The live value of one location in one step.

    Args:
        value: what the module was called with (``(args, kwargs)``) or returned.
        sizes: lengths along which a tensor counts as one row a token (real, padded).
        spans: rows of the requests that wait here; copies are taken over their hull, once.
        check: refuses what must not be written.
        is_models: whether a tensor is the model's own, so that edits go into a copy of it.
        is_whole: whether a tensor is all of one that is the model's own, whose rows are no tokens.

    Attributes:
        writes: what blocks have written, in order; None if nobody keeps it.
        before_write: called with a tensor that is going to be written into.
    """

    def __init__(
        self,
        value: Any,
        sizes: Sequence[int],
        spans: Sequence[Rows],
        check: Check | None = None,
        is_models: Callable[[torch.Tensor], bool] | None = None,
        is_whole: Callable[[torch.Tensor], bool] | None = None,
    ):
        self.leaves, self._build = flatten(value)
        self._sizes, first = sizes, spans[0]
        self._low, self._high = first.start, first.stop
        self._spans = spans
        if len(spans) > 1:
            self._low = min(span.start for span in spans)
            self._high = max(span.stop for span in spans)
        self._copies: dict[int, Copies] = {}
        self._edits: dict[int, list[Edit]] = {}
        self._shapes: dict[tuple[int, int], torch.Size] = {}
        self._bundles: dict[Rows, Bundle] | None = None
        self._replaced: dict[int, dict[Rows, torch.Tensor]] = {}
        self._value = value
        self._check, self._is_models, self._is_whole = check, is_models, is_whole
        self._axes: dict[int, int | None] = {}
        self.has_items = not isinstance(value, torch.Tensor) and _has_items(value)
        self.writes: list[Put] | None = None
        self.before_write: Callable[[torch.Tensor], None] | None = None

    def axis(self, index: int) -> int | None:
        """The axis of a leaf that runs over the step's rows; None if it has none."""
        if index not in self._axes:
            leaf = self.leaves[index]
            axis = row_axis(leaf, self._sizes)
            if axis is not None and self._is_whole is not None and self._is_whole(leaf):
                axis = None
            self._axes[index] = axis
        return self._axes[index]

    def live(self, index: int, rows: Rows) -> Any:
        """A leaf's rows as the model goes on with them (tensors without a row axis: whole)."""
        replaced = self._replaced.get(index)
        if replaced and rows in replaced:
            return replaced[rows]
        leaf = self.leaves[index]
        return cut(leaf, self.axis(index), rows.start, rows.stop)

    def copy(self, index: int, rows: Rows) -> Any:
        """A private copy of a leaf's rows, outside inference mode so that edits are counted."""
        leaf = self.leaves[index]
        if not isinstance(leaf, torch.Tensor):
            return leaf
        axis = self.axis(index)
        if axis is None:
            with counting_edits():
                return leaf.clone()
        copies = self._copies.get(index)
        if copies is None:
            with counting_edits():
                hull = cut(leaf, axis, self._low, self._high).clone()
                copies = self._copies[index] = Copies(hull, axis, self._spans)
        return copies.rows(rows)

    def bundle(self, rows: Rows) -> Bundle | None:
        """A request's copies of all leaves; None if one cannot be made with the others'."""
        if self._bundles is None:
            self._bundles = self._bundled()
        return self._bundles.pop(rows, None)

    def _bundled(self) -> dict[Rows, Bundle]:
        """All requests' copies at once: one after the other they would take much longer."""
        columns: list[Sequence[Any]] = []
        held: list[tuple[Storage, int]] = []
        for index, leaf in enumerate(self.leaves):
            if not isinstance(leaf, torch.Tensor):
                columns.append([leaf] * len(self._spans))
                continue
            if self.axis(index) is None:
                return {}
            columns.append([self.copy(index, span) for span in self._spans])
            copies = self._copies[index]
            held.append((copies.storage, copies.row_bytes))
        if not columns:
            return {}
        counted = not self.has_items and all(map(_is_counted, self.leaves))
        return {
            span: Bundle(list(leaves), held, counted)
            for span, leaves in zip(self._spans, zip(*columns, strict=True), strict=True)
        }

    def edit(self, index: int, edit: Edit) -> None:
        """Take what a block changed in its copy of a leaf; ``flush`` writes it.

        All edits of an event are written together: a copy of its own for each of many requests
        takes longer than the model's own work.

        Raises:
            RuntimeError: the copy was given a shape that does not fit.
        """
        if self._check is not None:
            self._check(index, edit.value, edit.rows)
        shape = self._shape(index, edit.rows)
        if edit.value.shape != shape:  # once all are written together it is nobody's error
            edit = edit._replace(value=edit.value.expand(shape))
        self._edits.setdefault(index, []).append(edit)

    def _shape(self, index: int, rows: Rows) -> torch.Size:
        """Of a request's rows of a leaf."""
        count = rows.stop - rows.start
        if (index, count) not in self._shapes:
            self._shapes[index, count] = self.live(index, rows).shape
        return self._shapes[index, count]

    def flush(self) -> list[tuple[Rows, Exception]]:
        """Write what blocks have changed in place into what the model goes on with.

        Returns:
            The rows of edits that could not be written, with the reason.
        """
        failed: list[tuple[Rows, Exception]] = []
        for index, edits in sorted(self._edits.items()):
            copies = self._copies.get(index)
            try:
                together = copies is not None and copies.are_all(edits)
                self._write_edits(index, edits, copies if together else None)
            except Exception:  # noqa: BLE001  # no memory left, say: whose it is comes out below
                failed += self._one_by_one(index, edits)
        self._edits.clear()
        return failed

    def _write_edits(self, index: int, edits: Sequence[Edit], copies: Copies | None) -> None:
        if self._is_models is not None and self._is_models(self.leaves[index]):
            for edit in edits:
                self._replaced.setdefault(index, {})[edit.rows] = edit.value
        elif copies is not None:
            self._write(index, Rows(self._low, self._high), copies.hull)
        else:
            for edit in edits:
                self._write(index, edit.rows, edit.value)
        self._keep(index, edits, copies)

    def _one_by_one(self, index: int, edits: Sequence[Edit]) -> Iterator[tuple[Rows, Exception]]:
        for edit in edits:
            try:
                self._write_edits(index, [edit], None)
            except Exception as error:  # noqa: BLE001  # the block's, never the engine's
                yield edit.rows, error

    def _keep(self, index: int, edits: Sequence[Edit], copies: Copies | None) -> None:
        """Keep what was written for those who may write it again."""
        if self.writes is None and all(edit.log is None or edit.log.full for edit in edits):
            return
        kept = None if copies is None else copies.cloned()
        for edit in edits:
            value = edit.value.clone() if kept is None else kept.rows(edit.rows)
            self.keep(index, edit, value)

    def keep(self, index: int, edit: Edit, value: torch.Tensor) -> None:
        """Keep a value, which nobody changes any more, in the logs."""
        if self.writes is not None:
            self.writes.append(Put(index, edit.rows, value, edit.replace))
        if edit.log is not None:
            rows = edit.rows.stop - edit.rows.start
            edit.log.add(edit.location, index, rows, value, replace=edit.replace)

    def keeps(self, log: WriteLog | None) -> bool:
        """Whether anybody keeps what is written."""
        return self.writes is not None or (log is not None and not log.full)

    def put(self, index: int, rows: Rows, value: torch.Tensor, *, replace: bool) -> None:
        """Write a leaf's rows into what the model goes on with.

        Args:
            replace: give the model another tensor (its other holders keep theirs) instead of
                writing into the one it has.
        """
        if self._check is not None:
            self._check(index, value, rows)
        if not replace and self._is_models is not None:
            replace = self._is_models(self.leaves[index])
        if replace:
            self._replaced.setdefault(index, {})[rows] = value
            return
        self._write(index, rows, value)

    def _write(self, index: int, rows: Rows, value: torch.Tensor) -> None:
        leaf = self.leaves[index]
        if self.before_write is not None:
            self.before_write(leaf)
        with torch.inference_mode(leaf.is_inference()):
            cut(leaf, self.axis(index), rows.start, rows.stop).copy_(value)

    def result(self) -> Any:
        """The value the model goes on with.

        Replacements are made last: what others wrote in place is in the tensors they are made of,
        and in all that shares memory with these.
        """
        if not self._replaced:
            return self._value
        leaves = list(self.leaves)
        for index in self._replaced:
            leaves[index] = self._with_replaced(index)
        return self._build(leaves)

    def _with_replaced(self, index: int) -> torch.Tensor:
        leaf, axis = self.leaves[index], self.axis(index)
        with torch.inference_mode(leaf.is_inference()):
            new: torch.Tensor = leaf.clone()
            for rows, value in self._replaced[index].items():
                cut(new, axis, rows.start, rows.stop).copy_(value)
        return new

    def serve(
        self, rows: Rows, snapshots: Snapshots, location: Location, log: WriteLog | None = None
    ) -> Served:
        """The event as one request sees it.

        Args:
            snapshots: what it reads is counted here.
            location: where the event is.
            log: what it writes is kept here.
        """
        return Served(self, rows, self._build, snapshots, location, log)


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


def _is_counted(leaf: Any) -> bool:
    """Whether a leaf's version counter tells of all edits; on a CPU numpy may share the memory."""
    return isinstance(leaf, torch.Tensor) and not leaf.is_cpu


class Served:
    """One event as one block sees it: its rows, and the way back for what it changes.

    Attributes:
        replaced: leaves in whose place the block has given the model another tensor.
    """

    # Here and not set for each: there may be thousands of them in a step, and most are only read.
    _mine: list[Any] | None = None
    _shown: Any = None
    _versions: list[int] = []  # noqa: RUF012  # set when it is read
    _assigned: Mapping[int, torch.Tensor] = MappingProxyType({})
    _refused: Mapping[int, int] = MappingProxyType({})
    _counted = False
    replaced: tuple[int, ...] = ()

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
    def is_as_read(self) -> bool:
        """Whether it can be seen at once that the block has changed nothing."""
        if self._mine is None:
            return not self._assigned
        return self._counted and list(map(_version_of, self._mine)) == self._versions

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

    def read_first(self, where: str) -> Any:
        """The first argument of an input: the first positional, else the first keyword one.

        Raises:
            ValueError: the module was called without arguments.
        """
        return _first_argument(self.read(), where)

    def write_first(self, value: Any, where: str) -> None:
        """Replace the first argument of an input only.

        Raises:
            ValueError: ``value`` has not the served structure and shapes.
        """
        first = _first_argument(self.expected(), where)
        self._write(value, first, where, _misfit_of_first)

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
        with counting_edits():
            own = new.detach().to(live.device, live.dtype, copy=True)
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
            value = mine.detach() if mine.requires_grad else mine
            self._put(index, value, replace=index in self._assigned)
            self._refused = {i: v for i, v in self._refused.items() if i != index}

    def _put(self, index: int, value: torch.Tensor, *, replace: bool) -> None:
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
        """Whether a copy was written to.

        The version counter misses writes through `.numpy()` and `.data`; on a CPU the bytes tell.
        """
        if mine._version != self._versions[index]:
            return True
        if self._refused.get(index) == mine._version:
            return False
        return mine.device.type == "cpu" and not _same_bytes(
            mine, self._event.live(index, self._rows)
        )

    def _refuse_shared(self, index: int, where: str) -> None:
        if self._event.axis(index) is None:
            raise ValueError(
                f"{where} holds a tensor {describe(self._event.leaves[index])} without a row per "
                "token: all requests of the step share it, so no block may change it."
            )


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


def _first_argument(arguments: tuple[tuple[Any, ...], dict[str, Any]], where: str) -> Any:
    args, kwargs = arguments
    if args:
        return args[0]
    if kwargs:
        return next(iter(kwargs.values()))
    raise ValueError(
        f"{where} does not exist: the module was called without arguments. "
        "`.inputs` gives its (empty) arguments."
    )


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equality that holds for NaN too."""
    return torch.equal(a, b) or torch.equal(
        a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)
    )


def _has_items(value: Any) -> bool:
    """Whether a value holds a list or a dictionary with something in it."""
    parts = value if isinstance(value, tuple) else (value,)
    return any(isinstance(part, list | dict) and part for part in parts)


def _version(leaf: Any) -> int:
    return leaf._version if isinstance(leaf, torch.Tensor) else 0
