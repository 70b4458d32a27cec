"""Random generators that change places between the engine and blocks."""

from __future__ import annotations

import random

import numpy as np
import torch

from midstream.interleaving.generators import Exchange, Generators


def draw() -> tuple[float, float, float]:
    """One number of each of the process's generators."""
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def alone(seed: int, count: int) -> list[tuple[float, float, float]]:
    """What a block draws that nobody interrupts."""
    exchange = Exchange()
    exchange.give(Generators(seed))
    drawn = [draw() for _ in range(count)]
    exchange.give(None)
    return drawn


def test_blocks_that_follow_each_other_draw_as_alone():
    """Handed from block to block, each goes on where it stood, and so do the engine's own."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    expected = [draw() for _ in range(3)]
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    exchange, first, second = Exchange(), Generators(1), Generators(2)
    drawn = {first: [], second: [], None: []}
    for owner in (None, first, second, first, None, second, first, second, None):
        exchange.give(owner)
        drawn[owner].append(draw())
    assert drawn[None] == expected
    assert drawn[first] == alone(1, 3)
    assert drawn[second] == alone(2, 3)


def test_generators_of_a_block_that_ended_serve_another():
    """A retired block's are let go of as the next takes their place, and are seeded anew."""
    exchange, first, second = Exchange(), Generators(1), Generators(2)
    exchange.give(first)
    draw()
    exchange.retire()
    exchange.give(second)
    again = Generators(1)
    assert again._legacy is first._legacy
    exchange.give(again)
    assert draw() == alone(1, 1)[0]
    exchange.give(None)
