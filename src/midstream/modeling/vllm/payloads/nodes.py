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


class Mirrored(_Tagged, tag=12):
    """Tensors that follow each other in a container and lie in segments of several messages.

    It stands for `count` values of the container it is in: the record's `rows` from `first` on.
    """

    first: int
    count: int


class Leaf(_Tagged, tag=13):
    """In the form of a recorded call: the place of its tensor of that number."""

    number: int


class Recorded(_Tagged, tag=14):
    """A cache: what is in it as it is, and its parts of the message's sheets.

    `parts` are int32 [parts, 5]: the sheet, the calls from the first to before the last, and the
    first row of its own in each tensor, and how many.
    """

    visits: Node
    aliases: Node
    parts: bytes


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
    | Mirrored
    | Leaf
    | Recorded
    | None
)


class Rows(msgspec.Struct, array_like=True):
    """The tensors of a record that lie in segments of several messages.

    `kinds` are dtypes and shapes. `lines` are int64 [lines, 5]: a kind, a segment of the message's
    `mirrors`, the offset of the first tensor, the bytes to the next, and how many there are.
    """

    kinds: list[tuple[str, tuple[int, ...]]]
    lines: bytes


class RecordNode(msgspec.Struct, array_like=True):
    """One record; everything but the request's id in node form."""

    request_id: str
    saves: list[tuple[Node, Node]]
    error: Node
    warnings: Node
    prints: Node
    extra: Node
    rows: Rows | None = None


class LeafNode(msgspec.Struct, array_like=True, frozen=True):
    """A recorded tensor of several requests; `axis` runs over their rows, -1: all have all."""

    dtype: str
    shape: tuple[int, ...]
    axis: int


class CallNode(msgspec.Struct, array_like=True):
    """What a module was called with or returned, of several requests: its `form` has `Leaf`s."""

    path: str
    side: str
    form: Node
    leaves: list[LeafNode]


class SheetNode(msgspec.Struct, array_like=True):
    """Recorded calls of several requests, with the form that the message's `layouts` have.

    `numbers` (int64 [calls]) are their places among all calls. `segments` (int32) and `offsets`
    (int64), [tensors], say where the tensors of all calls lie, as in `Rows`.
    """

    layout: int
    numbers: bytes
    segments: bytes
    offsets: bytes


class Part(msgspec.Struct, array_like=True):
    """A segment with the next `count` buffers of a message."""

    segment: Handle
    count: int


class Message(msgspec.Struct, array_like=True):
    """All records of a step; the buffers of `sizes` are in `inline`, or in the segments of `parts`.

    There they lie as `segments.layout` says. Other messages may refer to the segments of `mirrors`
    too; those in `over` are removed when so many messages have been read that do.
    """

    records: list[RecordNode]
    sizes: list[int]
    inline: bytearray
    parts: list[Part]
    mirrors: list[Handle] = []
    over: dict[str, int] = {}
    sheets: list[SheetNode] = []
    layouts: list[list[CallNode]] = []
