"""Declared taps as users write them: what they name, and what is wrong with those that do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from midstream import VLLM
from midstream.errors import UnsupportedError
from midstream.interleaving.node import Tree
from midstream.modeling.vllm import taps
from tests.conftest import TINY
from tests.support.checkpoints import checkpoint


class Part(torch.nn.Module):
    """A module with operations, one behind a helper."""

    def __init__(self) -> None:
        super().__init__()
        self.act = torch.nn.ReLU()
        self.down = torch.nn.Linear(2, 2)

    def forward(self, value: torch.Tensor, f: Any = None) -> torch.Tensor:
        """Whatever."""
        activated = helper(value)
        return self.down(f(activated))


def helper(value: torch.Tensor) -> torch.Tensor:
    """An operation of an operation."""
    return torch.relu(value)


class Root(torch.nn.Module):
    """A model with a list of parts, and a module at two places."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Linear(2, 2)
        self.layers = torch.nn.ModuleList(Part() for _ in range(12))
        self.tied = self.embed

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Whatever."""
        return value


@pytest.fixture(scope="module")
def tree() -> Tree:
    """The small tree, with further names."""
    return Tree(Root(), {"layers": "blocks", "act": "activation"})


def names(tree: Tree, *patterns: str) -> list[str]:
    """The full names of what patterns name."""
    return [location.name for location in taps.resolve(patterns, tree)]


def problem(tree: Tree, pattern: str) -> str:
    """What is said of a pattern, which it names."""
    with pytest.raises(ValueError, match="taps: ") as failure:
        taps.resolve([pattern], tree)
    assert repr(pattern) in str(failure.value)
    return str(failure.value)


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["embed.input"], ["model.embed.input"]),
        (["output"], ["model.output"]),
        (["layers.3.down.output", "output"], ["model.layers.3.down.output", "model.output"]),
        (["layers.1*.output"], ["model.layers.10.output", "model.layers.11.output"]),
        (["layers.3.source.helper_0.output"], ["model.layers.3.source.helper_0.output"]),
        (
            ["layers.3.source.helper_0.source.torch_relu_0.input"],
            ["model.layers.3.source.helper_0.source.torch_relu_0.input"],
        ),
        (["layers.3.source.helper_0[2].output"], ["model.layers.3.source.helper_0[2].output"]),
        (["blocks.3.activation.output"], ["model.layers.3.act.output"]),
        (["*.output"], ["model.embed.output"]),  # neither the list nor the second place
    ],
)  # fmt: skip
def test_what_taps_name(tree: Tree, patterns: list[str], expected: list[str]) -> None:
    """Sides of modules and of operations, by paths from the root, with further names too.

    (A33, A34, A36).
    """
    assert names(tree, *patterns) == expected


def test_a_star_is_one_part_of_a_path(tree: Tree) -> None:
    """It crosses no dot; the order is that of the patterns, then the tree's (A35, A42, O1)."""
    layers = [f"model.layers.{i}.output" for i in range(12)]
    assert names(tree, "layers.*.output") == layers
    assert names(tree, "embed.output", "layers.*.output", "layers.3.output") == [
        *("model.embed.output", *layers),
    ]
    inner = names(tree, "layers.*.*.output")
    assert inner[:3] == [*(f"model.layers.0.{name}.output" for name in ("act", "down")),
                         "model.layers.1.act.output"]  # fmt: skip
    assert len(inner) == 24
    assert "names no module" in problem(tree, "*.*.*.*.output")


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("layers.3.dwn.output", "Near it: 'layers.3.down.output'"),
        ("layers.*.dwn.output", "Near it: 'layers.*.down.output'"),
        ("model.layers.3.down.output", "Near it: 'layers.3.down.output'"),
        ("layers.12.output", "names no module"),
        ("layers.3.down", "ends in no side"),
        ("layers.3.inputs", "write 'layers.3.input'"),
        ("layers.3.skip", "declare 'layers.3.output'"),
        ("logits", "always served"),
        ("layers.3.source", "layers.3.source.<operation>.output"),
        ("layers.3.source.output", "an operation is written"),
        ("layers.3.source.helper_0.torch_relu_0.output", "an operation is written"),
        ("layers..output", "a part of the path is empty"),
        ("layers.output", "write 'layers.*.output'"),
        ("tied.output", "'embed'"),
        ("layers.3.source.helpr_0.output", "Did you mean 'helper_0'?"),
        ("layers.3.source.self_up_0.output", "operations: helper_0, activated_0, f_0, self_down_0"),
        ("layers.*.source.self_up_0.output", "operations: helper_0, activated_0, f_0, self_down_0"),
        ("layers.3.source.f_0.source.relu_0.output", "known only when it runs"),
        ("layers.3.source.activated_0.source.relu_0.output", "calls nothing"),
        ("layers.3.source.helper_0[x].output", "is not written as 'helper_0[2]' is"),
        ("layers.3.source.helper_0[2.output", "is not written as 'helper_0[2]' is"),
    ],
)
def test_what_names_nothing(tree: Tree, pattern: str, said: str) -> None:
    """It is an error with the tap, what is wrong, and what there is.

    (A33, A36, A37, A38, G1, G2).
    """
    assert said in problem(tree, pattern)


