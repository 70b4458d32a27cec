"""Values of every kind through `pack` and `unpack`."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from payload_kinds import OWNER, REPEATED, ROUND_TRIPS, Pair, returned
from torch.utils._pytree import tree_flatten

from midstream.modeling.vllm.engine.readonly import ReadOnlyTensor
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


ROWS = list(torch.arange(40.0).reshape(20, 1, 2))


def test_a_list_of_rows_is_one_buffer() -> None:
    """However many tensors of one shape follow each other, the message grows by their bytes."""
    sizes = []
    for count in (50, 5000):
        rows = list(torch.zeros(count, 1, 16, dtype=torch.bfloat16))
        message = pack([Record("r", {"x": rows})], owner=OWNER, inline_limit=1 << 30)
        sizes.append(len(message) - count * 32)
        assert torch.equal(torch.stack(unpack(message)[0].saves["x"]), torch.stack(rows))
    assert max(sizes) < 200


@pytest.mark.parametrize(
    "value",
    [
        ROWS,
        tuple(ROWS),
        dict(enumerate(ROWS)),
        [torch.zeros(5, 2), *ROWS],
        [*ROWS[:3], torch.zeros(5, 2), ROWS[3], torch.empty(0, 2), torch.empty(0, 2)],
        [ROWS[:7], ROWS[7:9], [ROWS[9]], []],
        [*ROWS[:3], ROWS[3].half(), ROWS[4].half()],
        [*ROWS, None],
        [row.sum() for row in ROWS],
        [row.bool() for row in ROWS],
        [row.bfloat16() for row in ROWS],
        [row.to(torch.float8_e4m3fn) for row in ROWS],
        [torch.nn.Parameter(row) for row in ROWS],
        [ReadOnlyTensor.of(row) for row in ROWS],
        Pair(ROWS[:3], {"k": ROWS[3:]}),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("inline_limit", [1 << 20, 0], ids=["inline", "segment"])
def test_rows_arrive_in_whatever_holds_them(value: Any, inline_limit: int) -> None:
    """Lists, tuples, dicts and fields of tensors alike, nearly alike and not alike arrive."""
    [record] = unpack(pack([Record("r", {"x": value})], owner=OWNER, inline_limit=inline_limit))
    assert record.error is None
    got, sent = tree_flatten(record.saves["x"]), tree_flatten(value)
    assert got[1] == sent[1]
    for one, other in zip(got[0], sent[0], strict=True):
        if isinstance(other, Pair):
            assert torch.equal(torch.stack(one.left), torch.stack(other.left))
            one, other = torch.stack(one.right["k"]), torch.stack(other.right["k"])
        if other is None:
            assert one is None
            continue
        assert (type(one), one.dtype, one.shape) == (torch.Tensor, other.dtype, other.shape)
        assert torch.equal(one.double(), other.detach().double())


def test_rows_that_occur_again_are_the_same_tensors() -> None:
    """A tensor of a list that is saved elsewhere too, or twice in it, is one object (C25)."""
    saves = {"x": ROWS, "y": ROWS[3], "z": ROWS[5:1:-1], "again": ROWS, "twice": [ROWS[0]] * 2}
    [record] = unpack(pack([Record("r", saves)], owner=OWNER))
    got = record.saves
    assert got["y"] is got["x"][3]
    assert all(a is b for a, b in zip(got["z"], got["x"][5:1:-1], strict=True))
    assert all(a is b for a, b in zip(got["again"], got["x"], strict=True))
    assert got["twice"][0] is got["twice"][1] is got["x"][0]
    assert torch.equal(torch.stack(got["x"]), torch.stack(ROWS))


def test_received_rows_are_independent_tensors() -> None:
    """A row has a storage and a version of its own: it is saved, copied and written alone."""
    for dtype in (torch.float32, torch.bfloat16):
        got = returned([row.to(dtype) for row in ROWS])
        assert {row.untyped_storage().nbytes() for row in got} == {2 * dtype.itemsize}
        got[0].add_(1)
        assert [row._version for row in got[:2]] == [1, 0]
        assert got[1].tolist() == ROWS[1].tolist()


def test_a_refused_save_takes_its_rows_with_it() -> None:
    """Rows of a save that cannot travel are sent with the next save that has them."""
    saves = {"bad": [ROWS, object()], "good": ROWS, "one": ROWS[2]}
    [record] = unpack(pack([Record("r", saves)], owner=OWNER))
    assert list(record.saves) == ["good", "one"]
    assert record.saves["one"] is record.saves["good"][2]
    assert torch.equal(torch.stack(record.saves["good"]), torch.stack(ROWS))


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
