"""`model.check()`: the table that compares an engine with HuggingFace's forward."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from midstream import VLLM
from midstream.errors import UnsupportedError
from midstream.modeling.vllm.checking.report import Check, Row
from tests.conftest import TINY
from tests.support.checkpoints import C, checkpoint

LAYERS, LAYER = 4, 1


@pytest.fixture
def broken(llama: Any) -> Iterator[Any]:
    """The engine on T-LLAMA, in which an edit changes what a layer's attention puts out."""
    with llama.edit(name="louder") as (_, edit):
        llama.model.layers[LAYER].self_attn.output[:] *= 1.01
    yield llama
    edit.clear()


@pytest.fixture
def other_weights(tmp_path: Path) -> Path:
    """T-LLAMA's checkpoint, in which one layer's MLP has other weights."""
    folder = tmp_path / "other"
    shutil.copytree(checkpoint("T-LLAMA", with_tokenizer=True), folder)
    weights = load_file(folder / "model.safetensors")
    weights[f"model.layers.{LAYER}.mlp.down_proj.weight"] *= 1.01
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def failed(check: Check) -> list[str]:
    """Names of the comparisons that failed, in the order of the forward."""
    return [row.name for row in check.failures]


def test_a_right_engine_passes(llama: Any) -> None:
    """Every layer's stream, attention and MLP, norm, logits and two writes are equal (case 100)."""
    check = llama.check(C)
    assert check.passed
    assert check.stream == "sum(layer.output)"
    parts = [f"{part} {i}" for i in range(LAYERS) for part in ("attention", "mlp", "stream")]
    writes = ["mlp 2 = 0", "stream 2 steered"]
    assert [row.name for row in check] == [*parts, "final norm", "logits", *writes]
    assert all(row.error < 1e-5 < 0.1 < row.mixed_up for row in check)
    assert str(check).splitlines()[0].strip() == "model.check(): passed"


def test_the_demo_model_passes(demo_engine: Any) -> None:
    """On SmolLM2, a text given, all thirty layers are equal."""
    check = demo_engine.check("The capital of France is")
    check.raise_for_failure()
    assert sum(row.name.startswith("stream ") for row in check) == 31


def test_a_layer_that_differs_is_named(broken: Any) -> None:
    """An edit that is installed fails the check at its place, and the table says that it ran."""
    check = broken.check(C)
    assert not check.passed
    assert failed(check)[0] == f"attention {LAYER}"
    assert "stream 0" not in failed(check)
    assert "logits" in failed(check)
    text = str(check)
    assert f"model.layers.{LAYER}.self_attn" in text
    assert "'louder'" in text
    with pytest.raises(AssertionError, match=f"attention {LAYER}"):
        check.raise_for_failure()


def test_other_weights_are_found(
    llama: Any, other_weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine whose checkpoint has changed on the disk since it was loaded is told by layer."""
    monkeypatch.setitem(vars(llama), "repo", str(other_weights))
    check = llama.check(C)
    assert failed(check)[0] == f"mlp {LAYER}"


def test_a_write_that_does_not_land_fails(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where reads are right and a write is lost, the writes fail and nothing else does."""
    from midstream.interleaving.structure import flatten
    from midstream.modeling.vllm.checking import blocks

    monkeypatch.setattr(blocks, "first", lambda value: flatten(value)[0][0].clone())
    assert failed(llama.check(C)) == ["mlp 2 = 0", "stream 2 steered"]


def test_layers_are_chosen(llama: Any) -> None:
    """Only the layers that are asked for are read, and the middle one of them is written to."""
    check = llama.check(C, layers=[0, -1])
    assert [row.name for row in check if row.name.startswith("stream")] == [
        "stream 0",
        "stream 3",
        "stream 3 steered",
    ]
    with pytest.raises(IndexError, match="the model has 4 layers; got the index 4"):
        llama.check(C, layers=[4])


def test_a_tolerance_that_nothing_meets_fails(llama: Any) -> None:
    """The tolerance is the caller's."""
    assert len(llama.check(C, tolerance=1e-12).failures) > LAYERS


def test_experts_are_checked() -> None:
    """On a mixture of experts routers are read, and one expert is ablated (B30)."""
    from tests.support.groups import give_experts_a_group

    give_experts_a_group()
    with VLLM(str(checkpoint("T-MIXTRAL")), skip_tokenizer_init=True, **TINY) as model:
        check = model.check()
    check.raise_for_failure()
    names = [row.name for row in check]
    assert [f"router {i}" in names for i in range(LAYERS)] == [True] * LAYERS
    assert "expert" in names[-1]


def test_a_model_on_a_server_is_refused(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose checkpoint is elsewhere has nothing here to compare with."""
    monkeypatch.setattr(llama, "_home", ("http://localhost:1", None))
    with pytest.raises(UnsupportedError, match="Run it where the checkpoint is"):
        llama.check(C)


def test_what_cannot_be_told_does_not_pass() -> None:
    """A value that is right, where a mix-up would be right as well, is no pass."""
    row = Row("stream 0", "model.layers.0", 1e-6, 1e-4, 2e-6)
    assert (row.passed, row.verdict) == (False, "cannot tell")
    missing = Row("attention 0", "model.layers.0.attn", float("nan"), 0.0, float("nan"))
    assert (missing.passed, missing.verdict) == (False, "differs")
    assert not Check((), "an engine", "a reference", "layer.output").passed


def test_the_error_is_that_of_the_worst_row() -> None:
    """One wrong row of many shows; so do values that are no numbers, and another shape."""
    from midstream.modeling.vllm.checking.report import row_error

    right = torch.ones(100, 4)
    got = right.clone()
    got[7] *= 3
    assert row_error(got, right) == pytest.approx(2.0)
    assert row_error(right, right) == 0.0
    assert not row_error(got * torch.nan, right) <= 1.0
    assert row_error(right[:50], right) == float("inf")
