"""Nodes to values, in the client. Nothing is imported and no user's ``__init__`` runs."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import functools
import math
import operator
import zoneinfo
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from midstream.errors import TransportError
from midstream.interleaving.caches import Cache
from midstream.modeling.vllm.payloads import nodes
from midstream.modeling.vllm.payloads.arrays import dtype_of
from midstream.modeling.vllm.payloads.lookup import find_class
from midstream.modeling.vllm.payloads.received import Bytes, rows_at, tensors_at
from midstream.modeling.vllm.payloads.record import OnDevice
from midstream.modeling.vllm.payloads.recorded import Part, ReadSheet, Unmade

_NOTHING = Bytes(nodes.Message([], [], bytearray(), []))


class Decoder:
    """Turns the nodes of one record into values; tensors are views of `data`, not copies.

    Args:
        data: of the message.
        rows: the record's tensors in segments of several messages.
        holes: what is in the place of `Leaf`s.
    """

    def __init__(
        self,
        data: Bytes,
        rows: nodes.Rows | None = None,
        holes: Sequence[torch.Tensor] = (),
    ) -> None:
        self._data, self._rows, self.holes = data, rows, holes
        self._tensors: dict[tuple[int, int | None], torch.Tensor] = {}
        self._runs: dict[int, list[torch.Tensor]] = {}

    def decode(self, node: nodes.Node, name: str) -> Any:
        """Make the value of a node; `name` is how an error refers to it.

        Raises:
            TransportError: A class is not loaded in this process, or the node makes no sense.
        """
        try:
            return self.value(node)
        except TransportError as error:
            raise TransportError(f"{name} cannot be received: {error}") from None
        except Exception as error:
            raise TransportError(
                f"{name} cannot be received: {type(error).__name__}: {error}"
            ) from error

    def value(self, node: nodes.Node) -> Any:
        """Make the value of a node inside one that `decode` was called with."""
        read = _READERS.get(type(node))
        return node if read is None else read(self, node)

    def values(self, several: Iterable[nodes.Node]) -> list[Any]:
        """Make the values of nodes; a run becomes as many as it stands for."""
        made: list[Any] = []
        for node in several:
            if type(node) is nodes.Run:
                made += self._run(node)
            elif type(node) is nodes.Mirrored:
                made += self._mirrored(node)
            else:
                made.append(self.value(node))
        return made

    def one(self, node: nodes.Mirrored) -> torch.Tensor:
        """The tensor of a node that stands for one."""
        if node.count != 1:
            raise TransportError(f"{node.count} tensors in place of a value")
        return self._mirrored(node)[0]

    def cache(self, node: nodes.Recorded) -> Cache:
        """Make a cache; its values are made when somebody looks."""
        cache = Cache(self.value(node.visits), self.value(node.aliases))
        lines = np.frombuffer(node.parts, np.int32).reshape(-1, 5).tolist()
        parts = [Part(self._sheet(line[0]), *line[1:]) for line in lines]
        for part in parts:
            if not 0 <= part.first <= part.stop <= len(part.sheet.calls):
                raise TransportError(f"calls {part.first} to {part.stop} of a cache")
        cache._follow(Unmade(parts, _filled))
        return cache

    def _sheet(self, number: int) -> ReadSheet:
        data = self._data
        if not 0 <= number < len(data.message.sheets):
            raise TransportError(f"sheet {number} of {len(data.message.sheets)}")
        if number not in data.sheets:
            node, layouts = data.message.sheets[number], data.message.layouts
            data.sheets[number] = ReadSheet(node, layouts, data.mirrors)
        return data.sheets[number]  # type: ignore[no-any-return]

    @functools.cached_property
    def _in_mirrors(self) -> list[torch.Tensor]:
        return rows_at(self._rows, self._data.mirrors) if self._rows is not None else []

    def _mirrored(self, node: nodes.Mirrored) -> list[torch.Tensor]:
        found = self._in_mirrors[node.first : node.first + node.count] if node.first >= 0 else []
        if not found or len(found) != node.count:
            raise TransportError(f"tensor {node.first} of {len(self._in_mirrors)} in segments")
        return found

    def tensor(self, node: nodes.Tensor) -> torch.Tensor:
        """Make a tensor: the same object for the same bytes."""
        run = self._runs.get(node.buffer)
        if run is not None and node.place is not None:
            return run[node.place]
        key = node.buffer, node.place
        known = self._tensors.get(key)
        if known is None:
            known = self._tensors[key] = self._new_tensor(node)
        return known

    def array(self, node: nodes.Array) -> np.ndarray[Any, Any]:
        """Make a numpy array."""
        dtype = dtype_of(node.dtype)
        memory, offset, count = self._located(node, dtype.itemsize)
        if not count * dtype.itemsize:
            return np.empty(node.shape, dtype)
        return np.ndarray(node.shape, dtype, buffer=memory, offset=offset)

    def blob(self, node: nodes.Blob) -> bytes | bytearray:
        """Copy long bytes, or a bytearray, out of the message."""
        memory, offset, size = self._data.at(node.buffer)
        found = memoryview(memory)[offset : offset + size]
        return bytearray(found) if node.mutable else bytes(found)

    def _new_tensor(self, node: nodes.Tensor) -> torch.Tensor:
        dtype = nodes.DTYPES[node.dtype]
        memory, offset, count = self._located(node, dtype.itemsize)
        if not count:
            return torch.empty(node.shape, dtype=dtype, device="cpu")
        flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=offset)
        return flat if len(node.shape) == 1 else flat.view(node.shape)

    def _located(
        self, node: nodes.Tensor | nodes.Array, itemsize: int
    ) -> tuple[memoryview, int, int]:
        memory, offset, size = self._data.at(node.buffer)
        count = math.prod(node.shape)
        if type(node) is nodes.Tensor and node.place is not None:
            offset, size = _part(offset, size, count * itemsize, node.place)
        if count * itemsize != size:
            raise TransportError(f"{size} bytes for shape {list(node.shape)} of {node.dtype}")
        return memory, offset, count

    def _run(self, node: nodes.Run) -> list[torch.Tensor]:
        memory, offset, size = self._data.at(node.buffer)
        dtype = nodes.DTYPES[node.dtype]
        if min(node.shape, default=1) < 1 or node.count < 1:
            raise TransportError(f"{node.count} tensors of shape {list(node.shape)}")
        if math.prod(node.shape) * node.count * dtype.itemsize != size:
            raise TransportError(f"{size} bytes for {node.count} tensors of {list(node.shape)}")
        found = tensors_at(memory, offset, dtype, (node.count, *node.shape))
        self._runs[node.buffer] = found
        return found


def _part(offset: int, size: int, part: int, place: int) -> tuple[int, int]:
    """Where one of the equal parts of a buffer begins, and its size, both in bytes."""
    if place < 0 or (place + 1) * part > size:
        raise TransportError(f"place {place} in a buffer of {size} bytes")
    return offset + place * part, part


def _made(decoder: Decoder, node: nodes.Made) -> Any:
    return _MAKERS[node.kind](decoder.values(node.parts))


def _map(decoder: Decoder, node: nodes.Map) -> dict[Any, Any]:
    items = zip(decoder.values(node.keys), decoder.values(node.values), strict=True)
    return OrderedDict(items) if node.ordered else dict(items)


def _instance(decoder: Decoder, node: nodes.Instance) -> Any:
    values = decoder.values(node.values)
    cls = _loaded(node.cls)
    if node.kind == "torch":
        if not issubclass(cls, tuple) or vars(torch.return_types).get(node.cls[1]) is not cls:
            raise TransportError(f"{_dotted(node.cls)} is none of torch.return_types")
        return cls(values)
    return (_named if node.kind == "namedtuple" else _dataclass)(cls, node, values)


def _named(cls: type, node: nodes.Instance, values: list[Any]) -> Any:
    if not issubclass(cls, tuple) or list(getattr(cls, "_fields", ())) != node.names:
        raise TransportError(f"{_dotted(node.cls)} is no namedtuple of {node.names} here")
    return tuple.__new__(cls, values)


def _dataclass(cls: type, node: nodes.Instance, values: list[Any]) -> Any:
    known = {field.name for field in dataclasses.fields(cls)} if _is_dataclass(cls) else set()
    if not _is_dataclass(cls) or not known.issuperset(node.names):
        raise TransportError(f"{_dotted(node.cls)} is no dataclass with {node.names} here")
    made: Any = object.__new__(cls)
    for name, value in zip(node.names, values, strict=True):
        object.__setattr__(made, name, value)  # also where the class is frozen
    return made


def _is_dataclass(cls: type) -> bool:
    return dataclasses.is_dataclass(cls)


def _member(_: Decoder, node: nodes.Member) -> Any:
    cls = _loaded(node.cls)
    if not issubclass(cls, enum.Enum):
        raise TransportError(f"{_dotted(node.cls)} is no enum here")
    missing = [name for name in node.names if name not in cls.__members__]
    if missing:
        raise TransportError(f"the enum {_dotted(node.cls)} has no member {missing[0]} here")
    members = [cls.__members__[name] for name in node.names]
    if issubclass(cls, enum.Flag):
        return functools.reduce(operator.or_, members) if members else cls(0)
    return members[0]


def _loaded(name: tuple[str, str]) -> type:
    cls = find_class(*name)
    if cls is None:
        raise TransportError(
            f"the type {_dotted(name)} is not loaded in this process: "
            "import its module before the trace, or save its tensors or numbers instead"
        )
    return cls


def _dotted(name: tuple[str, str]) -> str:
    return ".".join(name)


def _no_value(_: Decoder, node: nodes.Run) -> Any:
    raise TransportError(f"{node.count} tensors in place of a value")


def _scalar(_: Decoder, node: nodes.Scalar) -> Any:
    dtype = dtype_of(node.dtype)
    if dtype.itemsize != len(node.data):
        raise TransportError(f"{len(node.data)} bytes for a numpy scalar of {dtype}")
    return np.ndarray((), dtype, buffer=node.data)[()]


def _placed(decoder: Decoder, node: nodes.Placed) -> Any:
    return OnDevice(decoder.value(node.value), node.device)


def _filled(form: nodes.Node, tensors: Sequence[torch.Tensor]) -> Any:
    """A recorded value, of its form and the tensors in it."""
    return Decoder(_NOTHING, holes=tensors).value(form)


def _datetime(parts: list[Any]) -> datetime.datetime:
    text, fold, zone = parts
    made = datetime.datetime.fromisoformat(text).replace(fold=fold)
    return made if zone is None else made.replace(tzinfo=zoneinfo.ZoneInfo(zone))


def _time(parts: list[Any]) -> datetime.time:
    text, fold, zone = parts
    made = datetime.time.fromisoformat(text).replace(fold=fold)
    return made if zone is None else made.replace(tzinfo=zoneinfo.ZoneInfo(zone))


_READERS: dict[type, Callable[[Decoder, Any], Any]] = {
    nodes.Made: _made,
    nodes.Numbers: lambda _, node: node.values,
    nodes.Map: _map,
    nodes.Instance: _instance,
    nodes.Member: _member,
    nodes.Tensor: Decoder.tensor,
    nodes.Run: _no_value,
    nodes.Array: Decoder.array,
    nodes.Scalar: _scalar,
    nodes.Binary: lambda _, node: node.data,
    nodes.Blob: Decoder.blob,
    nodes.Placed: _placed,
    nodes.Mirrored: Decoder.one,
    nodes.Recorded: Decoder.cache,
    nodes.Leaf: lambda decoder, node: decoder.holes[node.number],
}

_MAKERS: dict[str, Callable[[list[Any]], Any]] = {
    "int": lambda parts: int(parts[0], 16),
    "str": lambda parts: parts[0].decode("utf-8", "surrogatepass"),
    "complex": lambda parts: complex(*parts),
    "list": lambda parts: parts,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "range": lambda parts: range(*parts),
    "slice": lambda parts: slice(*parts),
    "ellipsis": lambda _: ...,
    "datetime": _datetime,
    "time": _time,
    "date": lambda parts: datetime.date.fromisoformat(*parts),
    "timedelta": lambda parts: datetime.timedelta(*parts),
    "size": torch.Size,
    "dtype": lambda parts: nodes.DTYPES[parts[0]],
    "device": lambda parts: torch.device(*parts),
}
