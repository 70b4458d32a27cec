"""A task, or the checkpoint itself, says which class loads it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from midstream.modeling.transformers.loading import Checkpoint

Get = Callable[[str], Any]


def test_a_task_chooses_the_class(folder: Get) -> None:
    """`task=` loads the checkpoint with another head, by a task's name or alias (H1)."""
    body = Checkpoint(folder("T-LLAMA"), task="feature-extraction").load()
    assert type(body).__name__ == "LlamaModel"
    classes = Checkpoint(folder("T-LLAMA"), task="sentiment-analysis")
    assert (type(classes.empty()).__name__, classes.task) == (
        "LlamaForSequenceClassification",
        "text-classification",
    )
    recogniser = Checkpoint(folder("T-WHISPER"), task="automatic-speech-recognition").empty()
    assert type(recogniser).__name__ == "WhisperForConditionalGeneration"


def test_an_unknown_task_names_the_nearest() -> None:
    """A task that transformers does not have is refused before anything is read (H2)."""
    with pytest.raises(ValueError, match=r"task='text-generatio'.*Did you mean 'text-generation'"):
        Checkpoint("nowhere", task="text-generatio")
    with pytest.raises(
        ValueError, match=r"There are any-to-any, audio-classification, .*zero-shot"
    ):
        Checkpoint("nowhere", task="qqqq")


@pytest.mark.parametrize("architectures", [None, ["SomethingElse"]])
def test_a_class_that_cannot_be_told_is_asked_for(
    architectures: list[str] | None, folder: Get, tmp_path: Path
) -> None:
    """A configuration that names no class, or one nobody has, asks for `task=` (H2)."""
    config = json.loads((folder("T-LLAMA") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": architectures}))
    with pytest.raises(ValueError, match=r"model type 'llama'.*Pass task="):
        Checkpoint(tmp_path).empty()
    assert len(Checkpoint(tmp_path, task="text-generation").empty().model.layers) == 4
    with pytest.raises(ValueError, match="Linear is no class that transformers has a task for"):
        _ = Checkpoint(torch.nn.Linear(1, 1)).task


REMOTE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own-kind"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_code_in_the_checkpoint_is_trusted_when_told(folder: Get, tmp_path: Path) -> None:
    """A checkpoint with code of its own loads with `trust_remote_code`, as tree and module (H1)."""
    source = tmp_path / "own"
    shutil.copytree(folder("T-LLAMA"), source)
    config = json.loads((source / "config.json").read_text())
    config |= {
        "model_type": "own-kind",
        "architectures": ["OwnForCausalLM"],
        "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"},
    }
    (source / "config.json").write_text(json.dumps(config))
    (source / "own.py").write_text(REMOTE)
    checkpoint = Checkpoint(source, trust_remote_code=True)
    assert type(checkpoint.empty()).__name__ == "OwnForCausalLM"
    assert type(checkpoint.load()).__name__ == "OwnForCausalLM"
    assert checkpoint.task == "text-generation"
    with pytest.raises(ValueError, match="trust_remote_code"):
        Checkpoint(source, trust_remote_code=False).empty()
