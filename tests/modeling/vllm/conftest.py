"""What tests of traces share: HuggingFace's answers, and a look into the engine."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from midstream.modeling.vllm import bootstrap
from tests.support.checkpoints import checkpoint
from tests.support.oracle import Oracle

# The oracle's HuggingFace model imports Triton, which has to be prepared for the engine first.
bootstrap.prepare_process(bootstrap.installed())


@pytest.fixture(scope="session")
def oracle() -> Callable[[str], Oracle]:
    """Give the oracles of the tiny checkpoints by name, each loaded once."""
    return cache(lambda name: Oracle(checkpoint(name, with_tokenizer=True)))


@pytest.fixture(scope="session")
def demo_oracle(demo_path: Path) -> Oracle:
    """The oracle of the demo model."""
    return Oracle(demo_path)


@pytest.fixture(scope="session")
def hf(oracle: Callable[[str], Oracle]) -> Oracle:
    """The oracle of T-LLAMA."""
    return oracle("T-LLAMA")


@pytest.fixture
def serving(llama: Any) -> Any:
    """The engine on T-LLAMA; afterwards it must hold no block and generate what it did before."""
    before = plain_tokens(llama)
    yield llama
    assert live(llama) == [0]
    assert plain_tokens(llama) == before


def plain_tokens(model: Any, ids: Any = (21, 22, 23), **settings: Any) -> list[int]:
    """Tokens of a request without a block, greedy by default."""
    from vllm import SamplingParams

    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 3, **settings})
    prompt = {"prompt_token_ids": list(ids)}
    (output,) = model.vllm_entrypoint.generate([prompt], params, use_tqdm=False)
    return list(output.outputs[0].token_ids)


def live(model: Any) -> list[int]:
    """How many blocks each worker of the engine holds."""
    counts: list[int] = model.vllm_entrypoint.collective_rpc("midstream_live")
    return counts
