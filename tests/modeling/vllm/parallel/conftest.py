"""Engines whose model is divided among two ranks, each a process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from midstream import VLLM
from tests.conftest import TINY
from tests.modeling.vllm.conftest import live, plain_tokens
from tests.support.checkpoints import checkpoint
from tests.support.oracle import Oracle

RANKS = {**TINY, "tensor_parallel_size": 2}


@pytest.fixture(scope="package")
def divided() -> Iterator[Any]:
    """An engine on T-LLAMA, with two heads and one head of keys on each rank."""
    path = str(checkpoint("T-LLAMA", with_tokenizer=True))
    settings = {**RANKS, "max_num_seqs": 24, "block_timeout": 1.5}
    with VLLM(path, dispatch=True, **settings) as model:
        yield model


@pytest.fixture(scope="package")
def usual(divided: Any) -> list[int]:
    """What it generates without a block."""
    return plain_tokens(divided)


@pytest.fixture
def two(divided: Any, usual: list[int]) -> Iterator[Any]:
    """That engine; afterwards no rank may hold a block, and it must generate what it always did."""
    yield divided
    assert live(divided) == [0]
    assert plain_tokens(divided) == usual


@pytest.fixture(scope="package")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of all of a layer's projections, for T-MQA."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = peft.LoraConfig(target_modules=names, r=8, lora_dropout=0.0)
    loaded = AutoModelForCausalLM.from_pretrained(checkpoint("T-MQA", with_tokenizer=True))
    model = peft.get_peft_model(loaded, config)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for path, weight in sorted(model.named_parameters()):
            if "lora_" in path:
                weight.normal_(std=0.2, generator=generator)
    folder = tmp_path_factory.mktemp("adapter")
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="package")
def one_key_head(adapter: Path) -> Iterator[Any]:
    """An engine on T-MQA, whose ranks have copies of one head of keys, with adapters on."""
    path = str(checkpoint("T-MQA", with_tokenizer=True))
    with VLLM(path, dispatch=True, enable_lora=True, max_lora_rank=8, **RANKS) as model:
        yield model


@pytest.fixture(scope="package")
def adapted(adapter: Path) -> Oracle:
    """HuggingFace's model with the adapter merged into its weights."""
    import peft

    oracle = Oracle(checkpoint("T-MQA", with_tokenizer=True))
    oracle.model = peft.PeftModel.from_pretrained(oracle.model, adapter).merge_and_unload().eval()
    return oracle
