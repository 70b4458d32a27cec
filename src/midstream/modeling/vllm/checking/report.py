"""What `model.check()` gives: one row for each read and write, and a table of them."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor

__all__ = ["Check", "Row", "row_error"]

GUARD = 3.0
"""How many times further off than the value itself the nearest mix-up must be."""


def row_error(got: Tensor, right: Tensor) -> float:
    """``|a - b| / |b|`` (Euclidean) of the row where it is largest; both ``[rows, width]``.

    Not a number where either side has one that the other has not; infinite for another shape.
    """
    if got.shape != right.shape:
        return float("inf")
    got, right = got.detach().cpu().double(), right.detach().cpu().double()
    difference = (got - right).norm(dim=-1)
    scale = right.norm(dim=-1)
    errors = torch.where(difference == 0, 0.0, difference / scale)
    return float(errors.max()) if errors.numel() else 0.0


@dataclass(frozen=True)
class Row:
    """One comparison.

    Attributes:
        name: what was read, with its layer, or what was written.
        path: vLLM's module.
        error: largest relative error of a row, see ``row_error``.
        tolerance: how much it may be.
        mixed_up: the error of what a mix-up would give, the same place of another layer for
            instance; for a write, of a forward without it.
        note: why there is nothing to compare, or what would have been equal.
    """

    name: str
    path: str
    error: float
    tolerance: float
    mixed_up: float
    note: str = ""

    @property
    def passed(self) -> bool:
        """Whether the value is right, and this comparison could have shown that it is not."""
        return self.error <= self.tolerance and self.is_telling

    @property
    def is_telling(self) -> bool:
        """Whether a mix-up would be further off than the value is, by far."""
        return self.mixed_up > GUARD * self.error

    @property
    def verdict(self) -> str:
        """One of "equal", "differs" and "cannot tell"."""
        if self.passed:
            return "equal"
        return "cannot tell" if self.error <= self.tolerance else "differs"


@dataclass(frozen=True)
class Check:
    """The outcome of `model.check()`; printed, it is a table.

    Attributes:
        rows: reads in the order of the forward, then writes.
        engine: what was compared, in words.
        reference: what it was compared with, in words.
        stream: what the residual stream leaving a layer is here: ``sum(layer.output)``,
            ``layer.output`` or ``layer.output[0]``.
        notes: what a reader of the table should know.
    """

    rows: tuple[Row, ...]
    engine: str
    reference: str
    stream: str
    notes: tuple[str, ...] = field(default=())

    @property
    def passed(self) -> bool:
        """Whether there are rows and all of them passed."""
        return bool(self.rows) and all(row.passed for row in self.rows)

    @property
    def failures(self) -> tuple[Row, ...]:
        """Rows that did not pass."""
        return tuple(row for row in self.rows if not row.passed)

    def __bool__(self) -> bool:
        return self.passed

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def raise_for_failure(self) -> None:
        """Raise if a row did not pass.

        Raises:
            AssertionError: with the rows that failed.
        """
        if not self.passed:
            raise AssertionError(str(self))

    def __rich__(self) -> Table:
        verdict = "passed" if self.passed else f"FAILED: {len(self.failures)} of {len(self.rows)}"
        about = f"{self.engine}, beside {self.reference}."
        stream = f"The stream leaving a layer is {self.stream}."
        caption = escape("\n".join([about, stream, *self.notes]))
        table = Table(title=f"model.check(): {verdict}", caption=caption, caption_justify="left")
        for name in ("what", "module"):
            table.add_column(name, overflow="fold")
        for name in ("error", "allowed", "a mix-up"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("verdict", overflow="fold")
        for row in self.rows:
            table.add_row(*_cells(row), style=None if row.passed else "bold red")
        return table

    def __str__(self) -> str:
        text = io.StringIO()
        Console(file=text, width=100, color_system=None).print(self)
        return text.getvalue().rstrip("\n")


def _cells(row: Row) -> tuple[str, ...]:
    numbers = (f"{number:.1e}" for number in (row.error, row.tolerance, row.mixed_up))
    verdict = f"{row.verdict}: {row.note}" if row.note else row.verdict
    return row.name, escape(row.path), *numbers, escape(verdict)
