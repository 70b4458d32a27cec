"""The example of attribution: an estimate from one gradient beside true patches."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

EXAMPLE = Path(__file__).parents[2] / "examples" / "attribution.py"
LAYERS = (0, 12, 29)


@pytest.fixture
def example() -> ModuleType:
    """The example as a module."""
    spec = importlib.util.spec_from_file_location("attribution_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_estimates_agree_with_patches(example: ModuleType, demo_path: Path, tmp_path: Path) -> None:
    """One gradient finds the places that patches find, and both are drawn."""
    from midstream import TransformersModel

    model = TransformersModel(demo_path, dtype=torch.float32)
    ids = [model.tokenizer(answer)["input_ids"][0] for answer in example.ANSWERS]
    estimated, clean = example.attribution(model, ids)
    true = example.patching(model, ids, clean, LAYERS)
    assert estimated.shape == (30, 5)
    assert true.abs().argmax(1).tolist() == [3, 3, 4] == estimated[list(LAYERS)].argmax(1).tolist()
    agreement = torch.corrcoef(torch.stack([estimated[list(LAYERS)].flatten(), true.flatten()]))
    assert agreement[0, 1] > 0.9
    picture = tmp_path / "map.png"
    example.draw({"estimated": estimated, "patched": true}, list("abcde"), picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
