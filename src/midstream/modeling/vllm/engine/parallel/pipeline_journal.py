"""What a block met on one stage of a pipeline, so that the other stages let theirs meet the same.

Every stage runs the whole block. Where it meets the stage's own modules, the stage keeps what the
block was given and what was raised in it; the other stages give their block the same.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch

from midstream.errors import MidstreamError
from midstream.interleaving.copies import Rows, counting_edits
from midstream.interleaving.events import Event
from midstream.interleaving.locations import Location
from midstream.interleaving.served import Misfit, Served
from midstream.interleaving.snapshots import Snapshots
from midstream.interleaving.structure import PLAIN, flatten

_TRAVELS = (*PLAIN, bytes, complex, torch.dtype, torch.device, torch.Size)
"""Leaves beside tensors; other objects may hold the weights of the model, say."""


class Entry:
    """One thing that a block met."""


class Left(Entry):
    """The block was taken back from a location."""


class Refused(Entry):
    """A location that the block asked for and was refused."""

    def __init__(self, location: Location, error: BaseException):
        self.location, self.error = location, portable(error)


class Threw(Entry):
    """An error that was raised in the block where it waited."""

    def __init__(self, error: BaseException):
        self.error = portable(error)


class Failed(Entry):
    """An error that ended the block."""

    def __init__(self, error: BaseException):
        self.error = portable(error)


class Did(Entry):
    """What the block had a stage do with its modules, and what came of it."""

    def __init__(self, what: str, value: Any = None, error: BaseException | None = None):
        self.what, self.value = what, _copied(value, None)
        self.error = None if error is None else portable(error)

    def result(self, device: torch.device) -> Any:
        """What came of it, for a block on another stage."""
        if self.error is not None:
            raise self.error
        return _copied(self.value, device)


def _copied(value: Any, device: torch.device | None) -> Any:
    """A value whose tensors nobody else has."""
    leaves, build = flatten(value)
    with counting_edits():
        return build(
            [_copy(leaf, device) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        )


def _copy(tensor: torch.Tensor, device: torch.device | None) -> torch.Tensor:
    bare = tensor.detach().as_subclass(torch.Tensor)
    return bare.to(device or bare.device, copy=True)


class Elsewhere:
    """Stands for an object that another stage has and that cannot travel."""

    def __init__(self, kind: str):
        self.kind = kind

    def __repr__(self) -> str:
        return f"<{self.kind} of another pipeline stage>"


class Form:
    """A tensor that nobody has read: its shape."""

    def __init__(self, tensor: torch.Tensor):
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype

    def made(self, device: torch.device) -> torch.Tensor:
        """A tensor of that form."""
        return torch.zeros(self.shape, dtype=self.dtype, device=device)


class Visit(Entry):
    """A location that the block was served at.

    Attributes:
        failed: by the number of the read or write in this visit, what it raised.
    """

    def __init__(self, location: Location, rows: int):
        self.location, self.rows = location, rows
        self.failed: dict[int, BaseException] = {}
        self._shape: Any = None
        self._leaves: list[Any] | None = None
        self._axes: list[int | None] = []

    @property
    def is_kept(self) -> bool:
        """Whether the values are known."""
        return self._leaves is not None

    def keep(self, value: Any, event: Event, *, read: bool) -> None:
        """Keep the values as the block is given them."""
        leaves, build = flatten(value)
        self._shape = build(list(range(len(leaves))))
        self._axes = [event.axis(index) for index in range(len(leaves))]
        self._leaves = [_kept(leaf, read=read) for leaf in leaves]

    def echo(self, device: torch.device) -> Echo:
        """The visit for a block on another stage."""
        leaves = [_there(leaf, device) for leaf in self._leaves or []]
        value = flatten(self._shape)[1](leaves)
        served = EchoEvent(value, self.rows, self._axes).serve(
            Rows(0, self.rows), Snapshots(), self.location
        )
        return Echo(served, self.failed)


def _kept(leaf: Any, *, read: bool) -> Any:
    if isinstance(leaf, torch.Tensor):
        if not read:
            return Form(leaf)
        with counting_edits():
            return leaf.detach().clone()
    return leaf if isinstance(leaf, _TRAVELS) else Elsewhere(type(leaf).__name__)


def _there(leaf: Any, device: torch.device) -> Any:
    if isinstance(leaf, Form):
        return leaf.made(device)
    return leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf


def portable(error: BaseException) -> BaseException:
    """An error that another process can rebuild, without what it was raised from."""
    try:
        found = pickle.loads(pickle.dumps(error))  # of this process
        if type(found) is type(error) and str(found) == str(error):
            return found
    except Exception:  # noqa: BLE001  # an exception's own code may raise anything
        pass
    return MidstreamError(f"{type(error).__name__}: {error}")


class EchoEvent(Event):
    """A hand-over of another stage: what is written here changes nothing there."""

    def __init__(self, value: Any, rows: int, axes: Sequence[int | None]):
        super().__init__(value, (), [Rows(0, rows)])
        self._axes = dict(enumerate(axes))


class Reached:
    """What a block is served on a pipeline; in place of ``Served``, whose methods it has."""

    def __init__(self, served: Served):
        self._served, self._count = served, 0

    def read(self) -> Any:
        """See ``Served``."""
        return self._do(self._served.read)

    def write(self, value: Any, where: str, misfit: Misfit | None = None) -> None:
        """See ``Served``."""
        self._do(lambda: self._served.write(value, where, misfit))

    def read_first(self, visit: int) -> Any:
        """See ``Served``."""
        return self._do(lambda: self._served.read_first(visit))

    def write_first(self, value: Any, visit: int) -> None:
        """See ``Served``."""
        self._do(lambda: self._served.write_first(value, visit))

    def _do(self, do: Callable[[], Any]) -> Any:
        number, self._count = self._count, self._count + 1
        return self._numbered(number, do)

    def _numbered(self, number: int, do: Callable[[], Any]) -> Any:
        raise NotImplementedError


class Echo(Reached):
    """What a block is served of another stage; reads and writes fail where they failed there."""

    def __init__(self, served: Served, failed: dict[int, BaseException]):
        super().__init__(served)
        self._failed = failed

    def _numbered(self, number: int, do: Callable[[], Any]) -> Any:
        if number in self._failed:
            raise self._failed[number]
        return do()


class Watched(Reached):
    """What a block is served of its stage's own modules, kept for the other stages."""

    def __init__(self, served: Served, visit: Visit):
        super().__init__(served)
        self._visit = visit

    def read(self) -> Any:
        """See ``Served``."""
        value = super().read()
        self._keep(value)
        return value

    def read_first(self, visit: int) -> Any:
        """See ``Served``."""
        value = super().read_first(visit)
        self._keep(self._served.read())
        return value

    def _keep(self, value: Any) -> None:
        if not self._visit.is_kept:
            self._visit.keep(value, self._served.event, read=True)

    def _numbered(self, number: int, do: Callable[[], Any]) -> Any:
        try:
            return do()
        except Exception as error:
            self._visit.failed[number] = portable(error)
            raise

    def close(self) -> None:
        """The block is taken back: of what it has not read the others need the form."""
        if not self._visit.is_kept:
            self._visit.keep(self._served.expected(), self._served.event, read=False)
