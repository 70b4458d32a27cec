"""What the client refuses: unknown classes, and data that is no message."""

from __future__ import annotations

import pickle
import random
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