# --- models -------------------------------------------------------------------------------------


def path(name: str = "T-LLAMA") -> str:
    """A tiny checkpoint's folder."""
    return str(checkpoint(name, with_tokenizer=True))


def test_taps_of_a_model_without_an_engine() -> None:
    """They are those that were given until an engine serves them, and never others (A5, A41)."""
    given = ["model.layers.*.output", "model.norm.input"]
    model = VLLM(path(), taps=given, **TINY)
    assert model.taps == tuple(given)
    with pytest.raises(AttributeError):
        model.taps = ()  # type: ignore[misc]


@pytest.mark.parametrize(
    ("tap", "said"),
    [
        ("model.layers.*.mpl.output", r"Near it: 'model\.layers\.\*\.mlp\.output'"),
        ("model.layers.9.output", "names no module of this model"),
        ("model.layers.0.mlp.source.nope_0.output", "operations: self_gate_up_proj_0, "),
    ],
)
def test_wrong_taps_are_found_without_an_engine(tap: str, said: str) -> None:
    """A tap that names nothing is an error at construction, without `dispatch` too.

    (O3, A37, A38, G1, G2).
    """
    with pytest.raises(ValueError, match=said):
        VLLM(path(), taps=[tap], **TINY)


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ({"enforce_eager": True}, "enforce_eager=True"),
        ({"max_graphs": 0}, "max_graphs=0"),
        ({"compilation_config": {"cudagraph_mode": "FULL"}}, "cudagraph_mode=FULL"),
        ({"compilation_config": {"cudagraph_mode": "none"}}, "cudagraph_mode=NONE"),
    ],
)
def test_what_contradicts_taps(engine: dict[str, Any], said: str) -> None:
    """Asking for no graphs, or for full ones, is an error that names both (O3, D11, G3, G4)."""
    with pytest.raises(ValueError, match=rf"taps= and .*{said}"):
        VLLM(path(), taps=["model.layers.0.output"], **engine, **TINY)


def test_graph_modes_that_go_with_taps() -> None:
    """VLLM's default, and graphs for decoding only, may be asked for; as its own object too."""
    from vllm.config import CompilationConfig, CUDAGraphMode

    for mode in ("FULL_AND_PIECEWISE", CUDAGraphMode.FULL_DECODE_ONLY, "PIECEWISE", None):
        config = {"cudagraph_mode": mode}
        assert taps.check(["a.output"], {"compilation_config": config}) == ("a.output",)
    full = CompilationConfig(cudagraph_mode=CUDAGraphMode.FULL)
    with pytest.raises(ValueError, match="cudagraph_mode=FULL"):
        taps.check(["a.output"], {"compilation_config": full})
    assert taps.check([], {"enforce_eager": True}) == ()


@pytest.mark.parametrize("given", ["model.layers.0.output", 3, [("model", "output")]])
def test_taps_are_a_list_of_texts(given: Any) -> None:
    """One text would be taken for a list of letters: it is refused with the list to write (E15)."""
    with pytest.raises(TypeError, match="taps"):
        taps.check(given, {})


def test_taps_belong_to_an_engine() -> None:
    """A client of a server declares none: the server is started with them."""
    with pytest.raises(UnsupportedError, match=r"taps= has nothing to act on"):
        VLLM("m", serve="http://127.0.0.1:9", taps=["model.layers.0.output"])


def test_local_models_have_no_taps(tmp_path: Path) -> None:
    """Where every location is served anyway, `taps` is refused with the reason."""
    from midstream import TransformersModel

    with pytest.raises(UnsupportedError, match="every location is served"):
        TransformersModel(path(), taps=["model.layers.0.output"])
