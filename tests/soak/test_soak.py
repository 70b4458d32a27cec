"""A hundred requests of all kinds, several at once, on engines too small for them."""

from __future__ import annotations

import pytest

from tests.soak.engines import engine
from tests.soak.kinds import KINDS
from tests.soak.results import Result
from tests.soak.running import Draw, Soak, draws

COUNT = 50
"""Requests on each of two engines."""


@pytest.fixture(scope="module")
def alone() -> dict[Draw, list[Result]]:
    """What each draw gave alone, kept for both engines."""
    return {}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
def test_each_result_is_that_of_the_request_alone(
    asynchronous: bool, alone: dict[Draw, list[Result]]
) -> None:
    """Whatever runs beside it, however scheduled: tokens, values and errors; nothing is left."""
    with engine(asynchronous=asynchronous) as model:
        soak = Soak(model, alone)
        soak.run(draws(1, COUNT))
    assert soak.differences == []
    assert soak.preempted > 0
    assert soak.counts.pieces > 0


def test_every_kind_comes_once_before_any_comes_again() -> None:
    """A hundred draws have all kinds; the same seed draws the same."""
    found = draws(3, 2 * len(KINDS))
    assert {draw.kind for draw in found} == set(KINDS)
    assert len(KINDS) >= 40
    assert found == draws(3, 2 * len(KINDS))
    assert found != draws(4, 2 * len(KINDS))
