"""The form of a message: msgspec checks every message against these types as it decodes it.

A value is a tree of nodes. Plain values are nodes themselves; the others say what they are. The
bytes of tensors and arrays are not in the tree: a node holds the index of its buffer.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec
import torch

from midstream.modeling.vllm.payloads.segments import Handle

DTYPES: dict[str, torch.dtype] = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}
DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}


class _Tagged(msgspec.Struct, array_like=True, gc=False):
    pass


class Made(_Tagged, tag=0):
    """A value of a built-in kind, made from its parts: list, set, range, datetime, ..."""

    kind: str
    parts: list[Node]


class Numbers(_Tagged, tag=1):
    """A list of 64-bit integers and floats, which needs no node for each."""

    values: list[int | float]


class Map(_Tagged, tag=2):
    """A dict in its order; `ordered`: an OrderedDict."""

    keys: list[Node]
    values: list[Node]
    ordered: bool


class Instance(_Tagged, tag=3):
    """A dataclass instance, namedtuple or torch.return_types value; `cls`: module and name."""

    kind: Literal["dataclass", "namedtuple", "torch"]
    cls: tuple[str, str]
    names: list[str]
    values: list[Node]


class Member(_Tagged, tag=4):
    """An enum member, or a flag made of several (or no) members."""

    cls: tuple[str, str]
    names: list[str]


class Tensor(_Tagged, tag=5):
    """A tensor: a buffer's bytes in row-major order, or those of one `place` in a run's buffer."""

    buffer: int
    dtype: str
    shape: tuple[int, ...]
    place: int | None = None


class Array(_Tagged, tag=6):
    """A numpy array: a buffer's bytes in row-major order; `dtype` as `arrays` writes it."""

    buffer: int
    dtype: str
    shape: tuple[int, ...]


class Scalar(_Tagged, tag=7):
    """A numpy scalar."""

    dtype: str
    data: bytearray


class Blob(_Tagged, tag=8):
    """Long bytes, or a bytearray, in a buffer."""

    buffer: int
    mutable: bool


class Binary(_Tagged, tag=9):
    """Short bytes."""

    data: bytes


class Placed(_Tagged, tag=10):
    """A value that is to arrive on another device than the CPU."""

    value: Node
    device: str


class Run(_Tagged, tag=11):
    """Tensors of one shape that follow each other in a container, in one buffer without gaps.

    It stands for `count` values of the container it is in, and is no value by itself.
    """

    buffer: int
    dtype: str
    shape: tuple[int, ...]
    count: int


Node: TypeAlias = (
    bool
    | int
    | float
    | str
    | Made
    | Numbers
    | Map
    | Instance
    | Member
    | Tensor
    | Run
    | Array
    | Scalar
    | Binary
    | Blob
    | Placed
    | None
)


class RecordNode(msgspec.Struct, array_like=True):
    """One record; everything but the request's id in node form."""

    request_id: str
    saves: list[tuple[Node, Node]]
    error: Node
    warnings: Node
    prints: Node
    extra: Node


class Part(msgspec.Struct, array_like=True):
    """A segment with the next `count` buffers of a message."""

    segment: Handle
    count: int


class Message(msgspec.Struct, array_like=True):
    """All records of a step; the buffers of `sizes` are in `inline`, or in the segments of `parts`.

    There they lie as `segments.layout` says.
    """

    records: list[RecordNode]
    sizes: list[int]
    inline: bytearray
    parts: list[Part]
