"""A checkpoint is loaded as transformers loads it, when it is first needed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from midstream.modeling.transformers.loading import Checkpoint
from tests.support.checkpoints import A
from tests.support.local_checkpoints import KINDS, random_model

Get = Callable[[str], Any]

TASKS = {
    "T-LLAMA": "text-generation",
    "T-GPT2": "text-generation",
    "T-GEMMA2": "text-generation",
    "T-HYBRID": "text-generation",
    "T-BERT": "fill-mask",
    "T-BERT-CLASSES": "text-classification",
    "T-LLAMA-CLASSES": "text-classification",
    "T-T5": "text2text-generation",
    "T-BART": "text2text-generation",
    "T-VIT": "image-classification",
    "T-WHISPER": "automatic-speech-recognition",
    "T-LLAVA": "image-text-to-text",
}


@pytest.mark.parametrize("name", TASKS)
def test_the_empty_tree_is_the_loaded_one(name: str, folder: Get) -> None:
    """Without weights all is on the meta device, with the loaded module's class and tree (H3)."""
    checkpoint = Checkpoint(folder(name))
    empty = checkpoint.empty()
    assert all(each.is_meta for each in empty.parameters())
    assert not checkpoint.loaded
    loaded = checkpoint.load()
    assert type(empty) is type(loaded)
    assert [path for path, _ in empty.named_modules()] == [p for p, _ in loaded.named_modules()]
    for mine, right in (
        (empty.named_parameters(), loaded.named_parameters()),
        (empty.named_buffers(), loaded.named_buffers()),
    ):
        shapes = {path: (each.shape, each.dtype) for path, each in mine}
        assert shapes == {path: (each.shape, each.dtype) for path, each in right}
    assert not empty.training
    assert checkpoint.task == TASKS[name]


@pytest.mark.parametrize("name", ["T-GPT2", "T-LLAMA"])
def test_loading_is_that_of_transformers(name: str, folder: Get) -> None:
    """Weights, dtype, mode and device are those of `from_pretrained`, loaded once (H1, case 46)."""
    checkpoint = Checkpoint(str(folder(name)))
    module = checkpoint.load()
    plain = AutoModelForCausalLM.from_pretrained(folder(name))
    assert module.training == plain.training
    right = plain.state_dict()
    assert module.state_dict().keys() == right.keys()
    for path, tensor in module.state_dict().items():
        assert torch.equal(tensor, right[path])
        assert tensor.dtype == right[path].dtype
    ids = torch.tensor([A])
    assert torch.equal(module(ids).logits, plain(ids).logits)
    assert checkpoint.load() is checkpoint.empty() is module
    assert checkpoint.loaded


def test_no_weights_are_read_for_the_tree(folder: Get, tmp_path: Path) -> None:
    """A folder with a configuration alone gives the tree, and an error when it is loaded (H3)."""
    shutil.copy(folder("T-LLAMA") / "config.json", tmp_path)
    checkpoint = Checkpoint(tmp_path)
    assert len(checkpoint.empty().model.layers) == 4
    with pytest.raises(OSError, match="no file named"):
        checkpoint.load()


def test_tied_weights_are_one_in_the_tree(folder: Get) -> None:
    """Head and embedding of a tied model are one parameter, also without weights (H3)."""
    empty = Checkpoint(folder("T-GPT2")).empty()
    assert empty.lm_head.weight is empty.transformer.wte.weight
    untied = Checkpoint(folder("T-LLAMA")).empty()
    assert untied.lm_head.weight is not untied.model.embed_tokens.weight


def test_arguments_reach_from_pretrained(folder: Get) -> None:
    """Dtype, attention and fields of the configuration act on tree and module alike (H1)."""
    arguments = {"attn_implementation": "eager", "num_hidden_layers": 2, "dtype": "bfloat16"}
    checkpoint = Checkpoint(folder("T-LLAMA"), **arguments)
    for module in (checkpoint.empty(), checkpoint.load()):
        assert len(module.model.layers) == 2
        assert module.dtype == torch.bfloat16
        assert module.config._attn_implementation == checkpoint.attn_implementation == "eager"


def test_the_attention_can_be_changed(folder: Get) -> None:
    """`attn_implementation` is assigned before loading and after (H5)."""
    checkpoint = Checkpoint(folder("T-LLAMA"))
    assert checkpoint.attn_implementation == "sdpa"
    checkpoint.attn_implementation = "eager"
    assert checkpoint.empty().config._attn_implementation == "eager"
    assert checkpoint.load().config._attn_implementation == "eager"
    checkpoint.attn_implementation = "sdpa"
    assert checkpoint.load().config._attn_implementation == "sdpa"


def test_a_configuration_that_is_passed_wins(folder: Get) -> None:
    """`config=` is used for the tree and for the module, and is not written into (H1)."""
    config = AutoConfig.from_pretrained(folder("T-LLAMA"), num_hidden_layers=1)
    before = config.to_dict()
    checkpoint = Checkpoint(folder("T-LLAMA"), config=config, dtype="bfloat16")
    assert checkpoint.empty().dtype == torch.bfloat16
    assert config.to_dict() == before
    assert len(checkpoint.empty().model.layers) == len(checkpoint.load().model.layers) == 1
    assert config.to_dict() == before


def test_a_ready_module_is_the_module(local: Get) -> None:
    """A module is taken as it is, with its class's task and no keywords for loading (H2)."""
    module = local("T-BERT").load()
    checkpoint = Checkpoint(module)
    assert checkpoint.load() is checkpoint.empty() is module
    assert (checkpoint.task, checkpoint.config) == ("fill-mask", module.config)
    assert checkpoint.tokenizer.pad_token == "t3"  # from where the module was loaded
    assert Checkpoint(random_model("T-VIT")).tokenizer is None
    with pytest.raises(TypeError, match="dtype, revision: the module is loaded"):
        Checkpoint(module, dtype="bfloat16", revision="main")


def test_a_subclass_has_the_task_of_its_base() -> None:
    """A class derived from a model of transformers has that model's task (H2)."""
    from transformers import LlamaForCausalLM

    class Mine(LlamaForCausalLM):
        pass

    with torch.device("meta"):
        module = Mine(LlamaConfig(num_hidden_layers=1, hidden_size=32))
    assert Checkpoint(module).task == "text-generation"


def test_a_checkpoint_that_is_not_there_is_told() -> None:
    """Nothing is looked for until it is needed; then the error is transformers' own (H3)."""
    checkpoint = Checkpoint("nobody/nothing-of-that-name")
    assert checkpoint.repo_id == "nobody/nothing-of-that-name"
    with pytest.raises(OSError, match="nobody/nothing-of-that-name"):
        checkpoint.empty()


def test_layers_are_those_of_the_text(folder: Get) -> None:
    """Each text decoder's list of layers is as long as its configuration says (case 86)."""
    for name in (*TASKS, *KINDS):
        config = Checkpoint(folder(name)).config.get_text_config()
        if getattr(config, "num_hidden_layers", None) is None or name == "T-VIT":
            continue
        module = Checkpoint(folder(name)).empty()
        lists = [m for m in module.modules() if isinstance(m, torch.nn.ModuleList)]
        assert any(len(each) == config.num_hidden_layers for each in lists), name
