"""The model that hooks are put on is HuggingFace's."""

from __future__ import annotations

from typing import Any

import torch

from tests.fuzz.mirror import Mirror
from tests.support.checkpoints import LONG
from tests.support.compare import assert_close, relative_error
from tests.support.oracle import Oracle

IDS = LONG[:20]


@torch.no_grad()
def test_every_value_is_huggingfaces(hf: Oracle) -> None:
    """What each of its modules returns is what HuggingFace's forward has there."""
    mirror, seen = Mirror(hf.model), {}

    def record(path: str) -> Any:
        def hook(module: Any, args: Any, output: Any) -> None:
            seen.setdefault(path, output)  # of a shared module the first call

        return hook

    for path, module in mirror.named_modules():
        module.register_forward_hook(record(path))
    right = hf.reads(IDS, range(hf.layer_count))
    logits = mirror.step(torch.tensor(IDS)) @ mirror.head.T
    assert_close(logits, right["logits"], right["logits"].roll(1, -1))
    compared = [path for path in seen if f"{path}.output" in right]
    assert len(compared) == 48
    for path in compared:
        assert relative_error(seen[path], right[f"{path}.output"]) < 1e-4, path


@torch.no_grad()
def test_tokens_of_several_steps_are_huggingfaces(hf: Oracle) -> None:
    """Keys and values are kept from step to step."""
    mirror, tokens = Mirror(hf.model), []
    ids = torch.tensor(IDS)
    for _ in range(5):
        ids = (mirror.step(ids) @ mirror.head.T).argmax(-1)
        tokens.append(int(ids))
    assert tokens == hf.generate(IDS, 5).tokens
