"""Which blocks an engine takes for ones that only compute."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from midstream.modeling.vllm.engine.blocks import HostedBlock
from midstream.modeling.vllm.engine.plain import is_plain
from midstream.modeling.vllm.engine.readonly import ReadOnlyTensor
from midstream.tracing import Block, Code
from tests.support.checkpoints import A

GREEDY = {"temperature": 0.0, "max_tokens": 2, "ignore_eos": True}


class Vector(torch.Tensor):
    """A tensor whose operations are a user's."""


class Doubled:
    """A value whose operators are a user's."""

    def __rmul__(self, other: Any) -> Any:
        return other * random.random()


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each block that has executed, whether it was taken for plain."""
    plain: list[bool] = []
    execute = HostedBlock._execute

    def watched(self: HostedBlock) -> None:
        try:
            execute(self)
        finally:
            plain.append(self.run.plain)

    monkeypatch.setattr(HostedBlock, "_execute", watched)
    return plain


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (2.0, True),
        (torch.ones(128), True),
        ([1, (2.0, None)], True),
        ({"scale": torch.ones(1)}, True),
        (torch.float32, True),
        (Doubled(), False),
        (torch.ones(128).as_subclass(Vector), False),
        (random.random, False),
        ([Doubled()], False),
    ],
)
def test_values_from_outside(llama: Any, found: list[bool], value: Any, expected: bool) -> None:
    """Numbers, text, plain tensors and containers of them do nothing; objects of others may."""
    with llama.trace(A, **GREEDY) as tracer:
        for _ in tracer.iter[:]:
            held = [value]
            kept = [llama.model.layers[1].output[0], len(held)].save()
    assert kept[1] == 1
    assert found == [expected]


def test_code_decides_too(llama: Any, found: list[bool]) -> None:
    """A block that prints is no plain one, and one that is a function is not looked through."""
    with llama.trace(A, **GREEDY):
        print("x")
        hidden = llama.model.layers[1].output[0].save()
    assert hidden.shape == (len(A), 128)

    def block(model: Any, tracer: Any) -> None:
        model.model.layers[1].output

    llama.trace(A, block=block, **GREEDY)
    assert found == [False, False]


def test_a_value_of_an_operator_of_its_own_keeps_its_generator(llama: Any) -> None:
    """What a user's operator draws comes from the block's own generator, the same every time."""
    mine = Doubled()
    random.seed(5)
    drawn = []
    for _ in range(2):
        with llama.trace(A, **GREEDY) as tracer:
            rows = [].save()
            for _ in tracer.iter[:]:
                rows.append(llama.model.layers[1].output[0] * mine)
        drawn.append(rows)
    assert all(torch.equal(a, b) for a, b in zip(*drawn, strict=True))
    after = random.random()
    random.seed(5)
    assert random.random() == after


class Noisy(torch.nn.Module):
    """Draws random numbers where a tensor would compute."""

    def __matmul__(self, other: Any) -> Any:
        """Return noise."""
        return torch.randn_like(other)


def recognised(source: str, stored: dict[str, Any] | None = None, **values: Any) -> bool:
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
    assert recognised("y = x + x", x=value)


@pytest.mark.parametrize("value", [Noisy(), [Noisy()], {"a": {"b": print}}, list(range(1000))])
def test_objects_of_others_are_not(value: Any) -> None:
    """Their operators may do anything; and what is large is not looked through."""
    assert not recognised("y = x + x", x=value)


def test_a_list_that_holds_itself_is_looked_at_once() -> None:
    """A block with such a value runs like any other; shared parts are not looked at again."""
    assert recognised("y = x[0]", x=holding_itself())
    shared: list[Any] = [1]
    for _ in range(60):
        shared = [shared, shared]
    assert recognised("y = x[0]", x=shared)


def test_stored_objects_are_looked_at_where_a_block_takes_them() -> None:
    """A stored module makes those blocks ordinary that use what is stored."""
    reading, other = "y = model.stored['sae'] @ x", "y = model.output"
    tensor = {"sae": ReadOnlyTensor.of(torch.ones(2))}
    assert recognised(reading, tensor)
    assert not recognised(reading, {"sae": Noisy()})
    assert recognised(other, {"sae": Noisy()})
