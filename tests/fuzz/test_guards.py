"""Planted faults are found within the examples that CI runs: the fuzz tests can fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.interleaving.copies import Rows
from midstream.interleaving.events import Event
from midstream.interleaving.served import Served
from tests.fuzz.counting import examples
from tests.fuzz.test_engine import check as check_engine
from tests.fuzz.test_engine import traces
from tests.fuzz.test_toy import check as check_toy
from tests.fuzz.test_toy import requests


def keep_writes(patch: pytest.MonkeyPatch) -> None:
    """What a block writes in place stays its own."""
    patch.setattr(Served, "settle", lambda *_: None)


def hand_out_views(patch: pytest.MonkeyPatch) -> None:
    """A block is given the model's own tensor in place of a copy."""
    patch.setattr(Event, "copy", Event.live)


def mix_up_rows(patch: pytest.MonkeyPatch) -> None:
    """Where a step has several requests, a block is given the rows before its own."""
    copy = Event.copy

    def shifted(self: Event, index: int, rows: Rows) -> Any:
        back = rows.start - self._low
        size = rows.stop - rows.start
        return copy(self, index, Rows(rows.start - back, rows.start - back + size))

    patch.setattr(Event, "copy", shifted)
    patch.setattr(Event, "columns", lambda self, i, spans: [shifted(self, i, s) for s in spans])


def share_replacements(patch: pytest.MonkeyPatch) -> None:
    """An assigned value is written into the tensor that other modules hold."""
    put = Event.put
    patch.setattr(
        Event,
        "put",
        lambda self, i, rows, value, *, replace: put(self, i, rows, value, replace=False),
    )


def lose_writes_of_one_row(patch: pytest.MonkeyPatch) -> None:
    """Where a block has one row, as after the prompt's step, nothing that it writes lands."""
    put = Event.put

    def lost(self: Event, i: int, rows: Rows, value: Any, *, replace: bool) -> None:
        if rows.stop - rows.start > 1:
            put(self, i, rows, value, replace=replace)

    patch.setattr(Event, "put", lost)


def take_any_structure(patch: pytest.MonkeyPatch) -> None:
    """A replacement of another structure or shape is not refused at once."""
    patch.setattr("midstream.interleaving.served.same_shape", lambda *_: True)


Fault = Callable[[pytest.MonkeyPatch], None]
TOY: list[Fault] = [
    keep_writes,
    hand_out_views,
    mix_up_rows,
    share_replacements,
    take_any_structure,
]
ENGINE: list[Fault] = [keep_writes, hand_out_views, lose_writes_of_one_row]


@pytest.mark.parametrize("fault", TOY, ids=lambda fault: fault.__name__)
def test_a_fault_is_found_on_the_toy(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the toy's share of the examples a block is built that shows the fault.

    A wrong value is one sign of it, a copy that does not fit where nothing may fail another.
    """

    @examples(0.6, shrink=False)
    @given(requests(), st.booleans())
    def blocks(some: Any, learned: bool) -> None:
        check_toy(some, learned)

    fault(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError)):
        blocks()


@pytest.mark.parametrize("fault", ENGINE, ids=lambda fault: fault.__name__)
def test_a_fault_is_found_on_the_engine(
    fault: Fault, llama: Any, hf: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within the engine's share of the examples, too."""

    @examples(0.4, shrink=False)
    @given(traces)
    def blocks(drawn: Any) -> None:
        check_engine(llama, hf.model, *drawn)

    fault(monkeypatch)
    with pytest.raises(AssertionError):
        blocks()
