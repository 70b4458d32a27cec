"""The quickstart shows what the demo model is known to say."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "examples" / "quickstart.py"
# from HuggingFace's forward of the same checkpoint in fp32
PARIS, NOT_EDITED = 0.773, 0.369
LENS = {18: " ", 26: " the", 28: " capital", 29: " Paris"}


@pytest.fixture(scope="module")
def quickstart() -> ModuleType:
    """Import the script as a module, which its `__main__` guard allows."""
    spec = spec_from_file_location("quickstart", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_next_token(quickstart: ModuleType, demo_engine: Any) -> None:
    """The prompt goes on with Paris, as likely as HuggingFace has it."""
    token, probability = quickstart.next_token(demo_engine, quickstart.read(demo_engine))
    assert token == " Paris"
    assert probability == pytest.approx(PARIS, abs=2e-3)


def test_lens(quickstart: ModuleType, demo_engine: Any) -> None:
    """The lens covers all layers and positions, and agrees with HuggingFace's at the last one."""
    ids, probability = quickstart.lens(demo_engine)
    assert ids.shape == probability.shape == (30, 5)
    assert {k: demo_engine.tokenizer.decode(int(ids[k, -1])) for k in LENS} == LENS
    assert float(probability[29, -1]) == pytest.approx(PARIS, abs=2e-3)


def test_edit(quickstart: ModuleType, demo_engine: Any) -> None:
    """Without the MLP of layer 11 Paris is gone, as on HuggingFace."""
    logits = quickstart.edit(demo_engine)
    token, probability = quickstart.next_token(demo_engine, logits)
    assert token == " not"
    assert probability == pytest.approx(NOT_EDITED, abs=2e-3)
    paris = demo_engine.tokenizer.encode(" Paris")[0]
    assert float(logits[-1].softmax(-1)[paris]) < 1e-3 < PARIS


def test_heat_map_is_a_picture(quickstart: ModuleType, tmp_path: Path) -> None:
    """Any token can be drawn, formula signs and line breaks included, for any number of layers."""
    tokens = [["$x$", "a\nb", "[/x]"] for _ in range(40)]
    path = tmp_path / "lens.png"
    quickstart.heat_map(tokens, torch.rand(40, 3), ["<", " b", "$"], path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert quickstart.lens_table(tokens, torch.rand(40, 3)).row_count == 40
