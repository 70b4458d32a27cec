"""What the client refuses: unknown classes, and data that is no message."""

from __future__ import annotations

import gc
import pickle
import random
import re
import sys
import threading
import types
from typing import Any

import msgspec
import numpy as np
import payload_kinds
import pytest
import torch
from payload_kinds import OWNER, ROUND_TRIPS, Level, Pair, Point

from midstream.errors import TransportError
from midstream.modeling.vllm.payloads import (
    BlockError,
    Record,
    nodes,
    pack,
    unpack,
)


def test_a_type_that_the_client_has_not_loaded_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client imports nothing: the save becomes an error that names the type."""
    module = types.ModuleType("only_in_engine")
    monkeypatch.setitem(sys.modules, "only_in_engine", module)
    exec("import dataclasses\n@dataclasses.dataclass\nclass P:\n    v: int", vars(module))
    message = pack([Record("r", {"p": module.P(1), "q": 2})], owner=OWNER)
    monkeypatch.delitem(sys.modules, "only_in_engine")
    [record] = unpack(message)
    assert record.saves == {"q": 2}
    assert record.error is not None
    assert "only_in_engine.P is not loaded in this process" in record.error.message


def test_a_name_that_is_another_kind_of_class_here_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A dataclass, namedtuple or enum is only rebuilt as the kind it was sent as."""
    message = pack([Record("r", {"a": Pair(1), "b": Point(1, 2), "c": Level.HIGH})], owner=OWNER)
    for name in ("Pair", "Point", "Level"):
        monkeypatch.setattr(payload_kinds, name, threading.Thread)
    [record] = unpack(message)
    assert record.saves == {}
    assert record.error is not None
    assert "no dataclass" in record.error.message
    assert "no namedtuple" in record.error.notes[0]
    assert "no enum" in record.error.notes[1]


class Trap:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> Any:
        return (pytest.fail, ("a pickle was loaded",))


def test_data_that_is_no_message_is_an_error() -> None:
    """Pickles, other msgpack, cut messages and deep nonsense raise TransportError."""
    whole = pack([Record("r", {"x": torch.ones(3), "y": [1, "a"]})], owner=OWNER)
    others = [pickle.dumps(Trap()), b"", b"\xc1", msgspec.msgpack.encode({"a": 1}), b"\x91" * 10**5]
    for data in [*others, *(whole[:end] for end in range(len(whole))), whole + b"\x00"]:
        with pytest.raises(TransportError, match="not a message of midstream"):
            unpack(data)


def test_a_damaged_message_never_does_worse_than_a_clear_error() -> None:
    """With any byte changed a message is read or refused with TransportError."""
    saves = dict(enumerate(ROUND_TRIPS[:20] + ROUND_TRIPS[28:])) | {"t": torch.ones(2, 3)}
    saves = {str(name): value for name, value in saves.items()} | {"n": np.arange(3)}
    rows = list(torch.ones(3, 2))
    saves |= {"rows": rows, "row": rows[1]}
    whole = pack([Record("r", saves, BlockError.of(ValueError(1), ""))], owner=OWNER)
    chance = random.Random(0)
    refused = 0
    for _ in range(2000):
        data = bytearray(whole)
        data[chance.randrange(min(len(data), 3000))] = chance.randrange(256)
        try:
            unpack(bytes(data))
        except TransportError:
            refused += 1
    assert 0 < refused < 2000


def message_of(node: nodes.Node, size: int) -> bytes:
    """A message with one save and one buffer of zeros."""
    record = nodes.RecordNode("r", [("x", node)], None, nodes.Numbers([]), nodes.Numbers([]), None)
    record.extra = nodes.Map([], [], ordered=False)
    padded = bytearray(size + -size % 64)
    return msgspec.msgpack.encode(nodes.Message([record], [size], padded, []))


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        (nodes.Made("list", [nodes.Run(0, "float32", (3,), 3)]), "24 bytes for 3 tensors"),
        (nodes.Made("list", [nodes.Run(0, "float32", (-3,), -2)]), r"-2 tensors of shape \[-3\]"),
        (nodes.Made("list", [nodes.Run(0, "float32", (0,), 10**15)]), "10{15} tensors of shape"),
        (nodes.Made("list", [nodes.Run(1, "float32", (3,), 2)]), "buffer 1 of 1"),
        (nodes.Run(0, "float32", (3,), 2), "2 tensors in place of a value"),
        (nodes.Tensor(0, "float32", (3,), 2), "place 2 in a buffer of 24 bytes"),
        (nodes.Tensor(0, "float32", (3,), -1), "place -1 in a buffer"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_runs_that_make_no_sense_are_refused(node: nodes.Node, expected: str) -> None:
    """A run, or a place in one, that is not in its buffer is an error and takes no memory."""
    [record] = unpack(message_of(node, 24))
    assert record.error is not None
    assert re.search(expected, record.error.message)


def test_a_place_in_a_run_can_be_read_without_the_run() -> None:
    """A save that shares a tensor with one that cannot be received arrives all the same."""
    [record] = unpack(message_of(nodes.Tensor(0, "float32", (3,), 1), 24))
    assert record.saves["x"].tolist() == [0, 0, 0]


def test_garbage_is_collected_again_after_a_message() -> None:
    """Packing and reading pause Python's garbage collection, and only for themselves."""
    assert gc.isenabled()
    message = pack([Record("r", {"x": 1})], owner=OWNER)
    assert gc.isenabled()
    unpack(message)
    with pytest.raises(TransportError):
        unpack(message[:-1])
    assert gc.isenabled()
    gc.disable()
    try:
        unpack(message)
        assert not gc.isenabled()
    finally:
        gc.enable()
