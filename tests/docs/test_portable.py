"""The recipes' blocks, run on an engine and on HuggingFace, give the same."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from docs_snippets import Snippet, run_snippets, snippets

RECIPES = Path(__file__).parents[2] / "docs" / "recipes.md"
ONLY_ON_AN_ENGINE = "layer.attn.inputs"  # the last recipe


@pytest.fixture(scope="module")
def portable() -> list[Snippet]:
    """The recipes that the page says run on both."""
    found = [each for each in snippets(RECIPES) if ONLY_ON_AN_ENGINE not in each.code]
    assert len(found) == len(snippets(RECIPES)) - 1
    return found


@pytest.fixture(scope="module")
def local_model(demo_path: Path) -> Any:
    """The demo model on HuggingFace."""
    from midstream.modeling.transformers import TransformersModel

    return TransformersModel(demo_path, dtype=torch.float32)


def run_on(model: Any, recipes: list[Snippet], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run the page's programs on a model, comparing what they print; the names they leave."""
    import midstream

    with monkeypatch.context() as patch:
        patch.setattr(midstream, "VLLM", lambda repo, **arguments: model)
        module = ModuleType("recipes")
        with asyncio.Runner() as runner:
            run_snippets(recipes, module, runner)
        return dict(vars(module))


def test_recipes_run_on_both_backends(
    portable: list[Snippet], demo_engine: Any, local_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One block, two backends: a recipe prints the same and its values agree within 1e-3."""
    engine = run_on(demo_engine, portable, monkeypatch)
    local = run_on(local_model, portable, monkeypatch)
    assert engine["lens"] == local["lens"]
    assert engine["answers"] == local["answers"]
    assert engine["said"] == local["said"]
    streams = zip(engine["clean"], local["clean"], strict=True)
    worst = max(float(((a - b).abs().max() / a.abs().max()).detach()) for a, b in streams)
    apart = float((engine["clean"][0] - engine["clean"][-1]).abs().max())
    assert apart > 10 * 1e-3  # another layer's stream would not pass
    assert worst < 1e-3
    assert engine["left"] == pytest.approx(local["left"], abs=1e-3)
    assert max(engine["left"]) - min(engine["left"]) > 10 * 1e-3
    assert torch.allclose(engine["direction"], local["direction"].cpu(), atol=1e-2, rtol=1e-3)


def test_the_rebuilt_pattern_is_what_eager_attention_returns(
    demo_engine: Any, demo_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recipe's attention pattern is HuggingFace's, which is read as the page says."""
    from midstream.modeling.transformers import TransformersModel

    whole = snippets(RECIPES)
    wanted = [whole[0], *(each for each in whole if ONLY_ON_AN_ENGINE in each.code)]
    rebuilt = run_on(demo_engine, wanted, monkeypatch)["pattern"]
    model = TransformersModel(demo_path, dtype=torch.float32, attn_implementation="eager")
    with model.trace("The capital of France is"):
        pattern = model.model.layers[4].self_attn.output[1].save()
        other = model.model.layers[5].self_attn.output[1].save()
    assert pattern.shape == (1, 9, 5, 5)
    assert (other[0] - rebuilt).abs().max() > 10 * 1e-4
    assert torch.allclose(pattern[0], rebuilt, atol=1e-4)
