"""Blocks that only compute: visited without an exchange of the thread's state around each visit."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import pytest
import torch

from midstream.interleaving import events
from midstream.interleaving.neutral import NEUTRAL
from midstream.interleaving.run import Run, running
from tests.interleaving.test_tapped import Body, Decoding, steps

STATE = (torch.is_inference_mode_enabled, torch.is_grad_enabled)


def as_plain(body: Body) -> Body:
    """The block, taken for one that only computes from its second step on."""

    def plain(at: Decoding) -> None:
        run = running()
        assert isinstance(run, Run)
        run.plain = True
        body(at)

    return plain


def run(*bodies: Body, tapped: bool = False) -> tuple[Decoding, list[Run]]:
    """Run blocks side by side."""
    at = Decoding(tapped=tapped)
    return at, at.run(*bodies)


@pytest.mark.parametrize("tapped", [False, True])
def test_values_and_edits_are_as_for_other_blocks(tapped: bool) -> None:
    """Reads, edits in place and replacements of plain blocks are those of the same blocks else."""
    found: dict[bool, tuple[Any, list[Any]]] = {}
    for plain in (False, True):
        kept: list[Any] = []

        def reading(at: Decoding, kept: list[Any] = kept) -> None:
            for _ in steps():
                kept.extend(at.root.layers[1].output)
                at.root.layers[1].mlp

        def steering(at: Decoding) -> None:
            for step in steps():
                at.root.layers[0].output[1][:] += 3.0 * step
                at.root.layers[2].mlp.output = at.root.layers[2].mlp.output * 2

        bodies = [reading, steering, steering]
        at, runs = run(*(map(as_plain, bodies) if plain else bodies), tapped=tapped)
        assert [one.error for one in runs] == [None] * 3
        found[plain] = at.outputs, kept
    for mine, its in zip(found[True], found[False], strict=True):
        assert len(mine) == len(its) > 3
        assert all(torch.equal(a, b) for a, b in zip(mine, its, strict=True))


def test_a_block_finds_the_state_it_would_have_found() -> None:
    """No inference mode, no gradients; the engine's state is back behind each location."""
    seen: list[Any] = []

    def body(at: Decoding) -> None:
        for _ in steps():
            at.root.layers[1].output
            seen.append([*(ask() for ask in STATE), NEUTRAL.entered])

    before = sys.stdout, [ask() for ask in STATE]
    run(as_plain(body), as_plain(body))
    assert seen == [[False, False, True]] * 8
    assert (sys.stdout, [ask() for ask in STATE]) == before
    assert not NEUTRAL.entered


def test_what_it_warns_about_is_its_own() -> None:
    """A warning that PyTorch gives in a plain block comes home with that block."""

    def warning(at: Decoding) -> None:
        for _ in steps():
            at.root.layers[1].output
            warnings.warn("odd", UserWarning, stacklevel=1)

    def silent(at: Decoding) -> None:
        for _ in steps():
            at.root.layers[1].output

    _, (first, second) = run(as_plain(warning), as_plain(silent))
    assert {notice.message for notice in first.output.notices()} == {"odd"}
    assert list(second.output.notices()) == []


def test_errors_of_writes_and_beside_other_blocks() -> None:
    """A write that is refused ends its block; what others print still leaves the engine's alone."""

    def misfit(at: Decoding) -> None:
        for _ in steps():
            at.root.layers[1].output = torch.zeros(3, 3)

    def printing(at: Decoding) -> None:
        for step in steps():
            at.root.layers[1].output
            print("step", step)

    def failing(at: Decoding) -> None:
        for _ in steps():
            at.root.layers[1].output
            raise KeyError("mine")

    before = sys.stdout
    _, runs = run(as_plain(misfit), printing, as_plain(failing), as_plain(printing))
    assert sys.stdout is before
    assert [type(one.error) for one in runs] == [ValueError, type(None), KeyError, type(None)]
    assert "".join(text for _, text in runs[1].output.prints()).count("step") == 4
    assert "".join(text for _, text in runs[3].output.prints()).count("step") == 4


def test_a_replacement_of_a_value_that_was_read_is_learned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where version counters tell of all edits, as on a GPU, a replacement is known as one, too."""
    monkeypatch.setattr(events, "_is_counted", lambda leaf: isinstance(leaf, torch.Tensor))

    def replacing(at: Decoding) -> None:
        for _ in steps():
            at.root.layers[1].mlp.output = at.root.layers[1].mlp.output + 1
            at.root.layers[2].output

    at, (one,) = run(as_plain(replacing), tapped=True)
    assert one.error is None
    assert at.kinds == ["eager", "eager", "tapped", "tapped", "tapped"]
