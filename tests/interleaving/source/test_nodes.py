"""`node.source` outside a block: what users see and walk through."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from midstream.errors import NotInTraceError, SourceNotAvailableError
from midstream.interleaving.node import Tree
from midstream.interleaving.source import find_source
from tests.interleaving.source import samples
from tests.interleaving.toy import Toy

LAYER = """\
                      23 def forward(
                      24     self, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None
                      25 ) -> tuple[torch.Tensor, torch.Tensor]:
                      26     \"\"\"Add the hidden state into the residual in place, and go on from the sum.\"\"\"
hidden_clone_0  ->    27     residual = hidden.clone() if residual is None else residual.add_(hidden)
residual_add__0 ->     +
residual_0      ->     +
torch_tanh_0    ->    28     return self.mlp(torch.tanh(residual)), residual
self_mlp_0      ->     +"""  # noqa: E501 - as it is printed


@pytest.fixture
def root() -> Any:
    return Tree(Toy()).root


def test_source_is_printed_with_its_operations(root: Any) -> None:
    """The text with line numbers, and beside each line the names of its operations (B5)."""
    assert str(root.layers[0].source) == LAYER


def test_operation_is_printed_in_its_lines(root: Any) -> None:
    """One operation shows the lines around it and an arrow at its own (B5)."""
    text = str(root.layers[0].source.torch_tanh_0)
    assert text.splitlines()[0] == "torch_tanh_0:"
    assert [line for line in text.splitlines() if line.startswith("-->")] == [
        "-->    28     return self.mlp(torch.tanh(residual)), residual"
    ]
    assert "   24     self, positions" in text
    assert "23 def" not in text


def test_source_is_walked(root: Any) -> None:
    """A source has a length, and gives its operations in turn and by name."""
    source = root.layers[0].source
    names = ["hidden_clone_0", "residual_add__0", "residual_0", "torch_tanh_0", "self_mlp_0"]
    assert [operation.path for operation in source] == [f"layers.0.source.{n}" for n in names]
    assert len(source) == 5
    assert "torch_tanh_0" in source
    assert "torch_tanh_1" not in source
    assert set(names) < set(dir(source))
    assert copy.copy(source).path == "layers.0.source"


@pytest.mark.parametrize(
    "path",
    [
        "source.layer_0",
        "layers.1.source",
        "layers.1.source.torch_tanh_0",
        "layers.1.source.torch_tanh_0[2]",
        "layers.1.mlp.source.F_linear_0",
    ],
)
def test_paths(root: Any, path: str) -> None:
    """A path leads to what has it, by `get` and by the engine's own look-up."""
    assert root.get(path).path == path
    assert find_source(root._tree, path).path == path


@pytest.mark.parametrize("path", ["layers.1", "nowhere.source", "layers.1.source.torch_tanh_0.x"])
def test_paths_of_nothing(root: Any, path: str) -> None:
    """A path without an operation, or below one, leads nowhere."""
    assert find_source(root._tree, path) is None


def test_unknown_operation(root: Any) -> None:
    """A name that the forward does not have is an error that lists those it has (B5)."""
    with pytest.raises(AttributeError) as failure:
        root.layers[0].source.attn_0
    text = str(failure.value)
    assert text.startswith("'layers.0' has no operation 'attn_0' in its source.")
    assert "torch_tanh_0, self_mlp_0" in text


def test_source_of_an_operation(root: Any) -> None:
    """A called module's is the module's own, a function's its own, and a kernel has none.

    (B3, G45).
    """
    layer = root.layers[0].source
    assert layer.self_mlp_0.source.path == "layers.0.mlp.source"
    with pytest.raises(SourceNotAvailableError, match=r"calls .*builtin"):
        layer.torch_tanh_0.source
    with pytest.raises(SourceNotAvailableError, match="is an assignment"):
        layer.residual_0.source
    assert "known when it runs" in str(root.source.layer_0.source)


def test_values_outside_a_block(root: Any) -> None:
    """An operation has a value only in a running block."""
    operation = root.layers[0].source.torch_tanh_0
    for access in (
        lambda: operation.output,
        lambda: operation.input,
        lambda: operation.inputs,
        lambda: operation.skip(0),
        lambda: setattr(operation, "output", 0),
    ):
        with pytest.raises(NotInTraceError, match=r"layers\.0\.source\.torch_tanh_0"):
            access()


def test_what_cannot_be_assigned(root: Any) -> None:
    """A source and an operation take no attributes; the error says what can be assigned."""
    with pytest.raises(AttributeError, match=r"`\.output`"):
        root.layers[0].source.torch_tanh_0 = 1
    with pytest.raises(AttributeError, match=r"`\.output`"):
        root.layers[0].source.torch_tanh_0.value = 1
    with pytest.raises(IndexError, match="counted from 0"):
        root.layers[0].source.torch_tanh_0[-1]


class Holder(torch.nn.Module):
    def __init__(self, module: torch.nn.Module):
        super().__init__()
        self.inner = module


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (samples.Generates(), r"'Generates.forward' is a generator"),
        (samples.Awaits(), r"'Awaits.forward' is a coroutine"),
        (samples.NotPython(), r"it is a builtin_function_or_method"),
        (samples.Hidden(), r"it is a Registered"),
        (samples.Lambda(), r"a lambda has no statements"),
    ],
)
def test_forward_without_operations(module: torch.nn.Module, reason: str) -> None:
    """A forward that is not Python in one piece is refused, naming the module and why (G45)."""
    node = Tree(Holder(module)).root.inner
    with pytest.raises(SourceNotAvailableError, match=reason) as failure:
        node.source
    assert f"The forward of 'inner' ({type(module).__name__})" in str(failure.value)


@pytest.mark.parametrize(
    ("module", "name"), [(samples.Decorated(), "double_0"), (samples.Partial(), "double_0")]
)
def test_wrapped_forward(module: torch.nn.Module, name: str) -> None:
    """Decorators and `functools.partial` are looked through."""
    assert name in Tree(Holder(module)).root.inner.source


def test_submodule_called_source() -> None:
    """A submodule of that name moves aside, with a warning."""
    with pytest.warns(UserWarning, match="E_source"):
        module = torch.nn.Module()
        module.source = torch.nn.Linear(1, 1)
        root = Tree(module).root
    assert root.E_source.path == "source"
