"""The module tree: navigated without weights, printed, renamed, and the same where blocks run."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from midstream import VLLM
from midstream.errors import InterventionError, MidstreamWarning
from midstream.interleaving.node import Node, Tree
from tests.conftest import TINY
from tests.support.checkpoints import A, checkpoint

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 1}
RENAME = {"model.layers": ["blocks", "stack"], "mlp": "ff", "model.norm": "last_norm"}


def path(name: str = "T-LLAMA") -> str:
    """A checkpoint's folder."""
    return str(checkpoint(name, with_tokenizer=True))


@pytest.fixture(scope="module")
def tree() -> VLLM:
    """A model without an engine."""
    return VLLM(path(), **TINY)


@pytest.fixture(scope="module")
def renamed() -> Iterator[VLLM]:
    """A model with further names, whose engine the first trace builds."""
    with VLLM(path(), rename=RENAME, additional_config={"mine": 3}, **TINY) as model:
        yield model


# --- without an engine ---------------------------------------------------------------------------


def test_model_without_an_engine(tree: VLLM) -> None:
    """Only the tree and the tokenizer are there: no weights, no engine (A5, A9, A13)."""
    assert not tree.dispatched
    assert tree.vllm_entrypoint is None
    assert tree.taps == ()
    root = tree.tree.modules[""]
    assert len(list(root.parameters())) > 20
    assert all(tensor.is_meta for tensor in (*root.parameters(), *root.buffers()))
    assert tree.lm_head.weight.shape == (128, 128)


def test_tokenizer_has_a_padding_token(tree: VLLM, demo_engine: Any) -> None:
    """The tokenizer is the checkpoint's; where it has no padding token the end token serves.

    (A5, A17).
    """
    assert tree.tokenizer("t11 t12")["input_ids"] == [11, 12]
    for model in (tree, demo_engine):
        assert model.tokenizer.pad_token is not None
    batch = demo_engine.tokenizer(["Paris", "The capital of France"], padding=True)["input_ids"]
    assert len(batch[0]) == len(batch[1])


def test_model_without_a_tokenizer() -> None:
    """With `skip_tokenizer_init` there is none."""
    assert VLLM(path(), skip_tokenizer_init=True, **TINY).tokenizer is None


def test_model_is_not_pickled(tree: VLLM) -> None:
    """A model holds an engine; inside its own trace it goes by name."""
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(tree)


# --- navigating ----------------------------------------------------------------------------------


def test_paths(tree: VLLM) -> None:
    """Attributes, indices and dotted paths lead to the same node (A45)."""
    node = tree.model.layers[2].mlp
    assert isinstance(node, Node)
    assert node.path == "model.layers.2.mlp"
    assert node is tree.get("model.layers.2.mlp")
    assert node is tree.model.get("layers.2.mlp")
    assert node is tree.model.layers["2"].mlp
    assert node is tree.model.layers[-2].mlp
    assert tree.get("") is tree.tree.root
    assert tree.tree.root.path == ""


def test_module_lists(tree: VLLM) -> None:
    """They have a length, can be iterated, sliced, and end where they end (A45)."""
    layers = tree.model.layers
    assert len(layers) == 4
    assert [layer.path for layer in layers] == [f"model.layers.{i}" for i in range(4)]
    assert layers[1:3] == [layers[1], layers[2]]
    assert layers[::-1] == list(layers)[::-1]
    assert [node.path for node in tree] == ["model", "lm_head", "logits_processor"]
    with pytest.raises(IndexError, match="has 4 submodules"):
        layers[4]
    with pytest.raises(KeyError, match="among its 4 submodules"):
        layers["4"]


def test_modules_are_listed_children_first(tree: VLLM) -> None:
    """Every module once, below itself, and the root at the end (A45)."""
    pairs = tree.named_modules()
    paths = [p for p, _ in pairs]
    assert len(set(paths)) == len(paths) == len({id(node) for _, node in pairs})
    assert paths[-1] == ""
    assert paths[0] == "model.embed_tokens"
    for index, below in enumerate(paths[:-1]):
        assert below.rpartition(".")[0] in paths[index + 1 :]
    assert all(node.path == p for p, node in pairs)
    assert tree.modules() == [node for _, node in pairs]


