"""Ranks, here threads, agree on how their blocks stand, whatever happens on one of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from midstream.errors import MidstreamError
from midstream.interleaving.run import Run
from midstream.modeling.vllm.engine.parallel.agreement import Agreement


class Threads:
    """Threads that stand for ranks; one that waits for another for long fails."""

    def __init__(self, rank: int, size: int, board: list[Any], barrier: threading.Barrier):
        self.rank, self.size, self._board, self._barrier = rank, size, board, barrier
        self.exchanges = 0

    def objects(self, mine: Any) -> list[Any]:
        self.exchanges += 1
        self._board[self.rank] = mine
        self._barrier.wait(10)
        found = list(self._board)
        self._barrier.wait(10)
        return found

    words = objects


Body = Callable[[int, Agreement, Run], None]


def together(*bodies: Body, ranks: int = 2) -> list[list[Run]]:
    """Run blocks, one after the other, on all ranks; by rank, its runs after they have agreed."""
    board: list[Any] = [None] * ranks
    barrier = threading.Barrier(ranks)
    found: list[list[Run]] = [[] for _ in range(ranks)]

    def rank_of(rank: int) -> None:
        agreement = Agreement(Threads(rank, ranks, board, barrier))  # type: ignore[arg-type]
        runs = found[rank]
        for at, body in enumerate(bodies):
            runs.append(Run(partial(lambda at, body: body(rank, agreement, runs[at]), at, body)))
        agreement.begin(runs)
        for run in runs:
            run.resume()
        agreement.agree(runs)

    threads = [threading.Thread(target=rank_of, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    return found


def quiet(rank: int, agreement: Agreement, run: Run) -> None:
    """Does nothing."""


def calls(rank: int, agreement: Agreement, run: Run) -> None:
    for _ in range(3):
        agreement.meet(run, 7)


def fails_on(rank_: int, *, before: int = 0) -> Body:
    def body(rank: int, agreement: Agreement, run: Run) -> None:
        for number in range(3):
            if rank == rank_ and number == before:
                raise ValueError("here")
            agreement.meet(run, 7)

    return body


def errors(found: list[list[Run]]) -> list[list[str]]:
    return [[str(run.error or "") for run in runs] for runs in found]


@pytest.mark.parametrize("ranks", [2, 3])
def test_blocks_that_stand_alike(ranks: int) -> None:
    """Where all goes alike nothing fails."""
    assert errors(together(quiet, calls, calls, ranks=ranks)) == [["", "", ""]] * ranks


@pytest.mark.parametrize("before", [0, 1, 2])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_failure_on_one_rank(ranks: int, before: int) -> None:
    """It is all ranks', with the cause; the blocks around it, which call too, go on."""
    found = together(calls, fails_on(1, before=before), calls, ranks=ranks)
    for rank, (first, failed, last) in enumerate(errors(found)):
        assert (first, last) == ("", "")
        assert failed == ("here" if rank == 1 else "The block failed on rank 1: ValueError: here")


def test_each_rank_fails_another_block() -> None:
    """Failures of different blocks on different ranks do not get mixed up."""
    found = errors(together(fails_on(0), fails_on(1, before=2), calls))
    assert found[0] == ["here", "The block failed on rank 1: ValueError: here", ""]
    assert found[1] == ["The block failed on rank 0: ValueError: here", "here", ""]


def test_another_call() -> None:
    """Ranks whose blocks call different things are both told, and neither waits."""

    def body(rank: int, agreement: Agreement, run: Run) -> None:
        agreement.meet(run, rank)

    for failed, other in errors(together(body, calls)):
        assert "On another rank this block" in failed
        assert other == ""


def test_an_error_of_a_call_can_be_caught() -> None:
    """A block that goes on after it has been left alone still agrees at the end, and fails."""

    def body(rank: int, agreement: Agreement, run: Run) -> None:
        for _ in range(2):
            if rank == 0:
                with pytest.raises(MidstreamError):
                    agreement.meet(run, 7)
        if rank == 1:
            raise ValueError("here")

    found = errors(together(body, calls))
    assert found == [["The block failed on rank 1: ValueError: here", ""], ["here", ""]]


def test_blocks_that_end_apart() -> None:
    """A block that has stopped its request on one rank only went another way."""

    def body(rank: int, agreement: Agreement, run: Run) -> None:
        if rank:
            run.stop()

    (mine, _), (theirs, _) = errors(together(body, calls))
    assert "went different ways" in mine
    assert mine == theirs
