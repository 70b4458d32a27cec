"""What each type of value becomes: one handler a type, called with the encoder and the value."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import reprlib
import types
import zoneinfo
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import torch

from midstream.interleaving.batches import Hole
from midstream.interleaving.caches import Cache
from midstream.modeling.vllm.engine.readonly import ReadOnlyTensor
from midstream.modeling.vllm.payloads import nodes
from midstream.modeling.vllm.payloads.arrays import dtype_text
from midstream.modeling.vllm.payloads.lookup import class_name
from midstream.modeling.vllm.payloads.nodes import Node
from midstream.modeling.vllm.payloads.record import OnDevice

if TYPE_CHECKING:
    from midstream.modeling.vllm.payloads.encode import Encoder

Handler: TypeAlias = "Callable[[Encoder, Any], Node]"
_Kind: TypeAlias = Literal["dataclass", "namedtuple", "torch"]

FIX = "save its tensors or numbers instead"
_BLOB_BYTES = 4096  # bytes from this length on leave the tree
_NUMBERS = frozenset((int, float))


class Refused(Exception):  # noqa: N818 - control flow, always turned into a TransportError
    """A value that cannot travel; containers add their steps as it passes through them."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.steps: list[str] = []


def handler_for(value: object) -> Handler:
    """Find the handler of a value's type.

    Raises:
        Refused: No value of this type can travel.
    """
    return _HANDLERS.get(type(value)) or _derived(value)


def _plain(_: Encoder, value: Any) -> Node:
    return value  # type: ignore[no-any-return]


def _int(_: Encoder, value: int) -> Node:
    return value if -(2**63) <= value < 2**64 else nodes.Made("int", [hex(value)])


def _str(_: Encoder, value: str) -> Node:
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:  # a lone surrogate, which msgpack has no form for
            return nodes.Made("str", [nodes.Binary(value.encode("utf-8", "surrogatepass"))])
    return value


def _bytes(encoder: Encoder, value: bytes) -> Node:
    if len(value) < _BLOB_BYTES:
        return nodes.Binary(value)
    return nodes.Blob(encoder.buffers.add_bytes(memoryview(value)), mutable=False)


def _bytearray(encoder: Encoder, value: bytearray) -> Node:
    return nodes.Blob(encoder.buffers.add_bytes(memoryview(bytes(value))), mutable=True)


def _list(encoder: Encoder, value: list[Any]) -> Node:
    if _NUMBERS.issuperset(map(type, value)):
        whole = [number for number in value if type(number) is int]
        if not whole or (min(whole) >= -(2**63) and max(whole) < 2**64):
            return nodes.Numbers(value)
    return _sequence("list")(encoder, value)


def _sequence(kind: str) -> Handler:
    def handler(encoder: Encoder, value: Any) -> Node:
        return nodes.Made(kind, encoder.children(value, value, lambda index: f"[{index}]"))

    return handler


def _set(kind: str) -> Handler:
    def handler(encoder: Encoder, value: Any) -> Node:
        return nodes.Made(kind, encoder.children(value, value, lambda _: "{an element}"))

    return handler


def _parts(kind: str, read: Callable[[Any], Iterable[Any]]) -> Handler:
    def handler(encoder: Encoder, value: Any) -> Node:
        return nodes.Made(kind, [encoder.node(part) for part in read(value)])

    return handler


def _dict(encoder: Encoder, value: dict[Any, Any]) -> Node:
    items = list(value.items())
    keys = encoder.children(value, (key for key, _ in items), lambda _: "{a key}")
    values = encoder.children(
        value, [item for _, item in items], lambda index: f"[{reprlib.repr(items[index][0])}]"
    )
    return nodes.Map(keys, values, isinstance(value, OrderedDict))


def _dataclass(encoder: Encoder, value: Any) -> Node:
    names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
    try:
        object.__new__(type(value))
    except TypeError:
        raise _unknown(value) from None
    fields = (getattr(value, name) for name in names)
    return _instance(encoder, "dataclass", value, names, fields)


def _namedtuple(encoder: Encoder, value: Any) -> Node:
    return _instance(encoder, "namedtuple", value, list(value._fields), value)


def _torch_result(encoder: Encoder, value: Any) -> Node:
    return _instance(encoder, "torch", value, [], value)


def _instance(
    encoder: Encoder, kind: _Kind, value: Any, names: list[str], values: Iterable[Any]
) -> Node:
    cls = _class_of(value)
    step = (lambda index: f".{names[index]}") if names else (lambda index: f"[{index}]")
    return nodes.Instance(kind, cls, names, encoder.children(value, values, step))


