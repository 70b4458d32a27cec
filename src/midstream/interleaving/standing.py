"""Edits that blocks make in every step alike, made in their place and for all of them together.

A block whose loop does one edit (see ``tracing.forms``) makes it itself in the first step of the
loop. From then on it is left where it is, at the loop's head, while the edit is made in its place:
one operation for all requests that do the same, with their operands side by side.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import count, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from midstream.interleaving.copies import Put, Rows, cut
from midstream.interleaving.events import Event
from midstream.interleaving.gathering import Gatherings, Reads, leaf_of
from midstream.interleaving.locations import Location
from midstream.interleaving.run import Run
from midstream.tracing.forms import Form, Gathering

if TYPE_CHECKING:
    from midstream.interleaving.interleaver import Interleaver

Operand = torch.Tensor | int | float
_MOST_KEPT = 64
_versions = count()


class Edit:
    """The edit of one block's loop.

    Args:
        form: what the loop does.
        names: the block's names.

    Attributes:
        location: where it is made; None until the block has made it once itself.
        version: another one for each operand there has been, of whatever block.
    """

    def __init__(self, form: Form, names: Mapping[str, Any]):
        self.form, self._names = form, names
        self.location: Location | None = None
        self.version = -1
        self._operand: Operand | None = None
        self._made_of: tuple[Any, ...] | None = None

    def learn(self, run: Run) -> None:
        """Take in where the block has made it, in a step that it executed itself."""
        place = next(iter(run.wrote)) if len(run.wrote) == 1 else None
        usable = place is not None and place.side == "output" and place.within is None
        if self.form.last and self.form.item is not None and place in run.wrote_tensors:
            usable = False  # the last entry of a row is a number
        self.location = place if usable else None

    @property
    def operand(self) -> Operand | None:
        """What the value is changed by; None if it is no number and no tensor of several."""
        values = [self._names.get(name) for name in self.form.names]
        made_of = tuple(map(_state, values))
        if made_of != self._made_of:  # a tensor in it may have been written to
            self._made_of, self.version = made_of, next(_versions)
            self._operand = self._worked_out(dict(zip(self.form.names, values, strict=True)))
        return self._operand

    def _worked_out(self, names: dict[str, Any]) -> Operand | None:
        if not all(isinstance(value, torch.Tensor | int | float) for value in names.values()):
            return None
        # an expression of these names, numbers and arithmetic, as `forms` has seen to
        found = eval(self.form.operand, {"__builtins__": {}}, names)
        usable = type(found) in (int, float) or (type(found) is torch.Tensor and found.ndim)
        return found if usable else None

    @property
    def kind(self) -> Any:
        """What edits have in common that can be made together."""
        operand, form = self._operand, self.form
        if isinstance(operand, torch.Tensor):
            alike: Any = operand.dtype, operand.device
        else:
            alike = repr(operand)  # 0.0 and -0.0 are equal, and not the same
        return form.how, form.operation, form.item, type(operand), alike


def _state(value: Any) -> Any:
    return (id(value), value._version) if isinstance(value, torch.Tensor) else value


class Standing:
    """The edits of a step that are made in blocks' places.

    Args:
        interleaver: the model's steps.
    """

    def __init__(self, interleaver: Interleaver):
        self._interleaver, self._gatherings = interleaver, Gatherings(interleaver)
        self._runs: dict[Location, list[Run]] = {}
        self._operands: dict[Any, tuple[Any, Operand]] = {}
        self._written: list[tuple[_Place, list[tuple[Run, torch.Tensor]]]] = []

    def take(self, run: Run) -> bool:
        """Whether what a block would do in the step that begins will be done in its place."""
        habit = run.habit
        if habit is None or not run.is_at_loop:
            return False
        if isinstance(habit, Edit):
            taken = self._take_edit(run, habit)
        else:
            taken = self._gatherings.take(run, habit)
            run.visited.update(access.location for access in habit.accesses if taken)
        if taken:
            run.stood = run.visit
        return taken

    def _take_edit(self, run: Run, edit: Edit) -> bool:
        try:
            usable = edit.location is not None and edit.operand is not None
        except Exception:  # noqa: BLE001  # the block will meet it at its own line
            usable = False
        if usable and edit.location is not None:
            run.visited.add(edit.location)
            run.wrote.add(edit.location)
            self._runs.setdefault(edit.location, []).append(run)
        return usable

    def gather(self, location: Location, value: Any) -> None:
        """Read a location for those who append it to a list."""
        self._gatherings.read(location, value)

    @property
    def locations(self) -> Iterable[Location]:
        """Where something is to be done in this step."""
        return [*self._runs, *self._gatherings.locations]

    def apply(self, location: Location, value: Any) -> Any:
        """Make the edits of a location; one that fails is its block's error."""
        runs = self._runs.pop(location, None)
        if not runs:
            return value
        rows, kinds = self._interleaver.rows, dict[Any, list[Run]]()
        for run in sorted(runs, key=lambda run: rows[run].start):
            kinds.setdefault(_edit(run).kind, []).append(run)
        for kind, several in sorted(kinds.items(), key=_gives_another):
            try:
                value = self._together(location, value, several, kind)
            except Exception as error:  # noqa: BLE001  # no memory left, say: never the engine's
                for run in several:
                    run.refuse(error)
        return value

    def _together(self, location: Location, value: Any, runs: Sequence[Run], kind: Any) -> Any:
        """One edit of several requests' rows."""
        at, form = self._interleaver, _edit(runs[0]).form
        spans = [at.rows[run] for run in runs]
        event = at.event(location, value, spans)
        if at.tapping.again.keeping:
            event.writes, event.before_write = [], at.tapping.again.spare
        # of a tensor, an item is its only row
        index = 0 if isinstance(value, torch.Tensor) else leaf_of(value, event, form.item)
        if index is None:
            raise ValueError("The value has another structure than when the block met it itself.")
        area = _Area(event.leaves[index], event.axis(index), spans)
        operand = self._operand((location, kind), runs, area)
        replace = form.how == "replaced"
        with torch.inference_mode(area.leaf.is_inference()):
            if not replace and event.before_write is not None:
                event.before_write(area.leaf)
            rows = area.changed(form, operand)
            if replace:
                event.put(index, area.hull, area.whole(rows), replace=True)
            self._keep(event, _Place(location, index, replace), runs, area, rows)
        at.tapping.again.keep(location, event)
        for run in runs if replace else ():
            run.replaced.add((location, index))
        return event.result()

    def _operand(self, key: Any, runs: Sequence[Run], area: _Area) -> Operand:
        """The operands of several blocks, side by side; made anew when one of them is another."""
        edits = [_edit(run) for run in runs]
        made_of = tuple(edit.version for edit in edits)
        known = self._operands.get(key)
        if known is not None and known[0] == made_of:
            return known[1]
        operands = [edit.operand for edit in edits]
        tensors = [operand for operand in operands if isinstance(operand, torch.Tensor)]
        found = area.stacked(tensors) if tensors else operands[0]
        assert found is not None
        if len(self._operands) >= _MOST_KEPT:
            self._operands.clear()
        self._operands[key] = made_of, found
        return found

    def _keep(
        self, event: Event, place: _Place, runs: Sequence[Run], area: _Area, rows: torch.Tensor
    ) -> None:
        """Keep what was written for those who may have to write it again."""
        logged = self._interleaver.logged and any(map(_is_logged, runs))
        if event.writes is None and not logged:
            return
        parts = area.split(rows if place.replace else rows.clone())
        if event.writes is not None:
            for span, part in zip(area.spans, parts, strict=True):
                event.writes.append(Put(place.leaf, span, part, place.replace))
        if logged:
            self._written.append((place, list(zip(runs, parts, strict=True))))

    def finish_step(self, *, complete: bool) -> list[tuple[Location, Run]]:
        """Append what was read, and keep what was written for the case of a preemption.

        Args:
            complete: whether the step ran to its end.

        Returns:
            Where the step did not get to, with whose block it was to be done for.
        """
        edits = [(location, run) for location, runs in self._runs.items() for run in runs]
        left = [*edits, *self._gatherings.left] if complete else []
        for (location, leaf, replace), parts in self._written:
            for run, part in parts:
                if run.log is not None:
                    run.log.add(location, leaf, 1, part, replace=replace)
        self._written.clear()
        self._runs.clear()
        self._gatherings.finish_step()
        return left


