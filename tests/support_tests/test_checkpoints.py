"""The tiny checkpoints are what the tests assume."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer

from tests.support import checkpoints
from tests.support.checkpoints import CHECKPOINTS, EOS, FURTHER, LONG, A, B, C, checkpoint
from tests.support.oracle import Oracle


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_weights_are_wide(name: str) -> None:
    """Weights have standard deviation 0.15, gains 0.5 to 1.5, and no bias is zero."""
    tensors = load_file(checkpoint(name) / "model.safetensors")
    assert {t.dtype for t in tensors.values()} == {torch.float32}
    for key, tensor in tensors.items():
        if key.endswith("bias"):
            assert (tensor != 0).all(), key
        elif tensor.ndim == 1:
            assert 0.5 <= float(tensor.min()) < 0.7 < 1.3 < float(tensor.max()) <= 1.5, key
        else:
            assert 0.14 < float(tensor.std()) < 0.16, key
    assert any(key.endswith("bias") for key in tensors) == (name == "T-GPT2")


def test_sizes_suit_the_fixtures() -> None:
    """Sizes are the ones that catch assumptions about heads, vocabulary and length."""
    llama, qwen3, gpt2 = (AutoConfig.from_pretrained(checkpoint(n)) for n in CHECKPOINTS)
    for config in (llama, qwen3):
        assert (config.num_attention_heads, config.num_key_value_heads) == (4, 2)
        assert config.head_dim == 64 != config.hidden_size // config.num_attention_heads
        assert (config.vocab_size, config.tie_word_embeddings) == (128, False)
        assert config.max_position_embeddings >= 512
    assert (gpt2.vocab_size, gpt2.tie_word_embeddings) == (101, True)
    assert gpt2.hidden_size // gpt2.num_attention_heads == 64
    assert gpt2.max_position_embeddings >= 512
    assert [len(ids) for ids in (A, B, C, LONG)] == [5, 3, 9, 300]
    assert max(A + B + C + LONG) < gpt2.vocab_size


def test_same_recipe_gives_same_bytes(tmp_path: Path) -> None:
    """Two folders written apart hold the same files with the same content."""
    one, two = (checkpoint("T-LLAMA", tmp_path / part) for part in "ab")
    assert one != two
    assert one.name == two.name
    content = [{f.name: f.read_bytes() for f in folder.iterdir()} for folder in (one, two)]
    assert content[0] == content[1]
    assert {"config.json", "generation_config.json", "model.safetensors"} == set(content[0])


def test_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that is there is not written again; another recipe gets another folder."""
    folder = checkpoint("T-GPT2", tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "_write", None)
        assert checkpoint("T-GPT2", tmp_path) == folder
    monkeypatch.setattr(checkpoints, "SEED", checkpoints.SEED + 1)
    assert checkpoint("T-GPT2", tmp_path) != folder


def test_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that breaks off leaves no folder that a later run would take for a checkpoint."""

    def fail(folder: Path, **_: object) -> None:
        (folder / "config.json").write_text("{")
        raise OSError("disk full")

    monkeypatch.setattr(checkpoints, "_write", fail)
    with pytest.raises(OSError, match="disk full"):
        checkpoint("T-LLAMA", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_lost_race_keeps_the_first_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When another process finishes first, its folder is used and nothing else is left."""

    def write_after_another(folder: Path, **_: object) -> None:
        (folder / "config.json").write_text("second")
        winner = tmp_path / checkpoints._folder_name("T-LLAMA", CHECKPOINTS["T-LLAMA"], False)
        winner.mkdir()
        (winner / "config.json").write_text("first")

    monkeypatch.setattr(checkpoints, "_write", write_after_another)
    folder = checkpoint("T-LLAMA", tmp_path)
    assert (folder / "config.json").read_text() == "first"
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_tokenizer_maps_words_to_their_numbers(name: str) -> None:
    """Word ``t<i>`` is token ``i``, special tokens included, in both directions."""
    folder = checkpoint(name, with_tokenizer=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = [*A, 0, 1, 2, 100]
    text = " ".join(f"t{i}" for i in ids)
    assert tokenizer(text).input_ids == ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token_id == EOS


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_greedy_decoding_never_ends_by_itself(name: str) -> None:
    """No prompt meets the end-of-sequence token, and generations are not one token repeated."""
    oracle = Oracle(checkpoint(name))
    for ids in (A, B, C, LONG):
        tokens = oracle.generate(ids, 16).tokens
        assert EOS not in tokens
        assert len(set(tokens)) >= 5


@pytest.mark.parametrize("name", [*CHECKPOINTS, *FURTHER])
def test_writing_one_leaves_the_recipes_alone(name: str, tmp_path: Path) -> None:
    """What a configuration fills in for one checkpoint does not get into others."""
    before = json.dumps([dict(CHECKPOINTS), dict(FURTHER)])
    checkpoint(name, tmp_path)
    assert json.dumps([dict(CHECKPOINTS), dict(FURTHER)]) == before
