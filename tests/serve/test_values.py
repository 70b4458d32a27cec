"""Saved values as JSON."""

from __future__ import annotations

import base64
import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from midstream.serve.values import plain


@dataclass
class Pair:
    first: int
    second: Any


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_tensors(dtype: torch.dtype) -> None:
    """Their bytes come back, rows first, whatever lay in memory."""
    value = torch.arange(6).reshape(2, 3).to(dtype).T
    found = plain(value)
    data = bytearray(base64.b64decode(found["data"]))
    again = torch.frombuffer(data, dtype=dtype).reshape(found["shape"])
    assert torch.equal(again, value)
    assert f"torch.{found['dtype']}" == str(dtype)


def test_plain_values() -> None:
    """What JSON has stays; what it has not becomes what it can hold."""
    value = {"a": [1, (2.5, None)], 3: {"x"}, "p": Pair(1, OrderedDict(b=True))}
    assert plain(value) == {
        "a": [1, [2.5, None]],
        "3": ["x"],
        "p": {"first": 1, "second": {"b": True}},
    }
    assert plain(np.float32(1.5))["shape"] == []
    assert plain(np.arange(3))["dtype"] == "int64"
    assert plain(torch.empty(0, 3)) == {"dtype": "float32", "shape": [0, 3], "data": ""}
    assert plain(math.inf) == {"repr": "inf"}
    assert plain(object())["repr"].startswith("<object")
    assert plain(["\ud800", 10**5000, slice(10**5000)]) == [
        {"repr": r"'\ud800'"},
        {"repr": hex(10**5000)[:10_000]},
        {"repr": "<slice>"},
    ]
    assert plain({"\ud800": 1, 10**5000: 2}) == {r"\ud800": 1, hex(10**5000): 2}
    nested: list[Any] = []
    nested.append(nested)
    assert msgspec.json.encode(plain(nested)).startswith(b"[[[")
