"""Values of every kind through `pack` and `unpack`."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from payload_kinds import OWNER, REPEATED, ROUND_TRIPS, Pair, returned

from midstream.modeling.vllm.payloads import (
    BlockError,
    BlockWarning,
    OnDevice,
    Print,
    Record,
    pack,
    unpack,
)
from midstream.modeling.vllm.payloads.encode import MAX_DEPTH


@pytest.mark.parametrize("value", ROUND_TRIPS, ids=[type(v).__name__ for v in ROUND_TRIPS])
def test_a_value_comes_back_equal_and_of_its_type(value: Any) -> None:
    """Each kind of plain value arrives with its type and its content."""
    got = returned(value)
    assert type(got) is type(value)
    assert got == value


def test_the_order_of_a_dict_is_kept() -> None:
    """Keys arrive in the order they were inserted, whatever their types."""
    assert list(returned({"z": 1, 3: 2, "a": 3})) == ["z", 3, "a"]


def test_numbers_keep_their_types_in_a_list() -> None:
    """A list of mixed numbers keeps ints, floats and bools apart."""
    assert [type(n) for n in returned([1, 1.0, True])] == [int, float, bool]
    assert [type(n) for n in returned([1, 1.0])] == [int, float]


def test_special_floats_keep_their_sign_and_kind() -> None:
    """NaN stays NaN and the sign of zero stays, in complex numbers too."""
    assert math.isnan(returned(math.nan))
    assert math.copysign(1, returned(-0.0)) == -1
    assert math.copysign(1, returned(complex(0.0, -0.0)).imag) == -1


def test_a_zone_and_fold_of_a_datetime_are_kept() -> None:
    """A named time zone arrives by name, and the second pass of a repeated hour is told apart."""
    assert returned(REPEATED).tzinfo.key == "Europe/Berlin"
    assert returned(REPEATED).fold == 1


def test_a_defaultdict_arrives_as_a_dict() -> None:
    """The factory of a defaultdict is code, so it stays behind."""
    value = defaultdict(list, a=[1])
    assert type(returned(value)) is dict
    assert returned(value) == {"a": [1]}


def test_torch_results_keep_their_names() -> None:
    """What `topk` and its like return arrives as the same named type."""
    got = returned(torch.topk(torch.tensor([1.0, 3.0, 2.0]), 2))
    assert type(got) is torch.return_types.topk
    assert got.values.tolist() == [3.0, 2.0]
    assert got.indices.tolist() == [1, 2]


def test_a_dataclass_is_rebuilt_without_its_init() -> None:
    """No `__init__` or `__post_init__` of a user's class runs in the client."""
    value = Pair(1)
    value.built = ["sent"]
    assert returned(value).built == ["sent"]


def test_tensors_inside_containers_arrive() -> None:
    """Tensors arrive from inside dicts, tuples, dataclasses and OnDevice."""
    t = torch.arange(3)
    got = returned({"a": (t, Pair(t[1:])), "b": OnDevice(t, "cuda")})
    assert torch.equal(got["a"][0], t)
    assert torch.equal(got["a"][1].left, t[1:])
    assert torch.equal(got["b"].value, t)


def test_a_tensor_saved_twice_is_one_tensor() -> None:
    """Within a record the same object comes back as the same object; across records never (C25)."""
    t = torch.zeros(2)
    first, second = unpack(
        pack([Record("a", {"x": t, "y": [t, t.clone()]}), Record("b", {"x": t})], owner=OWNER)
    )
    assert first.saves["x"] is first.saves["y"][0]
    assert first.saves["x"] is not first.saves["y"][1]
    first.saves["x"] += 1
    assert second.saves["x"].tolist() == [0, 0]


def test_a_container_that_occurs_twice_is_no_recursion() -> None:
    """The same list in two places is sent twice."""
    part = [1, "a"]
    assert returned([part, part]) == [part, part]


def test_the_deepest_allowed_nesting_travels() -> None:
    """What `pack` accepts `unpack` can read."""
    deep: list[Any] = []
    for _ in range(MAX_DEPTH - 1):
        deep = [deep]
    assert returned(deep) == deep


def test_all_parts_of_a_record_arrive() -> None:
    """Error, warnings, prints and extra data arrive, lone surrogates in them included."""
    error = BlockError.of(ValueError("bad \ud800", 3, object()), "Traceback \udcff")
    record = Record(
        "r-1",
        {"\ud83d": 1},
        error,
        [BlockWarning("builtins", "UserWarning", "careful \ud800", "/a b.py", 3)],
        [Print("stdout", "one\n"), Print("stderr", "two \udc80")],
        {"steps": 3, "nested": {"list": [1, None, "x"]}},
    )
    [got] = unpack(pack([record], owner=OWNER))
    assert got.error is not None
    assert got.error.args[:2] == ["bad \ud800", 3]
    assert got.error.args[2].startswith("<object object at")
    got.error.args, record.error = error.args, error
    assert got == record


def test_no_records_are_a_message_too() -> None:
    """A step that closes nothing may still be packed."""
    assert unpack(pack([], owner=OWNER)) == []


def test_arrays_of_numpy_keep_dtype_shape_and_bytes() -> None:
    """Arrays of every plain dtype arrive writable, in C order, equal."""
    structured = np.array([(1, 2.5), (3, 4.5)], dtype=[("a", "<i2"), ("b", ">f8")])
    for value in (
        np.arange(6, dtype=np.int16).reshape(2, 3).T,
        np.array(1.5),
        np.zeros((0, 3), np.uint8),
        np.array(["a", "bcd"]),
        np.array(["2024-01-01"], dtype="datetime64[D]"),
        np.array([1, 2], dtype=">u4"),
        np.frombuffer(b"read only", dtype=np.uint8),
        structured,
        np.arange(100_000.0),
    ):
        got = returned(value)
        assert (got.dtype, got.shape) == (value.dtype, value.shape)
        assert got.tobytes() == value.tobytes()
        assert got.flags.writeable