def _member(_: Encoder, value: enum.Enum) -> Node:
    cls = _class_of(value)
    if not isinstance(value, enum.Flag):
        return nodes.Member(cls, [value.name])
    members = list(value)
    if sum(member.value for member in members) != value.value:
        raise Refused(f"a flag with bits that no member names ({value!r}): save its .value")
    return nodes.Member(cls, [str(member.name) for member in members])


def _tensor(encoder: Encoder, value: torch.Tensor) -> Node:
    place = encoder.places.of_tensor(value) if encoder.places is not None else None
    if place is not None:
        return nodes.Mirrored(place, 1)
    try:
        index, place = encoder.tensor_index(value)
    except ValueError as error:
        raise Refused(str(error)) from None
    return nodes.Tensor(index, nodes.DTYPE_NAMES[value.dtype], value.shape, place)


def _array(encoder: Encoder, value: np.ndarray[Any, Any]) -> Node:
    dtype = _numpy_dtype(value)
    flat = np.ascontiguousarray(value).reshape(-1)
    # As bytes, because some dtypes (datetime64) have no buffer of their own.
    data = flat.view(np.uint8).data if flat.nbytes else memoryview(b"")
    return nodes.Array(encoder.buffers.add_bytes(data), dtype, value.shape)


def _scalar(_: Encoder, value: np.generic) -> Node:
    return nodes.Scalar(_numpy_dtype(value), bytearray(value.tobytes()))


def _numpy_dtype(value: Any) -> str:
    try:
        return dtype_text(value.dtype)
    except ValueError as error:
        raise Refused(f"{error}: save it as an array of numbers") from None


def _datetime(encoder: Encoder, value: datetime.datetime | datetime.time) -> Node:
    zone = value.tzinfo.key if isinstance(value.tzinfo, zoneinfo.ZoneInfo) else None
    kind = "datetime" if isinstance(value, datetime.datetime) else "time"
    return nodes.Made(kind, [value.isoformat(), value.fold, zone])


def _placed(encoder: Encoder, value: OnDevice) -> Node:
    return nodes.Placed(encoder.node(value.value), str(value.device))


def _cache(encoder: Encoder, value: Cache) -> Node:
    parts = encoder.sheets.parts(value, encoder.node) if encoder.sheets is not None else None
    if parts is None:
        return _dataclass(encoder, value)
    seen = encoder.node(value.__dict__["visits"])
    return nodes.Recorded(seen, encoder.node(value.aliases), parts)


def _class_of(value: object) -> tuple[str, str]:
    try:
        return class_name(type(value))
    except ValueError as error:
        raise Refused(f"{error}: define it in a module, or {FIX}") from None


def _unknown(value: object) -> Refused:
    cls = type(value)
    return Refused(f"a {cls.__module__}.{cls.__qualname__}, which cannot travel: {FIX}")


def _derived(value: object) -> Handler:
    """Find the handler of a type that is not known by itself but by what it derives from."""
    cls = type(value)
    if isinstance(value, enum.Enum):
        return _member
    if isinstance(value, tuple) and cls.__module__ == "torch.return_types":
        return _torch_result
    if isinstance(value, tuple) and hasattr(cls, "_fields"):
        return _namedtuple
    if isinstance(value, torch.nn.Parameter):
        return _tensor
    if isinstance(value, np.generic):
        return _scalar
    if dataclasses.is_dataclass(cls):
        return _dataclass
    raise _unknown(value)


_HANDLERS: dict[type, Handler] = {
    type(None): _plain,
    bool: _plain,
    float: _plain,
    int: _int,
    str: _str,
    bytes: _bytes,
    bytearray: _bytearray,
    complex: _parts("complex", lambda value: (value.real, value.imag)),
    list: _list,
    tuple: _sequence("tuple"),
    set: _set("set"),
    frozenset: _set("frozenset"),
    dict: _dict,
    OrderedDict: _dict,
    defaultdict: _dict,
    range: _parts("range", lambda value: (value.start, value.stop, value.step)),
    slice: _parts("slice", lambda value: (value.start, value.stop, value.step)),
    types.EllipsisType: _parts("ellipsis", lambda value: ()),
    datetime.datetime: _datetime,
    datetime.time: _datetime,
    datetime.date: _parts("date", lambda value: (value.isoformat(),)),
    datetime.timedelta: _parts(
        "timedelta", lambda value: (value.days, value.seconds, value.microseconds)
    ),
    torch.Tensor: _tensor,
    ReadOnlyTensor: _tensor,
    torch.Size: _parts("size", tuple),
    torch.dtype: _parts("dtype", lambda value: (nodes.DTYPE_NAMES[value],)),
    torch.device: _parts("device", lambda value: (str(value),)),
    np.ndarray: _array,
    np.memmap: _array,
    OnDevice: _placed,
    Cache: _cache,
    Hole: lambda _, value: nodes.Leaf(value.number),
}