def test_modules_by_a_condition(tree: VLLM) -> None:
    """A function chooses, and paths come along if asked."""
    chosen = tree.modules(lambda node: node.path.endswith(".mlp"), names=True)
    assert chosen == [(f"model.layers.{i}.mlp", tree.model.layers[i].mlp) for i in range(4)]
    inner = tree.model.layers[1].modules(lambda node: not len(node))
    assert all(node.path.startswith("model.layers.1.") for node in inner[:2])


def test_shared_module_is_one_node() -> None:
    """By whatever path it is reached, it is the node of its first path (A47)."""
    gpt2 = VLLM(path("T-GPT2"), **TINY)
    first = gpt2.transformer.h[0].mlp.act
    assert first is gpt2.transformer.h[3].mlp.act
    assert first.path == "transformer.h.0.mlp.act"
    assert [p for p, _ in gpt2.named_modules() if p.endswith("mlp.act")] == [first.path]


def test_module_of_two_names_in_one_parent() -> None:
    """Both names lead to its node (A47)."""
    parent = torch.nn.Module()
    parent.one = parent.other = torch.nn.Linear(2, 2)
    parent.nothing = None
    root = Tree(parent).root
    assert isinstance(root.other, Node)
    assert root.other is root.one


def test_attributes_of_the_module(tree: VLLM) -> None:
    """What is no submodule is the module's own attribute: parameters, sizes, methods."""
    assert tree.model.layers[0].mlp.act_fn.path == "model.layers.0.mlp.act_fn"
    assert isinstance(tree.model.norm.weight, torch.nn.Parameter)
    assert tree.model.layers[0].self_attn.num_heads == 4


def test_unknown_attribute(tree: VLLM) -> None:
    """The error lists the submodules there are."""
    with pytest.raises(AttributeError, match=r"'model\.layers\.0' \(LlamaDecoderLayer\) .*'mpl'"):
        tree.model.layers[0].mpl
    with pytest.raises(AttributeError, match="self_attn, mlp, input_layernorm"):
        tree.model.layers[0].mpl
    with pytest.raises(AttributeError, match="Its submodules: model, lm_head, logits_processor"):
        tree.transformer
    assert not hasattr(tree.model, "layer")
    assert {"layers", "norm", "output", "get"} <= set(dir(tree.model))
    assert {"model", "logits", "trace"} <= set(dir(tree))


def test_unknown_attribute_cannot_be_assigned(tree: VLLM) -> None:
    """A misspelled location is refused instead of kept where nobody reads it."""
    with pytest.raises(AttributeError, match="'outputs' of a module cannot be assigned"):
        tree.model.layers[0].outputs = 0
    with pytest.raises(AttributeError, match="'mlp' of a module cannot be assigned"):
        tree.model.layers[0].mlp = 0
    for name in ("logit", "sample", "model"):
        with pytest.raises(AttributeError, match=f"'{name}' of the model cannot be assigned"):
            setattr(tree, name, 0)


def test_misspelled_location_of_a_block(llama: Any) -> None:
    """So is one in a block, at its line."""
    for block in (
        lambda model, tracer: setattr(model, "logit", torch.zeros(1, 128)),
        lambda model, tracer: setattr(model.model.layers[0], "out", torch.zeros(1, 128)),
    ):
        with pytest.raises(InterventionError, match="AttributeError: .* cannot be assigned"):
            llama.trace(A, block=block, **GREEDY)


def test_submodule_called_like_a_served_value() -> None:
    """It moves aside, with a warning, so that the location keeps its name (A46)."""
    parent = torch.nn.Module()
    parent.output = torch.nn.Linear(2, 3)
    with pytest.warns(MidstreamWarning, match="mounted as 'E_output'"):
        root = Tree(parent).root
    assert root.E_output.path == "output"
    assert root.E_output.weight.shape == (3, 2)


# --- printing and renaming -----------------------------------------------------------------------


def test_printed_tree(tree: VLLM) -> None:
    """It reads as PyTorch prints modules, every layer included."""
    lines = repr(tree).splitlines()
    assert lines[0] == "LlamaForCausalLM("
    assert "  (model): LlamaModel(" in lines
    assert sum("LlamaDecoderLayer(" in line for line in lines) == 4
    assert repr(tree.model.norm) == "RMSNorm(hidden_size=128, eps=1e-06)"
    assert repr(tree.model.layers[0].mlp).startswith("LlamaMLP(\n  (gate_up_proj): MergedColumn")


