"""Values that cannot travel: what the error says, and what it leaves alone."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from payload_kinds import OWNER, Bits, Pair, refusal

from midstream.modeling.vllm.payloads import (
    BlockError,
    Record,
    pack,
    unpack,
)
from midstream.modeling.vllm.payloads.encode import MAX_DEPTH


def test_an_unknown_type_is_an_error_that_says_where_and_what_to_do() -> None:
    """The error names the save, the path in it, the type and the fix."""
    message = refusal([1, 2, 3, Pair({"k": threading.Lock()})])
    assert message.startswith("saves['x'][3].left['k'] is a _thread.lock, which cannot travel")
    assert "save its tensors or numbers" in message


class Mine(dict[str, int]):
    """A container of the user's own."""


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (object(), "builtins.object"),
        (Counter("aab"), "collections.Counter"),
        (Mine(a=1), "Mine"),
        (print, "builtin_function_or_method"),
        ({object(): 1}, "{a key} is a builtins.object"),
        (np.array([1, None]), "numpy array of Python objects"),
        (np.zeros(2, dtype=[("a", object)]), "numpy array of Python objects"),
        (np.ma.masked_array([1]), "MaskedArray"),
        (Bits.A.__class__, "enum.EnumType"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_types_that_cannot_travel_are_named(value: Any, expected: str) -> None:
    """Subclasses, functions, classes and object arrays are refused by name."""
    assert expected in refusal(value)


def test_a_class_made_in_a_function_is_refused() -> None:
    """A class that no other process can find is refused in the engine, with the fix."""

    @dataclass
    class Local:
        value: int

    assert "defined inside a function" in refusal(Local(1))
    assert "define it in a module" in refusal(Local(1))


def test_a_value_that_fails_to_be_read_is_that_records_error() -> None:
    """A user's class that raises when read does not end the step."""

    @dataclass
    class Raises:
        value: int

        def __getattribute__(self, name: str) -> Any:
            if name == "value":
                raise RuntimeError("not now")
            return object.__getattribute__(self, name)

    assert "RuntimeError: not now" in refusal(Raises(1))


def test_a_refused_save_leaves_everything_else() -> None:
    """Other saves of the record, its tensors' bytes and other records are not touched."""
    shared = torch.arange(4)
    bad = Record("bad", {"a": shared, "x": [torch.ones(5), shared, object()], "b": shared})
    good = Record("good", {"y": torch.full((3,), 7)})
    first, second = unpack(pack([bad, good], owner=OWNER))
    assert list(first.saves) == ["a", "b"]
    assert torch.equal(first.saves["a"], shared)
    assert first.saves["a"] is first.saves["b"]
    assert first.error is not None
    assert second.error is None
    assert torch.equal(second.saves["y"], torch.full((3,), 7))


def test_a_refused_save_does_not_hide_the_blocks_own_error() -> None:
    """The block's exception stays the error; the refusal becomes a note."""
    error = BlockError.of(KeyError("k"), "trace")
    [got] = unpack(pack([Record("r", {"x": object()}, error=error)], owner=OWNER))
    assert got.error is not None
    assert got.error.type_name == "KeyError"
    assert "saves['x'] is a builtins.object" in got.error.notes[0]


def test_a_container_that_contains_itself_is_refused() -> None:
    """Recursion is an error with the path to it, and no RecursionError."""
    loop: list[Any] = [1]
    loop.append({"again": loop})
    assert "saves['x'][1]['again'] is a container that contains itself" in refusal(loop)
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert f"nested more than {MAX_DEPTH} deep" in refusal(deep)