def habit_of(form: Form | Gathering | None, names: Mapping[str, Any]) -> Edit | Reads | None:
    """What a block's loop does in each step, as it is done in its place.

    Args:
        names: the block's names.
    """
    if form is None:
        return None
    return Edit(form, names) if isinstance(form, Form) else Reads(form, names)


class _Place(NamedTuple):
    """A leaf of a location, and whether the model is given another tensor there."""

    location: Location
    leaf: int
    replace: bool


class _Area:
    """One row each of several requests, in one tensor.

    Args:
        leaf: the tensor.
        axis: over which its rows run.
        spans: the rows, in order.
    """

    def __init__(self, leaf: torch.Tensor, axis: int | None, spans: Sequence[Rows]):
        if axis is None or any(span.stop - span.start != 1 for span in spans):
            raise ValueError("A value without a row for each request cannot be changed together.")
        self.leaf, self.spans, self._axis = leaf, spans, axis
        self.hull = Rows(spans[0].start, spans[-1].stop)
        self._index: torch.Tensor | None = None
        if any(a.stop != b.start for a, b in pairwise(spans)):
            places = [span.start - self.hull.start for span in spans]
            self._index = torch.tensor(places, device=leaf.device)

    @property
    def _live(self) -> torch.Tensor:
        return cut(self.leaf, self._axis, *self.hull)  # type: ignore[no-any-return]

    def stacked(self, operands: Sequence[torch.Tensor]) -> torch.Tensor:
        """Operands as they stand beside the rows."""
        shape = list(self.leaf.shape)
        shape[self._axis] = 1
        # a value may be put into rows with axes of length 1 before theirs
        alike = [operand.reshape(operand.shape[-len(shape) :]) for operand in operands]
        return torch.cat([operand.expand(shape) for operand in alike], self._axis)

    def changed(self, form: Form, operand: Operand) -> torch.Tensor:
        """Change the rows as a form says; in their place unless it gives the model another tensor.

        Returns:
            The rows as they are then.
        """
        live = self._live
        rows = live if self._index is None else live.index_select(self._axis, self._index)
        if form.how == "replaced":
            new: torch.Tensor = getattr(rows, form.operation)(operand)
            return new.to(rows.dtype)
        if form.how == "in place" and form.operation:
            getattr(rows, f"{form.operation}_")(operand)
        else:
            rows[:] = getattr(rows, form.operation)(operand) if form.operation else operand
        if self._index is not None:
            live.index_copy_(self._axis, self._index, rows)
        return rows

    def whole(self, rows: torch.Tensor) -> torch.Tensor:
        """All rows between the first and the last one, with the given ones in their places."""
        if self._index is None:
            return rows
        return self._live.clone().index_copy_(self._axis, self._index, rows)

    def split(self, rows: torch.Tensor) -> Sequence[torch.Tensor]:
        """Each request's row."""
        return rows.split(1, self._axis)  # type: ignore[no-any-return]


def _is_logged(run: Run) -> bool:
    return run.log is not None and not run.log.full


def _gives_another(kind: tuple[Any, Any]) -> bool:
    """Whether edits give the model another tensor, in which those in place would be lost."""
    (how, *_), _runs = kind
    return bool(how == "replaced")


def _edit(run: Run) -> Edit:
    assert isinstance(run.habit, Edit)
    return run.habit