def test_printed_aliases(renamed: VLLM) -> None:
    """Further names stand beside the module's own (A43)."""
    text = repr(renamed)
    assert "(layers, blocks, stack): ModuleList(" in text
    assert text.count("(mlp, ff): LlamaMLP(") == 4


def test_aliases(renamed: VLLM) -> None:
    """A full path is also reachable from the root, a last part wherever it occurs (A43)."""
    layers = renamed.model.layers
    assert renamed.model.blocks is renamed.model.stack is layers
    assert renamed.blocks is renamed.stack is layers
    assert renamed.blocks[1].ff is layers[1].mlp
    assert renamed.get("blocks.1.ff") is layers[1].mlp
    assert renamed.last_norm is renamed.model.norm
    assert "ff" in dir(layers[0])
    assert [p for p, _ in renamed.named_modules() if "blocks" in p] == []


def test_alias_of_the_same_name() -> None:
    """A path may be given its own last part, to be reachable from the root."""
    model = VLLM(path(), rename={"model.layers": "layers"}, **TINY)
    assert model.layers is model.model.layers
    assert "(layers): ModuleList(" in repr(model)


@pytest.mark.parametrize(
    ("rename", "text"),
    [
        ({"model.layer": "blocks"}, "no module is called 'model.layer'"),
        ({"mpl": "ff"}, "no module is called 'mpl'"),
        ({"model.layers": "norm"}, "'model' already has something called 'norm'"),
        ({"mlp": "output"}, "already has something called 'output'"),
        ({"mlp": "ff", "self_attn": "ff"}, "already has something called 'ff'"),
        ({"model.layers": "logits"}, "'logits' is taken by VLLM.logits"),
        ({"lm_head": "trace"}, "'trace' is taken by VLLM.trace"),
    ],
)
def test_rename_that_cannot_be(rename: dict[str, str], text: str) -> None:
    """An unknown module, or a name that is taken, is a ValueError at construction."""
    with pytest.raises(ValueError, match=text):
        VLLM(path(), rename=rename, **TINY)


# --- with an engine ------------------------------------------------------------------------------


def test_first_trace_builds_the_engine(renamed: VLLM) -> None:
    """Nodes taken before are those of the engine's model, and further names work in blocks.

    (O1, A5, A10, A16, A43, case 46).
    """
    layer, before = renamed.model.layers[1], renamed.tree
    assert not renamed.dispatched
    with renamed.trace(A, **GREEDY):
        inner = renamed.blocks[1].ff.output.save()
        outer = layer.output.save()
        normed = renamed.last_norm.output.save()
    assert renamed.dispatched
    assert type(renamed.vllm_entrypoint).__name__ == "LLM"
    assert renamed.tree is before
    assert torch.equal(inner, outer[0])
    assert normed[0].shape == (5, 128)
    form = renamed.trace(A, block=lambda model, tracer: model.stack[1].ff.output, **GREEDY)
    assert torch.equal(form.saves["return"], inner)
    entrypoint = renamed.vllm_entrypoint
    renamed.dispatch()
    assert renamed.vllm_entrypoint is entrypoint


def test_a_users_own_configuration_is_kept(renamed: VLLM) -> None:
    """What a user puts beside the further names of modules is in the engine's settings (A29)."""
    renamed.dispatch()
    assert renamed.vllm_entrypoint.llm_engine.vllm_config.additional_config["mine"] == 3
    assert renamed.blocks is renamed.model.layers


def test_locations_are_named_by_path_not_by_alias(renamed: VLLM) -> None:
    """Errors show where a location is in the model."""
    with pytest.raises(InterventionError, match=r"'model\.model\.layers\.0\.mlp\.output\.i0'"):
        renamed.trace(
            A, block=lambda model, tracer: (model.logits, model.blocks[0].ff.output), **GREEDY
        )


def test_the_environment_of_other_processes_is_left_alone(llama: Any) -> None:
    """What vLLM preloads into its own processes does not reach others that this one starts."""
    assert llama.dispatched
    assert "libgomp" not in os.environ.get("LD_PRELOAD", "")
