"""Blocks beside forward passes in the caller's own process."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from greenlet import getcurrent

from midstream.errors import OutOfOrderError
from midstream.interleaving.copies import BatchSizes, Rows
from midstream.interleaving.events import Check, Event
from midstream.interleaving.interleaver import Interleaver
from midstream.interleaving.live import LiveEvent
from midstream.interleaving.locations import ENGINE_ORDER, Location
from midstream.interleaving.modes import BlockModes
from midstream.interleaving.order import Order
from midstream.interleaving.run import Run, StopTrace
from midstream.interleaving.structure import flatten
from midstream.interleaving.whole import Whole

if TYPE_CHECKING:
    from midstream.interleaving.barriers import Barrier
    from midstream.interleaving.served import Served


class Halt(BaseException):
    """Leaves a forward that no block needs any more."""


class LocalRun(Run):
    """A block that shares its process with its user: random generators, streams and time too.

    Attributes:
        missed: why the location it waits for may have been passed, for the end of the step.
        barrier: where it waits for other blocks.
        held: what it was given where it does.
    """

    def __init__(self, target: Callable[[], None]):
        super().__init__(target)
        self._greenlet.gr_context = contextvars.copy_context()
        self._modes = BlockModes(guarded=False)
        self.missed: OutOfOrderError | None = None
        self.barrier: Barrier | None = None
        self.held: Served | None = None

    def resume(self, error: BaseException | None = None) -> None:
        """Let the block execute until it waits again or ends, see ``Run``; on no clock."""
        if not self._greenlet.dead and not self._abandoned:
            self._visit(error)

    def _visit(self, error: BaseException | None) -> None:
        block, current = self._greenlet, getcurrent()
        if block.parent is not current:
            block.parent = current
        self.wanted = None
        with self._modes:
            if error is None:
                block.switch()
            else:
                block.throw(error)

    def wait_for_others(self, barrier: Barrier) -> None:
        """Wait at a barrier. Called from inside the block's greenlet."""
        self.barrier, self.held = barrier, self.served
        try:
            self._park()
        finally:
            self.barrier = self.held = None

    def close(self, *, may_wait: bool = False) -> None:
        """Tell the block that its trace has ended, see ``Run``; no other comes to a barrier."""
        if self.barrier is not None:
            self.closed = True
            self.resume(self.barrier.broken())
        super().close(may_wait=may_wait)

    def release(self) -> None:
        """Let a block that has ended, and the tensors in it, go as soon as nobody holds them."""
        self._greenlet.block_run = None  # it would be a cycle, which waits for the collector
        if self.stopped is not None:
            self.stopped.__traceback__ = None  # the same
        self.interleaver = None

    def stop(self) -> NoReturn:
        """Unwind the block; its rows of the batch are not needed any more."""
        self.stopped = StopTrace(keeps_token=True)
        raise self.stopped


class LocalOrder(Order):
    """The places of a model's locations, which one forward may meet in another order than the last.

    What counts as passed is what this step was seen to reach, unless the module is one that a
    forward calls several times.
    """

    def __init__(self, modules: Collection[str]):
        super().__init__(modules)
        self._repeated: set[Location] = set()
        self._wide: dict[Location, list[str]] = {}

    def reach(self, location: Location) -> None:
        """The step has got to a location."""
        place = self.places.get(location)
        if place is None:
            super().reach(location)
        elif place > self.position:
            self.position = place
        if location in self._passed:
            self._repeated.add(location)
        self._passed.add(location)

    def has_passed(self, location: Location) -> bool:
        """Whether the step was seen to pass a location, and does not come to it again.

        While the order is being learned, every module may be called again.
        """
        if location.within is not None or location in ENGINE_ORDER:
            return super().has_passed(location)
        if self.learning or location in self._repeated:
            return False
        return location in self._passed and location != self.current

    def seems_passed(self, location: Location) -> bool:
        """Whether it has passed a location if its order is that of the first step."""
        return super().has_passed(location)

    def paths(self, location: Location) -> list[str]:
        """As for all, and the modules around in the tree, whatever order this forward has."""
        found = self._wide.get(location)
        if found is None:
            parts = location.path.split(".") if location.within is None else []
            around = [".".join(parts[:count]) for count in range(len(parts))]
            found = list(dict.fromkeys([*super().paths(location), *around]))
            if self.known:
                self._wide[location] = found
        return found


