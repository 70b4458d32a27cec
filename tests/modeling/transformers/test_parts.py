"""Tokenizer, processors and generation settings of a checkpoint."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig

from midstream.modeling.transformers.loading import Checkpoint
from tests.support.checkpoints import A
from tests.support.local_checkpoints import word_tokenizer

Get = Callable[[str], Any]

PARTS = ("tokenizer", "processor", "image_processor", "feature_extractor")


@pytest.mark.parametrize(
    ("name", "has"),
    [
        ("T-LLAMA", {"tokenizer"}),
        ("T-VIT", {"image_processor"}),
        ("T-WHISPER", {"tokenizer", "processor", "feature_extractor"}),
        ("T-LLAVA", {"tokenizer", "processor", "image_processor"}),
    ],
)
def test_parts_are_what_the_checkpoint_has(name: str, has: set[str], folder: Get) -> None:
    """Tokenizer and processors are loaded when asked for, None where there are none (H6)."""
    checkpoint = Checkpoint(folder(name))
    assert {kind for kind in PARTS if getattr(checkpoint, kind) is not None} == has
    assert all(getattr(checkpoint, kind) is getattr(checkpoint, kind) for kind in PARTS)
    assert not checkpoint.loaded
    assert checkpoint.repo_id == os.fspath(folder(name))
    assert checkpoint.revision is None


def test_a_checkpoint_without_a_tokenizer_has_none(folder: Get, tmp_path: Path) -> None:
    """No tokenizer is made up for a folder without one (H6)."""
    shutil.copy(folder("T-GPT2") / "config.json", tmp_path)
    assert Checkpoint(tmp_path).tokenizer is None
    assert AutoTokenizer.from_pretrained(tmp_path).vocab_size == 0  # the known wrong answer


def test_a_part_that_is_broken_is_no_part_that_is_missing(tmp_path: Path) -> None:
    """A tokenizer's file that cannot be read is transformers' error, not None (H6)."""
    LlamaConfig().save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(Exception, match="EOF|JSON|line 1"):
        _ = Checkpoint(tmp_path).tokenizer


def test_a_part_that_needs_a_package_is_asked_for_only_where_it_is(
    folder: Get, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing package for images is told by an image model, and no matter for audio (H6)."""

    def missing(*source: Any, **arguments: Any) -> Any:
        raise ImportError("install what images need")

    monkeypatch.setattr("transformers.AutoImageProcessor.from_pretrained", missing)
    assert Checkpoint(folder("T-WHISPER")).image_processor is None
    for name in ("T-VIT", "T-LLAVA"):
        with pytest.raises(ImportError, match="install what images need"):
            _ = Checkpoint(folder(name)).image_processor


def test_parts_that_are_passed_win(folder: Get, tmp_path: Path) -> None:
    """An object, or where to load one from, is used instead; a processor brings its own (H1)."""
    tokenizer = word_tokenizer()
    assert Checkpoint(folder("T-LLAMA"), tokenizer=tokenizer).tokenizer is tokenizer
    word_tokenizer(eos_token="t77").save_pretrained(tmp_path)
    other = Checkpoint(folder("T-LLAMA"), tokenizer=tmp_path).tokenizer
    assert (other.eos_token, other.pad_token) == ("t77", "t77")
    processor = Checkpoint(folder("T-LLAVA")).processor
    with_processor = Checkpoint(folder("T-LLAMA"), processor=processor)
    assert with_processor.processor is processor
    assert with_processor.tokenizer is processor.tokenizer
    assert with_processor.image_processor is processor.image_processor


def test_a_tokenizer_pads_with_the_end_of_a_text(tmp_path: Path) -> None:
    """A tokenizer that is loaded has a padding token; one that is passed is not changed (H14)."""
    LlamaConfig().save_pretrained(tmp_path)
    word_tokenizer().save_pretrained(tmp_path)
    assert Checkpoint(tmp_path).tokenizer.pad_token == "t1"
    own = word_tokenizer()
    assert Checkpoint(tmp_path, tokenizer=own).tokenizer.pad_token is None


def test_settings_of_generation_are_the_module_s(folder: Get) -> None:
    """The generation configuration is there before loading and is the module's then (H6)."""
    checkpoint = Checkpoint(folder("T-LLAMA"))
    checkpoint.generation_config.max_new_tokens = 3
    module = checkpoint.load()
    assert module.generation_config is checkpoint.generation_config
    assert module.generate(torch.tensor([A])).shape == (1, len(A) + 3)
    assert Checkpoint(folder("T-BERT")).generation_config is None
