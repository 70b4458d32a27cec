"""Values of every kind through `pack` and `unpack`, and what happens to those that cannot."""

from __future__ import annotations

import datetime
import enum
import math
import pickle
import random
import sys
import threading
import types
import zoneinfo
from collections import Counter, OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from midstream.errors import TransportError
from midstream.modeling.vllm.payloads import (
    BlockError,
    BlockWarning,
    OnDevice,
    Print,
    Record,
    pack,
    segments,
    unpack,
)
from midstream.modeling.vllm.payloads.encode import MAX_DEPTH

OWNER = segments.owner_id()
Point = namedtuple("Point", "x y")


class Colour(enum.Enum):
    """An enum with an alias and a member whose value cannot travel."""

    RED = "r"
    ALSO_RED = "r"
    BLUE = object()


class Level(enum.IntEnum):
    """An enum that is also a number."""

    HIGH = 3


class Bits(enum.Flag):
    """A flag."""

    A = 1
    B = 2


@dataclass
class Pair:
    """A dataclass that notices when it is constructed."""

    left: Any
    right: Any = None
    built: list[str] = field(default_factory=list, compare=False)

    def __post_init__(self) -> None:
        self.built = ["__post_init__ ran"]


@dataclass(frozen=True, slots=True)
class Frozen:
    """A dataclass that cannot be written to."""

    value: int


class Outer:
    """Holds a class."""

    @dataclass
    class Inner:
        """A class inside a class."""

        value: int


def sent(**saves: Any) -> Record:
    """Send one record with these saves, as the client sees it."""
    [record] = unpack(pack([Record("r", saves)], owner=OWNER))
    return record


def returned(value: Any) -> Any:
    """Return a value as the client sees it."""
    record = sent(x=value)
    assert record.error is None, record.error
    return record.saves["x"]


def refusal(value: Any) -> str:
    """Return the text of the error that a value becomes."""
    record = sent(x=value)
    assert "x" not in record.saves
    assert record.error is not None
    assert isinstance(record.error.rebuild(), TransportError)
    return record.error.message


REPEATED = datetime.datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin"))
ROUND_TRIPS = [
    None,
    True,
    False,
    0,
    -(2**63),
    2**64 - 1,
    2**64,
    -(2**63) - 1,
    10**5000,
    1.5,
    math.inf,
    -math.inf,
    5e-324,
    1 + 2j,
    "text",
    "Grüße 🙂",
    "\ud800 alone",
    b"bytes",
    b"\x00" * 100_000,
    bytearray(b"mutable"),
    bytearray(100_000),
    [],
    [1, 2, 3],
    [1, 2.0, 2**64],
    [1, True, 1.0, None],
    [float(n) for n in range(1000)],
    (),
    (1, [2, (3,)]),
    {"a": 1, "b": {"c": [1]}},
    {3: 1, None: 2, (1, "x"): 3, 2.5: 4, b"k": 5, frozenset({1}): 6, "\udfff": 7},
    {1, "a", (2,)},
    set(),
    frozenset({1.5}),
    range(2, 10**30, 7),
    slice(1, None, "z"),
    ...,
    Colour.RED,
    Colour.ALSO_RED,
    Colour.BLUE,
    Level.HIGH,
    Bits.A,
    Bits.A | Bits.B,
    Bits(0),
    torch.Size([2, 3]),
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.device("cuda:1"),
    torch.device("cpu"),
    Point(1, [2]),
    Pair(1, [2, {"k": (3,)}]),
    Frozen(4),
    Outer.Inner(5),
    OrderedDict([("z", 1), ("a", 2)]),
    datetime.datetime(2024, 2, 29, 1, 2, 3, 4),
    datetime.datetime(2024, 2, 29, tzinfo=datetime.UTC),
    REPEATED,
    datetime.time(1, 2, 3),
    datetime.date(2024, 2, 29),
    datetime.timedelta(days=-1, microseconds=7),
    np.float32(1.5),
    np.float64(2.5),
    np.int64(-3),
    np.bool_(True),
    np.complex64(1 - 1j),
    np.str_("text"),
    np.bytes_(b"b"),
    np.datetime64("2024-02-29"),
    OnDevice(3, "cuda:0"),
]


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


def test_a_tensor_saved_twice_is_one_tensor() -> None:
    """Within a record the same object comes back as the same object; across records never."""
    t = torch.zeros(2)
    first, second = unpack(
        pack([Record("a", {"x": t, "y": [t, t.clone()]}), Record("b", {"x": t})], owner=OWNER)
    )
    assert first.saves["x"] is first.saves["y"][0]
    assert first.saves["x"] is not first.saves["y"][1]
    first.saves["x"] += 1
    assert second.saves["x"].tolist() == [0, 0]


def test_a_container_that_contains_itself_is_refused() -> None:
    """Recursion is an error with the path to it, and no RecursionError."""
    loop: list[Any] = [1]
    loop.append({"again": loop})
    assert "saves['x'][1]['again'] is a container that contains itself" in refusal(loop)
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert f"nested more than {MAX_DEPTH} deep" in refusal(deep)


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
        monkeypatch.setattr(sys.modules[__name__], name, threading.Thread)
    [record] = unpack(message)
    assert record.saves == {}
    assert record.error is not None
    assert "no dataclass" in record.error.message
    assert "no namedtuple" in record.error.notes[0]
    assert "no enum" in record.error.notes[1]


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
