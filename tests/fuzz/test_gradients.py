"""Random graphs: every gradient that is asked for, and every edit, as with tensor hooks."""

from __future__ import annotations

import random

import pytest
import torch

from midstream.interleaving.gradients import backward


def graph(choose: random.Random) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
    """Two leaves, what is computed from them in the order of the forward, and a loss."""
    generator = torch.Generator().manual_seed(choose.randrange(1 << 30))
    leaves = [torch.randn(3, 3, generator=generator).requires_grad_(True) for _ in range(2)]
    values = list(leaves)
    for _ in range(choose.randint(3, 25)):
        a, b = choose.choice(values), choose.choice(values)
        makes = (
            lambda a, _: torch.tanh(a),
            lambda a, b: a * b,
            lambda a, b: a + b,
            lambda a, b: (a @ b) / 3,
            lambda a, _: a[:, [2, 0, 1]],
            lambda a, _: torch.cat(a.split(1)[::-1]),
        )
        values.append(choose.choice(makes)(a, b))
    return leaves, values[2:], values[-1].sum() + values[-2].sum()


def hooked(
    asked: list[torch.Tensor], doubled: list[bool], loss: torch.Tensor
) -> list[torch.Tensor | None]:
    """The gradients that tensor hooks see, None where none comes, some of them doubled on."""
    seen: list[torch.Tensor | None] = [None] * len(asked)

    def hook(index: int, gradient: torch.Tensor) -> torch.Tensor | None:
        seen[index] = gradient.clone()
        return gradient * 2 if doubled[index] else None

    handles = [
        tensor.register_hook(lambda gradient, index=index: hook(index, gradient))
        for index, tensor in enumerate(asked)
    ]
    loss.backward(retain_graph=True)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("seed", range(60))
def test_random_graphs(seed: int) -> None:
    """Gradients are those of hooks, bit for bit, also behind edits and at leaves (H22)."""
    choose = random.Random(seed)
    leaves, values, loss = graph(choose)
    asked = [value for value in values if choose.random() < 0.5]
    doubled = [choose.random() < 0.3 for _ in asked]
    expected = hooked(asked, doubled, loss)
    of_leaves = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    with backward(loss) as gradients:
        for index in reversed(range(len(asked))):
            gradient = expected[index]
            if gradient is not None:
                got = gradients.of(asked[index]).grad
                assert torch.equal(got, gradient)
                if doubled[index]:
                    got *= 2
    for leaf, gradient in zip(leaves, of_leaves, strict=True):
        assert (leaf.grad is None) == (gradient is None)
        assert gradient is None or torch.equal(leaf.grad, gradient)
