"""A checkpoint is loaded as transformers loads it, when it is first needed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from midstream.modeling.transformers.loading import Checkpoint
from tests.support.checkpoints import A, B
from tests.support.local_checkpoints import KINDS, random_model, word_tokenizer

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


# --- the module ----------------------------------------------------------------------------------


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


# --- which class ---------------------------------------------------------------------------------


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


# --- quantised -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["nf4", "fp4", "int4", "4bit", "int8", "8bit"])
def test_a_missing_package_is_told_before_anything_is_read(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quantisation without its package says what to install (H4)."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ImportError, match=f"dtype='{dtype}' needs bitsandbytes and accelerate: pip"
    ):
        Checkpoint("nowhere", dtype=dtype)


@pytest.mark.parametrize(
    ("dtype", "kind", "fields"),
    [
        ("nf4", "BitsAndBytesConfig", {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
        ("int4", "BitsAndBytesConfig", {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
        ("4bit", "BitsAndBytesConfig", {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
        ("fp4", "BitsAndBytesConfig", {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}),
        ("int8", "BitsAndBytesConfig", {"load_in_8bit": True}),
        ("8bit", "BitsAndBytesConfig", {"load_in_8bit": True}),
        ("fp8", "FineGrainedFP8Config", {"weight_block_size": (128, 128)}),
    ],
)
def test_names_of_quantisations_are_configurations(
    dtype: str, kind: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch, folder: Get
) -> None:
    """`dtype` by a quantisation's name is transformers' `quantization_config` (H4)."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    seen: dict[str, Any] = {}

    def from_pretrained(source: str, **arguments: Any) -> torch.nn.Module:
        seen.update(arguments)
        return torch.nn.Linear(1, 1)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", from_pretrained)
    checkpoint = Checkpoint(folder("T-LLAMA"), dtype=dtype)
    assert len(checkpoint.empty().model.layers) == 4
    checkpoint.load()
    assert type(seen["quantization_config"]).__name__ == kind
    assert "dtype" not in seen
    assert {name: getattr(seen["quantization_config"], name) for name in fields} == fields


def test_two_ways_to_quantise_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quantisation's name beside a `quantization_config` is refused (H4)."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    with pytest.raises(TypeError, match="dtype='nf4' and quantization_config are two ways"):
        Checkpoint("nowhere", dtype="nf4", quantization_config={"load_in_8bit": True})


@pytest.mark.parametrize("dtype", ["bf16", "nf8", 4, "nn"])
def test_an_unknown_dtype_is_refused(dtype: Any) -> None:
    """A dtype that is none is refused with those there are (H4)."""
    with pytest.raises(ValueError, match=r"dtype=.*expected 'auto', a torch.dtype .*nf4, fp4"):
        Checkpoint("nowhere", dtype=dtype)


# --- what lies beside it -------------------------------------------------------------------------

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


# --- adapters ------------------------------------------------------------------------------------


def test_adapters_need_peft(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without PEFT an adapter is refused with what to install, before anything is read (H5)."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="needs PEFT: pip install peft"):
        Checkpoint("nowhere", peft="adapter")
    with pytest.raises(ImportError, match="needs PEFT"):
        Checkpoint("nowhere").load_adapter("adapter")
    Checkpoint("nowhere").load_adapter(None)


@pytest.fixture
def adapter(folder: Get, tmp_path: Path) -> Callable[[int], Path]:
    """Write adapters of T-LLAMA's queries, drawn from a seed."""
    peft = pytest.importorskip("peft")

    def write(seed: int) -> Path:
        config = peft.LoraConfig(target_modules=["q_proj"], r=2, lora_dropout=0.5)
        model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(folder("T-LLAMA")), config)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for path, weight in sorted(model.named_parameters()):
                if "lora_" in path:
                    weight.normal_(std=0.3, generator=generator)
        model.save_pretrained(tmp_path / f"{seed}")
        return tmp_path / f"{seed}"

    return write


def _with_peft(folder: Path, adapter: Path) -> torch.Tensor:
    peft = pytest.importorskip("peft")
    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), adapter)
    with torch.no_grad():
        return model.eval()(input_ids=torch.tensor([A])).logits


def _logits(checkpoint: Checkpoint) -> torch.Tensor:
    with torch.no_grad():
        return checkpoint.load()(torch.tensor([A])).logits


def test_an_adapter_is_attached_swapped_and_taken_off(folder: Get, adapter: Any) -> None:
    """Results are PEFT's with each adapter, and the plain model's without one (H5)."""
    first, second = adapter(1), adapter(2)
    source = folder("T-LLAMA")
    checkpoint = Checkpoint(source, peft=first)
    plain = _logits(Checkpoint(source))
    rights = [_with_peft(source, first), _with_peft(source, second)]
    assert min((right - plain).abs().max() for right in rights) > 1e-2
    assert torch.allclose(_logits(checkpoint), rights[0], atol=1e-5)
    checkpoint.load_adapter(second)
    assert checkpoint.adapter == str(second)
    assert torch.allclose(_logits(checkpoint), rights[1], atol=1e-5)
    checkpoint.load_adapter(None)
    assert torch.equal(_logits(checkpoint), plain)
    paths = [path for path, _ in checkpoint.load().named_modules()]
    assert paths == [path for path, _ in Checkpoint(source).load().named_modules()]
    checkpoint.load_adapter(first)
    assert torch.allclose(_logits(checkpoint), rights[0], atol=1e-5)


def test_an_adapter_is_chosen_before_loading(folder: Get, adapter: Any) -> None:
    """The empty tree has the adapter's modules, and loses them with it (H5)."""
    source = folder("T-LLAMA")
    checkpoint = Checkpoint(source, peft=adapter(1))
    paths = [path for path, _ in checkpoint.empty().named_modules()]
    assert "model.layers.0.self_attn.q_proj.base_layer" in paths
    assert all(each.is_meta for each in checkpoint.empty().parameters())
    assert not any(each.training for each in checkpoint.empty().modules())
    assert paths == [path for path, _ in Checkpoint(source, peft=adapter(1)).load().named_modules()]
    checkpoint.load_adapter(None)
    bare = [path for path, _ in checkpoint.empty().named_modules()]
    assert bare == [path for path, _ in Checkpoint(source).empty().named_modules()]
    assert torch.equal(_logits(checkpoint), _logits(Checkpoint(source)))


def test_an_adapter_leaves_the_mode(folder: Get, adapter: Any) -> None:
    """A ready module that trains goes on training with an adapter, which trains too (H5)."""
    checkpoint = Checkpoint(AutoModelForCausalLM.from_pretrained(folder("T-LLAMA")).train())
    checkpoint.load().model.norm.eval()
    checkpoint.load_adapter(adapter(1))
    still = {path for path, each in checkpoint.load().named_modules() if not each.training}
    assert still == {"model.norm"}


def test_gradients_flow_beside_an_adapter(folder: Get, adapter: Any) -> None:
    """Weights take gradients with an adapter as they do without one (H22)."""
    module = Checkpoint(folder("T-LLAMA"), peft=adapter(1)).load()
    assert not module.training
    module(torch.tensor([B])).logits.sum().backward()
    assert module.model.embed_tokens.weight.grad is not None
    assert module.model.layers[0].self_attn.q_proj.lora_A["default"].weight.grad is not None
