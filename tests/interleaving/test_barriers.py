"""Blocks of one trace that wait for each other."""

from __future__ import annotations

import pytest
import torch

from midstream import Model
from midstream.errors import InterventionError, NotInTraceError
from midstream.interleaving.barriers import Barrier
from tests.support.local_modules import MLP, assert_untouched, drawn, rows

X, Y, Z = rows(2, 1), rows(2, 2), rows(2, 3)


def test_blocks_leave_it_together() -> None:
    """Each goes on when the last has come, wherever the forward is, and it can be used again."""
    module = drawn(MLP)
    model = Model(module)
    with model.trace() as tracer:
        log = [].save()
        barrier = tracer.barrier(3)
        with tracer.invoke(X):
            log.append("x before")
            barrier()
            log.append("x between")
            model.first.output
            barrier()
            log.append("x after")
            one = model.second.output
        with tracer.invoke(Y):
            model.first.output
            log.append("y before")
            barrier()
            model.first.output[:] = 1.0
            barrier()
            log.append("y after")
            two = model.output.save()
        with tracer.invoke(Z):
            barrier()
            log.append("z between")
            barrier()
            log.append("z after")
    assert log.index("x before") < log.index("y before") < log.index("x between")
    last = max(log.index("x between"), log.index("z between"))
    assert last < min(log.index(f"{name} after") for name in "xyz")
    expected = module.last(module.act2(module.second(module.act(torch.ones(2, 8)))))
    assert torch.equal(two, expected)


def test_a_value_goes_to_a_block_at_the_same_place() -> None:
    """What one block computes at a location another writes there, in either order of invokes."""
    module = drawn(MLP)
    model = Model(module)
    expected = module(torch.cat([X, X]))[2:]
    with model.trace() as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke(Y):
            mine = model.second.output
            barrier()
            mine[:] = source
            later = model.output.save()
        with tracer.invoke(X):
            source = model.second.output.clone()
            barrier()
    with model.trace() as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke(X):
            source = model.second.output.clone()
            barrier()
        with tracer.invoke(Y):
            mine = model.second.output
            barrier()
            mine[:] = source
            earlier = model.output.save()
    torch.testing.assert_close(later, expected)
    torch.testing.assert_close(earlier, expected)
    assert not torch.allclose(expected, module(Y))


@pytest.mark.parametrize("count", [2, 3])
def test_too_few_come(count: int) -> None:
    """A barrier that too few blocks reach is an error of those that wait, at the end (H26)."""
    module = drawn(MLP)
    model = Model(module)
    with pytest.raises(
        InterventionError, match=f"is for {count} blocks, and {count - 1}"
    ) as caught:
        with model.trace() as tracer:
            barrier = tracer.barrier(count)
            with tracer.invoke(X):
                barrier()
            with tracer.invoke(Y):
                if count == 3:
                    barrier()
                out = model.output.save()
    assert isinstance(caught.value.__cause__, ValueError)
    assert "barrier()" in str(caught.value)
    assert count == 3 or torch.equal(out, module(torch.cat([X, Y]))[2:])
    assert_untouched(module)


def test_a_block_that_failed_does_not_come() -> None:
    """Its error is told, and that of those who waited for it."""
    model = Model(drawn(MLP))
    with pytest.raises(InterventionError, match="2 blocks of this trace failed") as caught:
        with model.trace() as tracer:
            barrier = tracer.barrier(2)
            with tracer.invoke(X):
                barrier()
            with tracer.invoke(Y):
                model.first.output
                raise KeyError("mine")
    assert "KeyError: 'mine'" in str(caught.value)
    assert "The barrier is for 2 blocks, and 1 came to it" in str(caught.value)


def test_a_barrier_for_one_lets_everyone_pass() -> None:
    """It is no place to wait."""
    model = Model(drawn(MLP))
    with model.trace(X) as tracer:
        barrier = tracer.barrier(1)
        barrier()
        barrier()
        done = [1].save()
    assert done == [1]


def test_what_a_barrier_takes() -> None:
    """A whole number of at least one block, and to be called in a block."""
    with pytest.raises(ValueError, match="at least one block; got 0"):
        Barrier(0)
    with pytest.raises(TypeError):
        Barrier(1.5)  # type: ignore[arg-type]
    with pytest.raises(NotInTraceError, match="a barrier"):
        Barrier(2)()
