"""The right answers: a block beside a plain model, by PyTorch hooks and a Python generator.

The block is a generator. It yields what it asks for (`Read`, `Write`, ...) and is sent the answer;
hooks on every module let it go on where it waits. Nothing here is midstream's: one request, whole
tensors, no rows to cut out.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from typing import Any, NamedTuple

import torch

from tests.fuzz.visits import Place, Visit, first_argument


class Read(NamedTuple):
    """Ask for ``output``, ``inputs``, ``input``, ``logits`` or ``samples``."""

    path: str
    side: str


class Write(NamedTuple):
    """Assign the same."""

    path: str
    side: str
    value: Any


class Skip(NamedTuple):
    """Let a value stand for a module's output."""

    path: str
    value: Any


class Call(NamedTuple):
    """Run a module on values of the block's own."""

    path: str
    args: tuple[Any, ...]


class Enter(NamedTuple):
    """Wait for a step; the answer is whether it comes."""

    step: int


class Now(NamedTuple):
    """Ask which step it is."""


class Stop(NamedTuple):
    """End the request."""


class OutOfOrderError(RuntimeError):
    """What midstream calls so."""


class Stopped(BaseException):
    """Unwinds a block that ends its request."""


Block = Generator[Any, Any, None]


class Hooked:
    """A block beside the steps of one request.

    Args:
        model: has the modules by the paths that the block names; hooks are added to it.
        block: the generator.
        call: runs a module by its path without hooks.

    Attributes:
        error: what the block raised.
        stopped: whether it ended its request, and then whether the step's token counts.
    """

    def __init__(self, model: torch.nn.Module, block: Block, call: Callable[..., Any]):
        self._block, self._call = block, call
        self.error: BaseException | None = None
        self.stopped: bool | None = None
        self.done = False
        self._started = self._closed = self._in_step = False
        self._wanted: Any = None
        self._here: Visit | None = None
        self._passed: set[Place] = set()
        self.step = -1
        self.rows: int | None = None
        for path, module in model.named_modules():
            module.register_forward_pre_hook(partial(self._before, path), with_kwargs=True)
            module.register_forward_hook(partial(self._after, path))

    def _before(self, path: str, module: Any, args: Any, kwargs: Any) -> Any:
        call = self.reach((_operation(path), "input"), (args, kwargs))
        return self.reach((path, "input"), call)

    def _after(self, path: str, module: Any, args: Any, output: Any) -> Any:
        output = self.reach((path, "output"), self.reach((path, "skip"), output))
        return self.reach((_operation(path), "output"), output)

    def begin(self, rows: int) -> None:
        """Begin a step of so many rows."""
        self.step, self.rows, self._in_step = self.step + 1, rows, True
        self._passed.clear()
        if not self._started:
            self._started = True
            self._go(lambda: self._block.send(None))
        elif isinstance(self._wanted, Enter) and self._wanted.step <= self.step:
            self._go(partial(self._block.send, True))

    def end(self) -> None:
        """End the step: what the block waits for does not come."""
        self._in_step = False
        if not self.done and not isinstance(self._wanted, Enter):
            self._go(partial(self._block.throw, OutOfOrderError()))

    def close(self) -> None:
        """End the request."""
        self._closed = True
        if not self.done:
            self._go(partial(self._block.send, False))
        self._block.close()

    def reach(self, place: Place, value: Any, rows: int | None = None) -> Any:
        """Let the block go on if it waits here, and give what the model goes on with.

        Args:
            rows: the length of a tensor's first axis that counts as rows; the step's by default.
        """
        if place in self._passed or not self._in_step:
            return value
        self._passed.add(place)
        if self.done or _place(self._wanted) != place:
            return value
        visit = self._here = Visit(place, value, self.rows if rows is None else rows)
        self._go(self._serve(visit, self._wanted))
        self._settle(visit)
        self._here = None
        return visit.result()

    def _settle(self, visit: Visit) -> None:
        while True:
            try:
                return visit.settle()
            except Exception as error:  # noqa: BLE001
                if self.done:
                    self.error = error
                else:
                    self._go(partial(self._block.throw, error))

    def _go(self, action: Callable[[], Any] | None) -> None:
        """Let the block go on until it asks for what cannot be answered now."""
        self._wanted = None
        while action is not None:
            try:
                self._wanted = action()
                action = self._answer(self._wanted)
            except BaseException as error:  # noqa: BLE001
                self.done, action = True, None
                if isinstance(error, Stopped):
                    self.stopped = self._in_step and ("", "samples") in self._passed
                elif not isinstance(error, StopIteration):
                    self.error = error

    def _serve(self, visit: Visit, wanted: Any) -> Callable[[], Any] | None:
        if isinstance(wanted, Skip):
            return self._answer(wanted, partial(visit.assign, wanted.value, first=False))
        return self._answer(wanted)

    def _answer(
        self, wanted: Any, work: Callable[[], Any] | None = None
    ) -> Callable[[], Any] | None:
        """How the block goes on; None if it has to wait."""
        try:
            found = self._value(wanted) if work is None else work()
        except BaseException as error:  # noqa: BLE001
            return partial(self._block.throw, error)
        return None if found is _LATER else partial(self._block.send, found)

    def _value(self, wanted: Any) -> Any:
        if isinstance(wanted, Enter):
            return self._enter(wanted.step)
        if isinstance(wanted, Now):
            return self.step
        if isinstance(wanted, Stop):
            raise Stopped
        if isinstance(wanted, Call):
            return self._call(wanted.path, *wanted.args)
        return self._at(wanted)

    def _enter(self, step: int) -> Any:
        if self._closed:
            return False
        if step < self.step:
            raise OutOfOrderError
        return step == self.step or _LATER

    def _at(self, wanted: Any) -> Any:
        place, visit = _place(wanted), self._here
        if visit is None or visit.place != place or isinstance(wanted, Skip):
            call = (wanted.path, "input")
            entered = isinstance(wanted, Skip) and call in self._passed
            if not self._in_step or place in self._passed:
                raise OutOfOrderError
            if entered and (visit is None or visit.place != call):
                raise OutOfOrderError
            return _LATER
        if isinstance(wanted, Read):
            return first_argument(visit.shown) if wanted.side == "input" else visit.shown
        return visit.assign(wanted.value, first=wanted.side == "input")


_LATER = object()


def _operation(path: str) -> str:
    """The call of a module in its parent's forward, as `source` names it."""
    parent, _, name = path.rpartition(".")
    return f"{parent}.source.self_{name}_0".lstrip(".")


def _place(wanted: Any) -> Place | None:
    if isinstance(wanted, Skip):
        return wanted.path, "skip"
    if isinstance(wanted, Read | Write):
        return wanted.path, "input" if wanted.side == "inputs" else wanted.side
    return None
