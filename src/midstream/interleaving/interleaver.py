"""Blocks beside the forward passes of one model.

A step is one forward pass. During it, the modules that a block waits for have their `forward`
replaced on the instance; when the step ends they are as before. The order in which a model calls
its modules is learned in the first step that has a block, with every module replaced; from then on
a request for a location that has been passed is known at once, and only wanted modules and those
that call them are touched.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from midstream.errors import OutOfOrderError
from midstream.interleaving.events import Check, Event, Rows, Served
from midstream.interleaving.indices import IndexCheck, Limit
from midstream.interleaving.locations import ENGINE_ORDER, LOGITS, SAMPLES, SKIP, Location
from midstream.interleaving.recording import Recordings
from midstream.interleaving.replays import Replay, Replays
from midstream.interleaving.run import EXCHANGE, Run
from midstream.interleaving.skips import Skips
from midstream.interleaving.source import Sources


class Interleaver:
    """Serves one model's locations to the blocks that wait for them.

    Args:
        modules: the model's modules by path, each once, as a block names them.
        limit: bounds of the indices that modules look up, which blocks must keep.
        always: paths of the modules that run even if all blocks of a step skip them.

    Attributes:
        skips: what blocks skip in the step under way.
    """

    def __init__(
        self,
        modules: Mapping[str, torch.nn.Module],
        limit: Limit | None = None,
        always: Collection[str] = (),
    ):
        self._modules, self._limit = modules, limit
        self.skips = Skips(always)
        self._skipping = self.skips.values
        self._order: dict[Location, int] = {}
        self._learned = False  # whether the order of modules is known
        self._learning = False  # whether this step shows it
        self._waiting: dict[Location, list[Run]] = {}
        self._rows: Mapping[Run, Rows] = {}
        self._sizes: Sequence[int] = ()
        self._position = -1
        self._passed: set[Location] = set()
        self._replaced: dict[str, tuple[torch.nn.Module, Any]] = {}
        self._made: dict[str, tuple[Any, Callable[..., Any]]] = {}
        self._around: dict[Location, list[str]] = {}
        self._recording = Recordings()
        self._paused = False
        self._sources = Sources(self)
        self._charting: str | None = None  # whose operations this call shows the order of
        self._observing = False  # whether every call is handed over, wanted or not
        self._current: Location | None = None
        self._in_turns = False  # whether a request has several blocks
        self._replays, self._logged = Replays(), False
        self.in_forward = False
        self.in_step = False
        self.starting = False  # whether blocks execute up to their first access, one by one

    def begin_step(self, runs: Sequence[Run], replays: Sequence[Replay] = ()) -> None:
        """Begin a step with these blocks active; they execute up to their first access in it.

        Args:
            replays: rows that are run anew, with what blocks once wrote there.
        """
        self._position, self._current = -1, None
        self._passed.clear()
        self._sources.begin_step()
        self.in_step = self.starting = True
        self._in_turns = any(run.turn for run in runs)
        self._paused = False  # a block that was left while it called a module does not set it back
        try:
            for run in runs:
                self._begin(run)
        finally:
            self.starting = False
            EXCHANGE.give(None)
        for location in self._replays.begin(replays):
            self._expect(location)
        self._learning = self._observing = not self._learned and self.wants_modules

    def _begin(self, run: Run) -> None:
        run.interleaver = self
        if not run.started or (run.awaited is not None and run.awaited <= run.visit):
            self._turn(run)
        if run.recorders and run.records:
            self._recording.add(run)

    def _expect(self, location: Location) -> None:
        """Have a location handed over though no block waits for it."""
        self._waiting.setdefault(location, [])
        if location.within is not None:
            self._sources.wanted.update(self._paths(location))

    @property
    def wants_modules(self) -> bool:
        """Whether a module is waited for or recorded: the forward has to be accompanied."""
        return bool(self._recording) or any(
            location not in ENGINE_ORDER for location in self._waiting
        )

    @property
    def wanted_modules(self) -> Iterator[str]:
        """What is waited for or recorded inside the forward, as users write it."""
        for location in self._waiting:
            if location not in ENGINE_ORDER:
                yield location.name
        yield from (Location(path, "output").name for path in self._recording)

    @contextmanager
    def phase(
        self, rows: Mapping[Run, Rows], sizes: Sequence[int], *, logged: bool = False
    ) -> Iterator[None]:
        """A part of the step in which modules run: the forward, then the head.

        Args:
            rows: the rows of each active block's request.
            sizes: lengths along which a tensor counts as one row per request or token.
            logged: whether what blocks write is kept, for the case that the rows are run anew.
        """
        self._rows, self._sizes, self.in_forward = rows, sizes, True
        self._logged = logged
        try:
            for path in self._paths_to_replace():
                self._replace(path)
            yield
        finally:
            self.in_forward = self._logged = False
            self._restore()
            EXCHANGE.give(None)

    def finish_step(self, *, learned: bool = True) -> None:
        """End the step: a block that still waits asked for what this step did not reach.

        Args:
            learned: whether the step ran all its phases, so that the order of modules is known.
        """
        waiting, self._waiting = self._waiting, {}
        self._learned = self._learned or (learned and self._learning)
        self._learning = self._observing = False
        self.in_step = False  # a block that catches the error and asks again is refused at once
        for location, runs in waiting.items():
            for run in runs:
                run.resume(
                    OutOfOrderError(
                        f"'{location.label(run.visit)}' did not run in this step. "
                        "The block asked for it, and the step ended without it."
                    )
                )
        self._skipping.clear()
        self._recording.clear()

    @property
    def has_sampled(self) -> bool:
        """Whether the step's tokens have been drawn."""
        return self.in_step and self._position >= ENGINE_ORDER[SAMPLES]

    def hand_over(
        self,
        location: Location,
        value: Any,
        rows: Mapping[Run, Rows] | None = None,
        sizes: Sequence[int] = (),
        check: Check | None = None,
    ) -> Any:
        """Offer a value to the blocks that wait for it.

        Args:
            value: what the model goes on with unless a block changes it.
            rows, sizes: as in ``phase``, for a value that is handed over outside one.
            check: refuses what no block may write there.

        Returns:
            The value the model goes on with.
        """
        self._pass(location)
        runs = self._waiting.pop(location, None)
        if location in self._replays:
            value = self._replays.apply(location, value, self._event, self._sizes)
        if not runs:
            return value
        if rows is None:
            rows, sizes = self._rows, self._sizes
        if self._skipping and not (runs := self._seeing(location, runs, rows)):
            return value
        self._current = location
        if self._limit is not None and location.side == "input" and location.within is None:
            check = IndexCheck(self._modules[location.path], value, self._limit)
        for together in _in_turns(runs) if self._in_turns else (runs,):
            event = self._event(location, value, [rows[run] for run in together], sizes, check)
            for run in together:
                self._serve(run, location, event, rows[run])
            value = event.result()
        return value

    def _event(
        self,
        location: Location,
        value: Any,
        spans: Sequence[Rows],
        sizes: Sequence[int],
        check: Check | None = None,
    ) -> Event:
        is_models = self._sources.is_models if location.within is not None else None
        return Event(value, sizes, spans, check, is_models)

    def enter(self, path: str, call: Any) -> Any:
        """Offer what a module is called with, ``(args, kwargs)``, to the blocks that wait.

        Returns:
            What it is to be called with.
        """
        call = self.hand_over(Location(path, "input"), call)
        if path in self._recording:
            self._record(Location(path, "input"), call)
        return call

    def leave(self, path: str, value: Any) -> Any:
        """Offer what a module returned: to the blocks that skip it, then to those that wait.

        Returns:
            The value the model goes on with.
        """
        if Location(path, SKIP) in self._waiting:
            value = self.hand_over(Location(path, SKIP), value)
        value = self.hand_over(Location(path, "output"), value)
        if path in self._recording:
            self._record(Location(path, "output"), value)
        return value

    def _record(self, location: Location, value: Any) -> None:
        """Keep a value, as all blocks have left it, for those that record it."""
        runs = self._recording.runs(location.path)
        hidden = (
            self.skips.hidden_from(runs, location, self._rows, self._order)
            if self._skipping
            else ()
        )
        self._recording.keep(location, value, self._rows, self._sizes, hidden)

    def _seeing(self, location: Location, runs: list[Run], rows: Mapping[Run, Rows]) -> list[Run]:
        """Of the blocks that wait, those whose request does not skip what is around."""
        hidden = self.skips.hidden_from(runs, location, rows, self._order)
        if hidden:
            self._waiting[location] = hidden
        return [run for run in runs if run not in hidden]

    def _serve(self, run: Run, location: Location, event: Event, rows: Rows) -> None:
        """Give one block its rows, let it execute, and take back what it changed."""
        served = event.serve(rows, run.snapshots, location, run.log if self._logged else None)
        run.served = {location: served}
        try:
            run.resume()
            # a block that catches the error of a write is still here, and may write again
            for tries_left in reversed(range(_TRIES)):
                error = _settled(served, run)
                if error is None:
                    break
                run.resume(error) if tries_left and not run.done else run.fail(error)
        finally:
            run.served = {}
        self._after(run)

    def _turn(self, run: Run) -> None:
        run.resume()
        self._after(run)

    def _after(self, run: Run) -> None:
        if not run.done and run.wanted is not None:
            self._wait(run, run.wanted)

    def _wait(self, run: Run, location: Location) -> None:
        self._waiting.setdefault(location, []).append(run)
        if run.uses_source and location not in ENGINE_ORDER:
            self._sources.wanted.update(self._paths(location))
        if self.in_forward and not self._learning and location not in ENGINE_ORDER:
            for path in self._paths(location):
                self._replace(path)

    def check(self, run: Run, location: Location) -> None:
        """Refuse a location that this step has passed.

        Raises:
            OutOfOrderError: naming the location and where the block stands.
        """
        if not self.in_step:
            raise OutOfOrderError(
                f"'{location.label(run.visit)}' was requested after the forward pass ended."
            )
        if self._skipping:
            self.skips.refuse_inner(run, location, self._order)
            if location.side == SKIP:  # it has been checked, see `check_skip`
                return
        index, late = ENGINE_ORDER.get(location, self._order.get(location)), ""
        if index is None:  # wherever it is, it comes before what it is part of has ended
            index = self._end_of(location.within) - 1
        if location not in self._passed and index > self._position:
            if location.within is None:
                return
            run.uses_source = True
            late = self._sources.check(location)
            if not late:
                return
        raise self._out_of_order(run, location, late)

    def check_skip(self, run: Run, location: Location) -> None:
        """Refuse to skip a module whose call has begun; being given its arguments is no part of it.

        Raises:
            OutOfOrderError: naming the location and where the block stands.
        """
        self._place_skip(location)
        entry = Location(location.path, "input")
        index = self._order.get(entry, ENGINE_ORDER[LOGITS] - 1)
        if entry not in run.served and (entry in self._passed or index <= self._position):
            raise self._out_of_order(run, location)

    def _out_of_order(self, run: Run, location: Location, late: str = "") -> OutOfOrderError:
        text = f"'{location.label(run.visit)}' was requested but the model already ran past it"
        if run.marks is not None:
            text += (
                f": the block had already been given '{run.marks.location.label(run.visit)}'. "
                f"Move this access above line {run.marks.line}"
            )
        return OutOfOrderError(f"{text}.{late}")

    def _end_of(self, owner: str | None) -> int:
        """Position at which a module or operation ends; None is the whole forward."""
        if owner is None:
            return ENGINE_ORDER[LOGITS]
        outer = self.owner(owner)
        leave = Location(owner, "output", outer)
        if leave in self._passed:
            return -1
        index = self._order.get(leave)
        return self._end_of(outer) - 1 if index is None else index

    def _place_skip(self, location: Location) -> None:
        """Give a skip its place in the order: behind all that is in the module."""
        leave = self._order.get(Location(location.path, "output"))
        if leave is not None:
            self._order.setdefault(location, leave - 1)

    def _pass(self, location: Location) -> None:
        index = ENGINE_ORDER.get(location, self._order.get(location))
        if index is None:
            index = self._learn(location)
        if index is None:  # a module the first step did not call: its place in the order is unknown
            self._passed.add(location)
        else:
            self._position = max(self._position, index)

    def _learn(self, location: Location) -> int | None:
        """The place of a location met for the first time; None where this step does not show it.

        Operations get places between those of the modules around them, every second one, so that
        what happens inside an operation has a place too.
        """
        if location.within is None:
            index = len(self._order) << 20 if self._learning else None
        else:
            index = self._position + 2 if location.within == self._charting else None
        if index is not None:
            self._order[location] = index
        return index

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let modules run untraced, for a call that a block makes itself."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def _paths_to_replace(self) -> list[str]:
        if self._learning:
            return list(self._modules)
        wanted = [location for location in self._waiting if location not in ENGINE_ORDER]
        around = [path for location in wanted for path in self._paths(location)]
        return [*around, *self._recording]

    def _paths(self, location: Location) -> list[str]:
        """The location's module, and those whose call is under way when it is reached.

        A block that was given the one may go on to the output of the others, and a call that is
        under way can no longer be replaced.
        """
        found = self._around.get(location)
        if found is None:
            if location.within is None:
                found = [location.path, *self._callers(location)]
            else:
                outer = Location(location.within, "input", self.owner(location.within))
                found = [location.within, *self._paths(outer)]
            if self._learned:
                self._around[location] = found
        return found

    def _callers(self, location: Location) -> list[str]:
        order, index = self._order, self._order.get(location)
        if index is None or not self._learned:  # not called in the first step: as the tree has it
            parts = location.path.split(".")
            return [".".join(parts[:count]) for count in range(len(parts))]
        return [
            path
            for path in self._modules
            if order.get(Location(path, "input"), index) < index
            and index < order.get(Location(path, "output"), index)
        ]

    def _replace(self, path: str) -> None:
        module = self._modules.get(path)
        if module is None or path in self._replaced:
            return
        # into the instance's dictionary: a module's own attribute setter takes microseconds
        own = module.__dict__.get("forward")
        self._replaced[path] = (module, own)
        made = self._made.get(path)  # wrapping anew in every step would cost as much as a visit
        if made is None or made[0] is not own:
            made = self._made[path] = (own, self._traced(path, module.forward))
        module.__dict__["forward"] = made[1]

    def call(self, path: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a module's forward; with its operations handed over if a block may ask for them."""
        if path in self._sources.wanted:
            return self._sources.call(path, forward, args, kwargs)
        return forward(*args, **kwargs)

    def _restore(self) -> None:
        for module, own in self._replaced.values():
            if own is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = own
        self._replaced.clear()

    def _traced(self, path: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        entry, leave = Location(path, "input"), Location(path, "output")
        recorded, instrumented = self._recording, self._sources.wanted

        def traced(*args: Any, **kwargs: Any) -> Any:
            if self._paused:
                return forward(*args, **kwargs)
            if entry in self._waiting or self._observing:
                args, kwargs = self.hand_over(entry, (args, kwargs))
            if path in recorded:
                self._record(entry, (args, kwargs))
            if self._skipping:
                value = self._forward_or_skip(path, forward, args, kwargs)
            elif path in instrumented:
                value = self._sources.call(path, forward, args, kwargs)
            else:
                value = forward(*args, **kwargs)
            if self._learning:
                self.skips.learn(path, value, self._sizes)
            if leave in self._waiting or self._observing:
                value = self.hand_over(leave, value)
            if path in recorded:
                self._record(leave, value)
            return value

        return traced

    def _forward_or_skip(
        self, path: str, forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Call a module, unless all rows of the step skip it; rows that do are overwritten."""
        location = Location(path, SKIP)
        runs = self._waiting.get(location)
        if not runs:
            return self.call(path, forward, args, kwargs)
        value = None
        if not self._learning:
            value = self.skips.stand_in(path, runs, (args, kwargs), self._rows, self._sizes)
        if value is None:
            value = self.call(path, forward, args, kwargs)
            self.skips.learn(path, value, self._sizes)
        return self.hand_over(location, value)

    # What `source` needs.

    @property
    def waiting(self) -> Mapping[Location, Sequence[Run]]:
        """The blocks that wait, by location."""
        return self._waiting

    @property
    def modules(self) -> Mapping[str, torch.nn.Module]:
        """The model's modules by path."""
        return self._modules

    @property
    def limit(self) -> Limit | None:
        """Bounds of the indices that modules look up."""
        return self._limit

    def owner(self, path: str) -> str | None:
        """What an operation's path lies within; None for a module's path."""
        if path in self._modules:
            return None
        return f".{path}".rpartition(".source.")[0][1:]

    def forward_of(self, path: str) -> Callable[..., Any]:
        """A module's own forward, whatever stands in its place during a step."""
        module, own = self._replaced.get(path, (self._modules[path], None))
        if own is not None or path not in self._replaced:
            return own or module.forward
        return type(module).forward.__get__(module)  # type: ignore[no-any-return]

    def has_begun(self, owner: str) -> bool:
        """Whether a module or operation was entered in this step, before the present hand-over."""
        entry = Location(owner, "input", self.owner(owner))
        if entry == self._current:
            return False
        return entry in self._passed or self._order.get(entry, self._position) < self._position

    def refuse(self, location: Location, error: Exception) -> None:
        """Raise an error in the blocks that wait for a location."""
        for run in self._waiting.pop(location, ()):
            run.resume(error)
            self._after(run)

    @contextmanager
    def charting(self, owner: str, *, known: bool) -> Iterator[None]:
        """A call of an instrumented function; the first one shows the order of its operations."""
        entry = Location(owner, "input", self.owner(owner))
        before = self._charting, self._observing
        self._pass(entry)
        if not known and entry.within is None and self._order.get(entry) == self._position:
            self._charting, self._observing = owner, True
            for path in self._modules:
                if not owner or path.startswith(f"{owner}."):
                    self._replace(path)
        try:
            yield
        finally:
            self._charting, self._observing = before


_TRIES = 100
"""How often a block may catch the error of a write, and write again, at one place."""


def _in_turns(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs that share an event, one event after the other: none has two blocks of one request.

    A later block of a request is to see what an earlier one wrote, and copies are made once.
    """
    turns: dict[int, list[Run]] = {}
    for run in runs:
        turns.setdefault(run.turn, []).append(run)
    return [turns[turn] for turn in sorted(turns)]


def _settled(served: Served, run: Run) -> Exception | None:
    """Copy back what a block changed; the error of a write that failed is the block's."""
    try:
        served.settle(run.visit)
    except Exception as error:  # noqa: BLE001  # a failed copy is the block's error, never the engine's
        if run.marks is not None:
            place = f'File "{run.marks.file}", line {run.marks.line}'
            error.add_note(f"Met in the value that was read at {place}.")
        return error
    return None
