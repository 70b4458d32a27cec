"""Several blocks beside one request: they are served one after the other."""

from __future__ import annotations

from typing import Any

import torch

from midstream.interleaving.copies import Rows
from midstream.interleaving.run import Run
from tests.interleaving.toy import Steps, Toy, rows


def turns(steps: Steps, inputs: list[torch.Tensor], blocks: list[tuple[int, int, Any]]) -> Any:
    """One forward; blocks are (request, turn, what it does), in the order in which they begin."""
    runs = {Run(block): (request, turn) for request, turn, block in blocks}
    ends = torch.tensor([len(part) for part in inputs]).cumsum(0).tolist()
    spans = {}
    for run, (request, run.turn) in runs.items():
        spans[run] = Rows(ends[request] - len(inputs[request]), ends[request])
    steps.interleaver.begin_step(list(runs))
    with torch.no_grad(), steps.interleaver.phase(spans, (ends[-1],)):
        found = steps.model(torch.cat(inputs))
    steps.interleaver.finish_step()
    for run in runs:
        if run.error is not None:
            raise run.error
    return found


def test_a_later_turn_sees_what_an_earlier_wrote() -> None:
    """Turns go by number, whoever waited first, and every one sees the rows as they are by then."""
    steps, seen = Steps(), []
    layer = steps.root.layers[1]

    def late() -> None:
        steps.root.layers[0].output
        hidden = layer.mlp.output
        hidden[:] = 1.0
        seen.append(("first", hidden))

    def middle() -> None:
        layer.mlp.output = layer.mlp.output + 1

    def last() -> None:
        hidden = layer.mlp.output
        seen.append(("last", hidden.clone()))
        hidden *= 10

    other: list[torch.Tensor] = []
    blocks = [(0, 2, last), (1, 0, lambda: other.append(layer.mlp.output)), (0, 1, middle)]
    inputs = [rows(3, 1), rows(2, 2)]
    found = turns(steps, inputs, [*blocks, (0, 0, late)])
    assert [name for name, _ in seen] == ["first", "last"]
    assert [set(value.unique().tolist()) for _, value in seen] == [{1.0}, {2.0}]

    plain = Toy().requires_grad_(False)
    kept: list[torch.Tensor] = []

    def hook(module: Any, args: Any, out: torch.Tensor) -> torch.Tensor:
        kept.append(out[3:].clone())
        out[:3] = 20.0
        return out

    plain.layers[1].mlp.register_forward_hook(hook)
    right = plain(torch.cat(inputs))
    assert not torch.allclose(right, Toy().requires_grad_(False)(torch.cat(inputs)))
    assert torch.equal(found, right)
    assert torch.equal(other[0], kept[0])


def test_what_each_turn_keeps_is_its_own() -> None:
    """A value that one block keeps does not change with what a later turn writes."""
    steps, kept = Steps(), []

    def keep() -> None:
        kept.append(steps.root.layers[0].output[1])

    def zero() -> None:
        value = steps.root.layers[0].output[1]
        value[:] = 0
        kept.append(value)

    turns(steps, [rows(3, 1)], [(0, 0, keep), (0, 1, zero), (0, 2, keep)])
    assert [bool(value.any()) for value in kept] == [True, False, False]
