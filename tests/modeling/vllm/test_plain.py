"""Blocks are taken for plain by the values that they take from outside, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from midstream.modeling.vllm.engine.plain import is_plain
from midstream.modeling.vllm.engine.readonly import ReadOnlyTensor
from midstream.tracing import Block, Code


class Noisy(torch.nn.Module):
    """Draws random numbers where a tensor would compute."""

    def __matmul__(self, other: Any) -> Any:
        """Return noise."""
        return torch.randn_like(other)


def found(source: str, stored: dict[str, Any] | None = None, **values: Any) -> bool:
    """Whether a block is recognised."""
    return is_plain(Block(code=Code(f"    {source}\n", "f.py", 2), values=values), stored or {})


def holding_itself() -> list[Any]:
    """A list that is its own item."""
    made: list[Any] = [1]
    made.append(made)
    return made


@pytest.mark.parametrize(
    "value", [3, torch.ones(2), ReadOnlyTensor.of(torch.ones(2)), {"a": [1, (2.0,)]}]
)
def test_numbers_tensors_and_containers_of_them_are_plain(value: Any) -> None:
    """Operations on them are known."""
    assert found("y = x + x", x=value)


@pytest.mark.parametrize("value", [Noisy(), [Noisy()], {"a": {"b": print}}, list(range(1000))])
def test_objects_of_others_are_not(value: Any) -> None:
    """Their operators may do anything; and what is large is not looked through."""
    assert not found("y = x + x", x=value)


def test_a_list_that_holds_itself_is_looked_at_once() -> None:
    """A block with such a value runs like any other; shared parts are not looked at again."""
    assert found("y = x[0]", x=holding_itself())
    shared: list[Any] = [1]
    for _ in range(60):
        shared = [shared, shared]
    assert found("y = x[0]", x=shared)


def test_stored_objects_are_looked_at_where_a_block_takes_them() -> None:
    """A stored module makes those blocks ordinary that use what is stored."""
    reading, other = "y = model.stored['sae'] @ x", "y = model.output"
    tensor = {"sae": ReadOnlyTensor.of(torch.ones(2))}
    assert found(reading, tensor)
    assert not found(reading, {"sae": Noisy()})
    assert found(other, {"sae": Noisy()})
