"""One hand-over between the forward pass and the blocks that wait for it.

A block gets a private copy of its own rows. When it waits again, rows it changed are copied back
into the tensor the model goes on with. The engine reuses its buffers (a fused add-norm rewrites
the residual stream in place), so a view handed out would later hold another layer's numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from midstream.interleaving.copies import (
    Copies,
    Edit,
    Put,
    Rows,
    counting_edits,
    cut,
    row_axis,
    same_bytes,
)
from midstream.interleaving.locations import Location
from midstream.interleaving.served import Bundle, Served
from midstream.interleaving.snapshots import Snapshots, Storage
from midstream.interleaving.structure import flatten

if TYPE_CHECKING:
    from midstream.interleaving.replays import WriteLog


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
        refused: why no block can be served here, if none can.
        copied: called with a leaf's place when rows of it have been copied for blocks.
        shared_since: why a tensor is one for all blocks, as the end of an error's text.
    """

    shared_since = (
        "without a row per token: all requests of the step share it, so no block may change it."
    )

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
        self.has_items = not isinstance(value, torch.Tensor) and has_items(value)
        self.writes: list[Put] | None = None
        self.before_write: Callable[[torch.Tensor], None] | None = None
        self.refused: Exception | None = None
        self.copied: Callable[[int, Copies], None] | None = None

    @property
    def is_tensor(self) -> bool:
        """Whether the value is one tensor, and nothing around it."""
        return isinstance(self._value, torch.Tensor)

    def axis(self, index: int) -> int | None:
        """The axis of a leaf that runs over the step's rows; None if it has none."""
        if index not in self._axes:
            leaf = self.leaves[index]
            axis = row_axis(leaf, self._sizes)
            if axis is not None and self._is_whole is not None and self._is_whole(leaf):
                axis = None
            self._axes[index] = axis
        return self._axes[index]

    def is_shared(self, index: int, rows: Rows) -> bool:
        """Whether a leaf belongs to other requests too, so that no block may change it."""
        return self.axis(index) is None

    def private(self, value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """A copy, that nobody else holds, of a tensor that is to stand in a leaf's place."""
        with counting_edits():
            return value.detach().to(like.device, like.dtype, copy=True)

    def bare(self, value: torch.Tensor) -> torch.Tensor:
        """A tensor that a block has changed, as it is written."""
        return value.detach() if value.requires_grad else value

    def is_changed(self, index: int, value: torch.Tensor, rows: Rows) -> bool:
        """Whether a copy, whose version is as it was, has been written to all the same.

        The version counter misses writes through `.numpy()` and `.data`; on a CPU the bytes tell.
        """
        return value.device.type == "cpu" and not same_bytes(value, self.live(index, rows))

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
            if self.copied is not None:
                self.copied(index, copies)
        return copies.rows(rows)

    def built(self, leaves: list[Any]) -> Any:
        """The value's structure with other leaves."""
        return self._build(leaves)

    def columns(self, index: int, spans: Sequence[Rows]) -> Sequence[Any]:
        """Private copies of several requests' rows of a leaf, see ``copy``."""
        first = self.copy(index, spans[0])
        copies = self._copies.get(index)
        if copies is None:
            return [first, *(self.copy(index, span) for span in spans[1:])]
        return copies.several(spans)

    def held(self, index: int) -> tuple[Storage, int] | None:
        """The memory that the copies of a leaf's rows share, and the bytes of a row in it."""
        copies = self._copies.get(index)
        return None if copies is None else (copies.storage, copies.row_bytes)

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
            columns.append(self.columns(index, self._spans))
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


def _is_counted(leaf: Any) -> bool:
    """Whether a leaf's version counter tells of all edits; on a CPU numpy may share the memory."""
    return isinstance(leaf, torch.Tensor) and not leaf.is_cpu


def has_items(value: Any) -> bool:
    """Whether a value holds a list or a dictionary with something in it."""
    parts = value if isinstance(value, tuple) else (value,)
    return any(isinstance(part, list | dict) and part for part in parts)
