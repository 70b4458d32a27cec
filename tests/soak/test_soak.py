"""A hundred requests of all kinds, several at once, on engines too small for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from midstream.modeling.vllm.engine.host import BlockHost
from tests.soak.engines import engine
from tests.soak.kinds import KINDS
from tests.soak.results import Result, difference
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
    """Whatever runs beside it, however scheduled: tokens, values and errors; nothing is left.

    Under asynchronous scheduling decode steps run as recorded forwards, too.
    """
    with engine(asynchronous=asynchronous, tapped=asynchronous) as model:
        soak = Soak(model, alone)
        soak.run(draws(1, COUNT))
        assert (model.stats().steps["tapped"] > 0) == asynchronous
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


def test_a_block_that_is_kept_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that does not let go of a block has left something behind."""
    close = BlockHost.close

    def keeping(self: BlockHost, request_ids: Any) -> Any:
        kept = dict(self._admitted)
        records = close(self, request_ids)
        self._admitted.update(kept)
        return records

    with engine(asynchronous=False) as model:
        soak = Soak(model)
        soak.run([Draw("read_one_layer", 3, 0, 1)])
        assert soak.differences == []
        monkeypatch.setattr(BlockHost, "close", keeping)
        soak.run([Draw("read_one_layer", 3, 0, 4)])
    (found,) = soak.differences
    assert found.startswith("left behind: [{'blocks': 2, ")


@pytest.mark.parametrize(
    ("what", "value"),
    [
        ("ended", [((5, 6), "length", None)]),
        ("scores", [torch.tensor([-1.0, -1.1])]),
        ("error", ["KeyError: 'x'"]),
        ("saves", [{"rows": torch.full((2, 3), 1.01)}]),
        ("saves", [{"rows": torch.ones(3, 3)}]),
    ],
)
def test_every_part_of_a_result_is_compared(what: str, value: Any) -> None:
    """Tokens, log probabilities, errors and values each tell two results apart."""

    def result() -> Result:
        ended = [((5, 7), "length", None)]
        return Result(
            ended, [torch.tensor([-1.0, -2.0])], [None], [{"rows": torch.ones(2, 3)}], "1"
        )

    other = result()
    assert difference(other, result()) is None
    setattr(other, what, value)
    assert difference(other, result()) is not None
