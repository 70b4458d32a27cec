"""Values and classes that the tests of payloads send."""

from __future__ import annotations

import datetime
import enum
import math
import zoneinfo
from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from midstream.errors import TransportError
from midstream.modeling.vllm.payloads import (
    OnDevice,
    Record,
    pack,
    segments,
    unpack,
)

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
