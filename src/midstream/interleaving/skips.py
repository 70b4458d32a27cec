"""`module.skip(value)`: a module's output is the block's, and the module runs only where it must.

A module is left out when all rows of the step skip it. Otherwise, and always where it keeps a state
or talks to other processes, it runs and the rows of those who skip it are overwritten. A block sees
no difference: what lies inside a module that it skipped is out of its reach either way.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from midstream.errors import NotInTraceError, OutOfOrderError
from midstream.interleaving.copies import Rows, row_axis
from midstream.interleaving.locations import SKIP, Location
from midstream.interleaving.structure import PLAIN, describe, flatten, same_shape

if TYPE_CHECKING:
    from midstream.interleaving.run import Run


def skip(run: Run, path: str, value: Any) -> None:
    """Let a value stand for what a module returns, for the rows of the block's request.

    Raises:
        ValueError: ``value`` has not the structure and shapes of what the module returns.
        OutOfOrderError: the module has been entered, or is not called in this step.
    """
    location, interleaver = Location(path, SKIP), run.interleaver
    if interleaver is None:
        raise NotInTraceError(f"{location.label(run.visit)} was asked for outside a forward.")
    interleaver.asking.check_skip(run, location)
    interleaver.skips.values.setdefault(run, {})[path] = value
    try:
        run.at(location).write(value, location.label(run.visit), _misfit)
    except BaseException:
        interleaver.skips.withdraw(run, path)
        raise


def _misfit(where: str, value: Any, expected: Any) -> str:
    """The error's text for what cannot stand for an output."""
    several = isinstance(expected, tuple | list)
    advice = " Give it all of its parts, as `module.output` shows them." if several else ""
    return (
        f"{where} was given {describe(value)}, but the module returns {describe(expected)} for "
        f"this request: what stands for its output must have the same structure and shapes.{advice}"
    )


class Skips:
    """What the blocks of a step skip, and what modules return.

    Args:
        always: paths of the modules that run whoever skips them.

    Attributes:
        values: by block, the value for each module that it skips in this step.
    """

    def __init__(self, always: Collection[str] = ()):
        self._always = frozenset(always)
        self._forms: dict[str, _Form | None] = {}
        self.values: dict[Run, dict[str, Any]] = {}

    def withdraw(self, run: Run, path: str) -> None:
        """Forget a skip that failed."""
        mine = self.values.get(run, {})
        mine.pop(path, None)
        if not mine:
            self.values.pop(run, None)

    def learn(self, path: str, value: Any, sizes: Sequence[int]) -> None:
        """Note what a module returned. One that returns now this, now that is never left out."""
        form = _Form.of(value, sizes)
        known = self._forms.setdefault(path, form)
        if known is not None and (form is None or form.structure != known.structure):
            self._forms[path] = None

    def stand_in(
        self,
        path: str,
        runs: Sequence[Run],
        call: Any,
        rows: Mapping[Run, Rows],
        sizes: Sequence[int],
    ) -> Any:
        """An empty output for a module that need not run; None if it has to.

        Args:
            runs: the blocks that skip it.
            call: what it is called with, ``(args, kwargs)``.
            rows, sizes: as in ``Interleaver.phase``.
        """
        form = self._forms.get(path)
        if form is None or path in self._always:
            return None
        spans = {
            rows[run]
            for run in runs
            if form.fits(self.values[run][path], rows[run].stop - rows[run].start)
        }
        if sum(span.stop - span.start for span in spans) < sizes[0]:
            return None
        total = _rows_of(call, sizes)
        return None if total is None else form.empty(total)

    def around(self, run: Run, location: Location, order: Mapping[Location, int]) -> str | None:
        """The module that a block skips and that contains a location; None if there is none."""
        for path in self.values.get(run, ()):
            if _contains(path, location, order):
                return path
        return None

    def refuse_inner(self, run: Run, location: Location, order: Mapping[Location, int]) -> None:
        """Refuse a location inside a module that the block skips.

        Raises:
            OutOfOrderError: naming both.
        """
        path = self.around(run, location, order)
        if path is not None:
            raise OutOfOrderError(
                f"'{location.label(run.visit)}' did not run in this step: the block skips "
                f"'{path or 'model'}', and with it all that is inside."
            )

    def hidden_from(
        self,
        runs: Sequence[Run],
        location: Location,
        rows: Mapping[Run, Rows],
        order: Mapping[Location, int],
    ) -> list[Run]:
        """Those of the blocks whose request skips a module around a location."""
        spans = {
            rows[run] for run in self.values if run in rows and self.around(run, location, order)
        }
        return [run for run in runs if rows[run] in spans] if spans else []


def _contains(path: str, location: Location, order: Mapping[Location, int]) -> bool:
    if location.path == path:
        return False
    if not path or location.path.startswith(f"{path}."):
        return True
    first, index, last = (
        order.get(place) for place in (Location(path, "input"), location, Location(path, "output"))
    )
    return None not in (first, index, last) and first < index < last  # type: ignore[operator]


def _rows_of(call: Any, sizes: Sequence[int]) -> int | None:
    """How many rows a module is called with, padding included."""
    for leaf in flatten(call)[0]:
        axis = row_axis(leaf, sizes)
        if axis is not None:
            return int(leaf.shape[axis])
    return None


class _Form:
    """What a module returns: its structure, and the shape of each tensor without its rows.

    Attributes:
        structure: the output with a description in the place of each tensor, to compare.
    """

    def __init__(self, leaves: list[Any], build: Any):
        self._leaves, self._build = leaves, build
        self.structure = build(leaves)

    @classmethod
    def of(cls, value: Any, sizes: Sequence[int]) -> _Form | None:
        """The form of an output; None if it cannot be made again for other rows.

        It cannot if a tensor in it has no rows, or if it holds objects or is a container of a type
        that only the model itself can make.
        """
        leaves, build = flatten(value)
        axes = [row_axis(leaf, sizes) for leaf in leaves]
        known = all(
            axis is not None or isinstance(leaf, PLAIN)
            for leaf, axis in zip(leaves, axes, strict=True)
        )
        if not known or all(axis is None for axis in axes):
            return None
        if len(leaves) > 1 and type(build(leaves)) is not type(value):
            return None
        described = [
            leaf if axis is None else _TensorForm(leaf, axis)
            for leaf, axis in zip(leaves, axes, strict=True)
        ]
        return cls(described, build)

    def fits(self, value: Any, rows: int) -> bool:
        """Whether a value can stand for the output of a request with that many rows."""
        return same_shape(value, self._made(rows, "meta"))

    def empty(self, rows: int) -> Any:
        """An output of zeros."""
        return self._made(rows, None)

    def _made(self, rows: int, device: str | None) -> Any:
        made = [
            leaf.made(rows, device) if isinstance(leaf, _TensorForm) else leaf
            for leaf in self._leaves
        ]
        return self._build(made)


class _TensorForm:
    """One tensor of an output, without its rows."""

    def __init__(self, tensor: torch.Tensor, axis: int):
        self._axis, self._dtype, self._device = axis, tensor.dtype, tensor.device
        self._shape = (*tensor.shape[:axis], 0, *tensor.shape[axis + 1 :])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _TensorForm) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]

    def made(self, rows: int, device: str | None) -> torch.Tensor:
        shape = list(self._shape)
        shape[self._axis] = rows
        return torch.zeros(shape, dtype=self._dtype, device=device or self._device)