class LocalInterleaver(Interleaver):
    """Serves one model's locations to blocks in the same process.

    Args:
        modules: the model's modules by path.

    Attributes:
        released: blocks that a barrier lets go, to execute as soon as others wait.
        is_over: asked after a hand-over; whether the forward can be left.
        tokens: of each row in the forward under way; 1 where it is called with no tokens.
    """

    order: LocalOrder

    def __init__(self, modules: Mapping[str, torch.nn.Module]):
        super().__init__(modules)
        self.order = LocalOrder(modules)
        self.released: list[LocalRun] = []
        self._open: LiveEvent | None = None  # what is being handed over
        self.is_over: Callable[[], bool] = bool
        self.tokens = 1
        parts = modules[""].modules()
        # looked through again in every step that needs it; walking the modules takes far longer
        self._held = [held for part in parts for held in (part._parameters, part._buffers)]
        self._storages: frozenset[int] | None = None
        self._call: Any = ()  # what the call under way was made with
        self._callers: frozenset[int] | None = None
        self._anywhere = False  # but in the greenlet of that call
        self._calling = False  # whether a block calls a module whose locations are served

    @contextmanager
    def called_with(self, args: Sequence[Any], kwargs: Any) -> Iterator[None]:
        """A call of the model; the tensors that it is made with are the caller's to change."""
        self._call, self._callers = (tuple(args), dict(kwargs)), None
        self._home = getcurrent()
        try:
            yield
        finally:
            self._call, self._callers, self._home = (), frozenset(), None
            self.set_rows({}, ())  # with their runs

    @property
    def is_home(self) -> bool:
        """Whether what executes is the call that blocks are beside.

        Other threads, blocks and recomputations of a backward pass may call the same modules.
        """
        return getcurrent() is self._home

    def set_rows(self, rows: Mapping[Run, Rows], sizes: Sequence[int]) -> None:
        """Whose rows are where in a forward, once it is known how many it has."""
        self._rows, self._sizes = rows, sizes

    def begin_step(self, runs: Sequence[Run], replays: Sequence[Any] = ()) -> None:
        """Begin a step, see ``Interleaver``; blocks that a barrier lets go execute too."""
        self._storages = None
        super().begin_step(runs, replays)
        self.let_go()

    def hand_over(
        self,
        location: Location,
        value: Any,
        rows: Mapping[Run, Rows] | None = None,
        sizes: Sequence[int] = (),
        check: Check | None = None,
    ) -> Any:
        """Offer a value to the blocks that wait for it, see ``Interleaver``.

        Raises:
            Halt: nobody needs the forward any more.
        """
        run = self._only(location) if rows is None and check is None else None
        if run is not None:
            return self._hand_whole(location, value, run)
        others = self._set_others_aside(location) if self._calling else []
        waited = location in self._waiting
        around, self._open = self._open, None
        value = super().hand_over(location, value, rows, sizes, check)
        while self.released:
            if self.let_go() and self._open is not None:
                value = self._open.result()
            if location in self._waiting:
                value = super().hand_over(location, value, rows, sizes, check)
        self._open = around
        if others:
            self._waiting[location] = others
        if waited and not self._calling and self.is_over():
            raise Halt
        return value

    def _only(self, location: Location) -> LocalRun | None:
        """The block that waits there, if it is the only one of the batch."""
        waiting, rows = self._waiting.get(location), self._rows
        if not waiting or len(rows) > 1 or self._calling or self._skipping:
            return None
        run = waiting[0]
        is_all = rows.get(run) == (0, self._sizes[0])
        return run if is_all and isinstance(run, LocalRun) else None

    def _hand_whole(self, location: Location, value: Any, run: LocalRun) -> Any:
        """As ``hand_over`` to the only block of a batch."""
        order = self.order
        order.reach(location)
        order.current = location
        del self._waiting[location]
        rows = self._rows[run]

        def make(value: Any) -> LiveEvent:
            return self._live(location, value, [rows], self._sizes)

        whole = Whole(value, make, self._is_callers, rows, location)
        run.place, run.served = location, whole
        try:
            run.resume()
            if not whole.is_as_read:
                self.serving.settle(run, whole)
        finally:
            run.place = run.served = None
        self.after(run)
        value = whole.result()
        if run.done and self.is_over():
            raise Halt
        return value

    def _set_others_aside(self, location: Location) -> list[Run]:
        """Take out those who wait for a location that a block's call gets to for itself alone."""
        waiting = self._waiting.pop(location, [])
        mine = [run for run in waiting if run in self._rows]
        if mine:
            self._waiting[location] = mine
        return [run for run in waiting if run not in self._rows]

    def call_served(self, caller: Run, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        """Let a block call a module; its locations are served to other blocks of the same rows."""
        before = self._rows, self._sizes, self._calling, self._home
        own = self._rows[caller]
        rows = Rows(0, own.stop - own.start)
        alike = {run: rows for run, span in self._rows.items() if span == own and run is not caller}
        self.set_rows(alike, BatchSizes((rows.stop,)))
        self._calling, self._home = True, getcurrent()
        try:
            return module(*args, **kwargs)
        finally:
            self._rows, self._sizes, self._calling, self._home = before

    def let_go(self) -> bool:
        """Let blocks execute that have come through a barrier.

        Returns:
            Whether one has changed the value that is being handed over, which it was given before.
        """
        changed = False
        while self.released:
            run = self.released.pop(0)
            held = run.held
            run.resume()
            if held is not None and held.event is self._open and not held.is_as_read:
                self.serving.settle(run, held)
                changed = True
            self.after(run)
        return changed

    def after(self, run: Run) -> None:
        """Note what a block waits for, and whether that may be behind the forward already."""
        assert isinstance(run, LocalRun)
        run.missed, wanted = None, run.wanted
        if wanted is None or run.done:
            return
        place = self.order.places.get(wanted)
        is_ahead = place is not None and place > self.order.position
        if not is_ahead and self.order.seems_passed(wanted):
            run.missed = self.asking.out_of_order(run, wanted)
        self._wait(run, wanted)

    def finish_step(self, *, learned: bool = True) -> None:
        """End the step; a block whose location had been passed is told so."""
        for runs in list(self._waiting.values()):
            for run in [run for run in runs if isinstance(run, LocalRun) and run.missed]:
                runs.remove(run)
                self.in_step = False
                run.resume(run.missed)
        super().finish_step(learned=learned)

    def _event(
        self,
        location: Location,
        value: Any,
        spans: Sequence[Rows],
        sizes: Sequence[int],
        check: Check | None = None,
    ) -> Event:
        self._open = self._live(location, value, spans, sizes, check)
        return self._open

    def _live(
        self,
        location: Location,
        value: Any,
        spans: Sequence[Rows],
        sizes: Sequence[int],
        check: Check | None = None,
    ) -> LiveEvent:
        alone = all(span == (0, sizes[0]) for span in spans)
        return LiveEvent(
            value,
            sizes,
            spans,
            check,
            self._is_kept,
            None if alone else self._is_models,  # a buffer's first axis is no batch's
            total=sizes[0],
            is_callers=self._is_callers,
            tokens=self.tokens,
        )

    def _is_kept(self, tensor: torch.Tensor) -> bool:
        return self._is_callers(tensor) or self._is_models(tensor)

    def _is_callers(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is one that the model was called with, or a view of one."""
        if self._callers is None:
            leaves, _ = flatten(self._call)
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            self._callers = frozenset(map(_storage_of, tensors))
        return _storage_of(tensor) in self._callers

    def _is_models(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a parameter or buffer of the model, or a view of one."""
        if self._storages is None:
            tensors = [each for held in self._held for each in held.values() if each is not None]
            self._storages = frozenset(map(_storage_of, tensors))
        return _storage_of(tensor) in self._storages


def _storage_of(tensor: torch.Tensor) -> int:
    """What the memory of a tensor is known by; a number of its own where it has none, as sparse."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return -id(tensor)
