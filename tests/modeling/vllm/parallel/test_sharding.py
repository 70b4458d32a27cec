"""Tensors in pieces: put together in one GPU's order, and cut again."""

from __future__ import annotations

import pytest
import torch

from midstream.modeling.vllm.engine.parallel.sharding import Layout, Part, Sum

FUSED = Layout((Part(4), Part(2, copies=2), Part(2, copies=2)), ranks=4)


def test_a_fused_output_is_regrouped() -> None:
    """Parts stand one after the other, copies once; each rank gets back what it had."""
    queries, keys = torch.arange(16.0), 100 + torch.arange(8.0)
    whole = torch.cat([queries, keys[:4], keys[4:]]).expand(3, -1)
    pieces = [FUSED.piece(whole, rank) for rank in range(4)]
    assert pieces[1][0].tolist() == [4, 5, 6, 7, 100, 101, 104, 105]
    assert pieces[2][0].tolist() == [8, 9, 10, 11, 102, 103, 106, 107]
    assert torch.equal(FUSED.join(pieces), whole)
    assert (FUSED.local, FUSED.size) == (8, 24)


def test_a_stretch_of_a_piece() -> None:
    """Some parts of a fused output have a layout of their own; a part that is cut has none."""
    keys = FUSED.between(4, 6)
    assert keys == Layout((Part(2, copies=2),), 4)
    assert FUSED.between(4, 8) == Layout((Part(2, copies=2), Part(2, copies=2)), 4)
    assert FUSED.between(0, 8) == FUSED
    assert FUSED.between(4, 5) is FUSED.between(2, 4) is None


def test_heads_on_an_axis_of_their_own() -> None:
    """Where an axis is split into heads, these are divided."""
    heads = Layout((Part(4),), ranks=2).in_heads(2)
    assert heads == Layout((Part(2),), 2, axis=-2)
    whole = torch.arange(24.0).view(3, 4, 2)
    assert torch.equal(heads.join([heads.piece(whole, 0), heads.piece(whole, 1)]), whole)
    assert Layout((Part(3),), ranks=2).in_heads(2) is None


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_sum_is_exact(ranks: int) -> None:
    """What is written where ranks are added up comes out bit for bit, for any number of them."""
    written = torch.randn(4, 5)
    pieces = [Sum().piece(written, rank) for rank in range(ranks)]
    assert torch.equal(Sum().join(pieces), written)
    assert torch.equal(Sum().join([torch.ones(2), torch.full((2,), 2.0)]), torch.full((2,), 3.0))
