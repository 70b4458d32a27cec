"""Blocks beside the forward passes of one model.

A step is one forward pass. During it, the modules that a block waits for have their `forward`
replaced on the instance; when the step ends they are as before. The order in which a model calls
its modules is learned in the first step that has a block, with every module replaced; from then on
a request for a location that has been passed is known at once, and only wanted modules and those
that call them are touched.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from greenlet import getcurrent

from midstream.errors import OutOfOrderError
from midstream.interleaving.across import Across
from midstream.interleaving.asking import Asking
from midstream.interleaving.copies import Rows
from midstream.interleaving.declared import Declared
from midstream.interleaving.events import Check, Event
from midstream.interleaving.indices import IndexCheck, Limit
from midstream.interleaving.locations import ENGINE_ORDER, SKIP, Location
from midstream.interleaving.mirroring import Mirroring
from midstream.interleaving.neutral import NEUTRAL
from midstream.interleaving.offers import Offer
from midstream.interleaving.order import Order
from midstream.interleaving.recording import Recordings
from midstream.interleaving.replacing import Replacing
from midstream.interleaving.replays import Replay, Replays
from midstream.interleaving.run import EXCHANGE, Run
from midstream.interleaving.serving import Serving
from midstream.interleaving.skips import Skips
from midstream.interleaving.source import Sources
from midstream.interleaving.standing import Standing
from midstream.interleaving.tapping import Tapping


class Interleaver:
    """Serves one model's locations to the blocks that wait for them.

    Args:
        modules: the model's modules by path, each once, as a block names them.
        limit: bounds of the indices that modules look up, which blocks must keep.
        always: paths of the modules that run even if all blocks of a step skip them.

    Attributes:
        skips: what blocks skip in the step under way.
        order: in which order the model meets its locations, and how far the step has got.
        replacing: the modules whose forward is another one in the step.
        sources: the operations inside forwards.
        tapping: forwards that run as recorded ones.
        asking: what blocks may ask for.
        around_calls: entered around each call of a module that a block makes itself.
        declared: the locations that blocks may ask for; None for all.
        has_all: whether this process runs the whole forward.
        across: the processes that run the same blocks beside parts of the model; None if this one
            has all of it.
        mirroring: is told of copies that blocks may save, if anybody is.
    """

    has_all = True

    def __init__(
        self,
        modules: Mapping[str, torch.nn.Module],
        limit: Limit | None = None,
        always: Collection[str] = (),
    ):
        self._modules, self._limit = modules, limit
        self.skips = Skips(always)
        self._skipping = self.skips.values
        self.order = Order(modules)
        self.replacing = Replacing(modules, self.traced)
        self._waiting: dict[Location, list[Run]] = {}
        self._rows: Mapping[Run, Rows] = {}
        self._sizes: Sequence[int] = ()
        self._recording = Recordings()
        self._paused = False
        self._anywhere, self._home = True, None  # or in which greenlet modules run traced
        self.sources = Sources(self)
        self._observing = False  # whether every call is handed over, wanted or not
        self._in_turns = False  # whether a request has several blocks
        self._runs: Sequence[Run] = ()
        self._replays, self.logged = Replays(), False
        self.around_calls: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.declared: Declared | None = None
        self.tapping, self.asking = Tapping(self), Asking(self)
        self.serving, self.standing = Serving(self), Standing(self)
        self.across: Across | None = None
        self.mirroring: Mirroring | None = None
        self.in_forward = False
        self.in_step = False
        self.starting = False  # whether blocks execute up to their first access, one by one

    def begin_step(self, runs: Sequence[Run], replays: Sequence[Replay] = ()) -> None:
        """Begin a step with these blocks active; they execute up to their first access in it.

        Args:
            replays: rows that are run anew, with what blocks once wrote there.
        """
        self.order.begin_step()
        self.sources.begin_step()
        self.in_step = self.starting = True
        self._runs, self._recording.mirroring = runs, self.mirroring
        self._in_turns = any(run.turn for run in runs)
        self._paused = False  # a block that was left while it called a module does not set it back
        begun = [run for run in runs if not run.started or _is_due(run)]
        try:
            with (
                self.together(begun),
                NEUTRAL if all(run.plain for run in runs) else nullcontext(),
            ):
                for run in runs:
                    self._begin(run)
                for location in self.standing.locations:
                    self._expect(location)
        finally:
            self.starting = False
            EXCHANGE.give(None)
        for run in runs:
            if run.recorders and run.records:
                self._recording.add(run)
        for location in self._replays.begin(replays):
            self._expect(location)
        self.order.learning = not self.order.known and self.wants_modules
        self._observing = self.order.learning

    def _begin(self, run: Run) -> None:
        run.interleaver = self
        run.visited.clear()
        run.replaced.clear()
        run.wrote.clear()
        run.wrote_tensors.clear()
        enters = not run.started or _is_due(run)
        run.took_turn = enters and not self._stands(run)
        if run.took_turn:
            self._turn(run)

    def _stands(self, run: Run) -> bool:
        """Whether what a block would do in this step is done in its place."""
        may = self.has_all and self.across is None and not self._in_turns
        return may and self.standing.take(run)

    @contextmanager
    def together(self, runs: Sequence[Run]) -> Iterator[None]:
        """Blocks execute, in this order, in all processes that have parts of the model."""
        if self.across is None or not runs:
            yield
            return
        self.across.begin(runs)
        yield
        for run in self.across.agree(runs):
            self._forget(run)

    def _forget(self, run: Run) -> None:
        """Wait no more for a block that has been ended from outside."""
        for location in [place for place, runs in self._waiting.items() if run in runs]:
            self._waiting[location].remove(run)
            if not self._waiting[location] and location not in self._replays:
                del self._waiting[location]

    def _expect(self, location: Location) -> None:
        """Have a location handed over though no block waits for it."""
        self._waiting.setdefault(location, [])
        if location.within is not None:
            self.sources.wanted.update(self.order.paths(location))

    @property
    def wants_modules(self) -> bool:
        """Whether a module is waited for or recorded: the forward has to be accompanied."""
        return next(self.wanted(), None) is not None

    @property
    def wanted_modules(self) -> Iterator[str]:
        """What is waited for or recorded inside the forward, as users write it."""
        return (location.name for location in self.wanted())

    def wanted(self) -> Iterator[Location]:
        """What is waited for or recorded inside the forward."""
        behind = self.order.is_behind_forward
        yield from (location for location in self._waiting if not behind(location))
        yield from (location for location in self._recording.locations if not behind(location))

    @contextmanager
    def phase(
        self,
        rows: Mapping[Run, Rows],
        sizes: Sequence[int],
        *,
        logged: bool = False,
        by_hand: bool = True,
    ) -> Iterator[None]:
        """A part of the step in which modules run: the forward, then the head.

        Args:
            rows: the rows of each active block's request.
            sizes: lengths along which a tensor counts as one row per request or token.
            logged: whether what blocks write is kept, for the case that the rows are run anew.
            by_hand: whether the modules are called; those that blocks wait for are replaced then.
        """
        self._rows, self._sizes, self.in_forward = rows, sizes, True
        self.logged = logged
        try:
            for path in self._paths_to_replace() if by_hand else ():
                self.replacing.replace(path)
            yield
        finally:
            self.in_forward = self.logged = False
            self.replacing.restore()
            EXCHANGE.give(None)

    def is_ahead(self, location: Location) -> bool:
        """Whether a block may ask for a location, as far as can be seen at once; see `asking`."""
        place = self.order.places.get(location)
        return (
            place is not None
            and place > self.order.position
            and self.in_step
            and not self._skipping
            and location.within is None
            and (self.declared is None or location in self.declared)
        )

    def serve(self, location: Location, value: Any) -> Any:
        """Offer a value to the blocks that wait for it, see ``hand_over``, and to caches."""
        value = self.hand_over(location, value)
        if location.path in self._recording:
            self._record(location, value)
        return value

    def offer(self, offers: Sequence[Offer]) -> None:
        """Serve values that the forward has passed and that were kept of it, in its order."""
        self.tapping.offers.serve(offers, in_turns=self._in_turns)

    def take_waiting(self, places: Iterable[Location]) -> list[Run]:
        """The blocks that wait at some locations, for one who serves them there."""
        return [run for place in places for run in self._waiting.pop(place, ())]

    def event(self, location: Location, value: Any, spans: Sequence[Rows]) -> Event:
        """A location's value, for the rows of some requests."""
        return self._event(location, value, spans, self._sizes)

    def event_for_all(self, location: Location, value: Any) -> Event:
        """A value of which each block of the step may be given its rows."""
        spans, check = list(self._rows.values()), self._check(location, value)
        event = self._event(location, value, spans, self._sizes, check)
        event.writes = []
        return event

    def pass_by(self, location: Location, value: Any) -> None:
        """Note that the step has got to a location where blocks have been served."""
        self.order.reach(location)
        self.standing.gather(location, value)
        if location.path in self._recording:
            self._record(location, value)

    def begin_again(self, places: Iterable[Location]) -> None:
        """Begin the step's forward once more.

        Args:
            places: what is handed over though no block waits for it.
        """
        self.order.begin_step()
        for location in places:
            self._expect(location)

    def waiting_at(self, location: Location) -> list[Run]:
        """The blocks that wait for a location."""
        return self._waiting.get(location, [])

    def waiting_in_forward(self) -> Iterator[tuple[Location, Sequence[Run]]]:
        """The locations inside the forward that blocks wait for, with the blocks."""
        for location, runs in self._waiting.items():
            if not self.order.is_behind_forward(location):
                yield location, runs

    @property
    def runs_anew(self) -> bool:
        """Whether the step runs rows of preempted requests anew, with what was written there."""
        return bool(self._replays)

    @property
    def is_paused(self) -> bool:
        """Whether modules run untraced."""
        return self._paused

    def finish_step(self, *, learned: bool = True) -> None:
        """End the step: a block that still waits asked for what this step did not reach.

        Args:
            learned: whether the step ran all its phases, so that the order of modules is known.
        """
        waiting, self._waiting = self._waiting, {}
        self.order.finish_step(learned=learned)
        for location, run in self.standing.finish_step(complete=learned):
            if not run.done:
                run.refuse(OutOfOrderError(_not_run(location, run)))
        if learned:
            self.tapping.learn(self._runs)
        for run in self._runs if learned else ():
            if run.habit is not None and run.visit and run.took_turn:
                run.habit.learn(run)
        recording = [run for run in self._runs if run.recorders]
        self._runs = ()
        self._observing = False
        self.in_step = False  # a block that catches the error and asks again is refused at once
        ending = [run for runs in waiting.values() for run in runs]
        with self.together(list(dict.fromkeys([*ending, *recording]))):
            for location, runs in waiting.items():
                for run in runs:
                    run.resume(OutOfOrderError(_not_run(location, run)))
            self._skipping.clear()
            self._recording.clear()
        self.tapping.end()
        if self.mirroring is not None:
            self.mirroring.end_step()

    @property
    def has_sampled(self) -> bool:
        """Whether the step's tokens have been drawn."""
        return self.in_step and self.order.has_sampled

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
        self.order.reach(location)
        runs = self._waiting.pop(location, None)
        if self.tapping.again.running:
            value = self.tapping.again.apply(location, value, self._maker(location))
        if location in self._replays:
            value = self._replays.apply(location, value, self._event, self._sizes)
        value = self.standing.apply(location, value)
        if not runs:
            self.standing.gather(location, value)
            return value
        if rows is None:
            rows, sizes = self._rows, self._sizes
        if self._skipping and not (runs := self._seeing(location, runs, rows)):
            self.standing.gather(location, value)
            return value
        self.order.current = location
        check = check or self._check(location, value)
        for together in _in_turns(runs) if self._in_turns else (runs,):
            event = self._event(location, value, [rows[run] for run in together], sizes, check)
            if self.tapping.again.keeping:
                event.writes, event.before_write = [], self.tapping.again.spare
            if self.across is None:
                self._serve(together, location, event, rows)
            else:
                with self.together(together):
                    self._serve(together, location, event, rows)
            self.tapping.again.keep(location, event)
            value = event.result()
        self.standing.gather(location, value)
        return value

    def _check(self, location: Location, value: Any) -> Check | None:
        if self._limit is None or location.side != "input" or location.within is not None:
            return None
        return IndexCheck(self._modules[location.path], value, self._limit)

    def _serve(
        self, runs: Sequence[Run], location: Location, event: Event, rows: Mapping[Run, Rows]
    ) -> None:
        if event.refused is None:
            self.serving.serve(runs, location, event, rows)
        else:
            self._resume(runs, event.refused)
        for span, error in event.flush():
            _fail([run for run in runs if rows[run] == span], error)

    def _maker(self, location: Location) -> Callable[[Any, Sequence[Rows]], Event]:
        return lambda value, spans: self._event(location, value, spans, self._sizes)

    def _event(
        self,
        location: Location,
        value: Any,
        spans: Sequence[Rows],
        sizes: Sequence[int],
        check: Check | None = None,
    ) -> Event:
        make = Event if self.across is None else partial(self.across.event, location)
        if location.within is None:
            event = make(value, sizes, spans, check)
            if self.mirroring is not None:
                event.copied = partial(self.mirroring.made, location)
            return event
        sources = self.sources
        return make(value, sizes, spans, check, sources.is_models, sources.is_whole)

    def enter(self, path: str, call: Any) -> Any:
        """Offer what a module is called with, ``(args, kwargs)``, to the blocks that wait.

        Returns:
            What it is to be called with.
        """
        return self.serve(Location(path, "input"), call)

    def leave(self, path: str, value: Any) -> Any:
        """Offer what a module returned: to the blocks that skip it, then to those that wait.

        Returns:
            The value the model goes on with.
        """
        if Location(path, SKIP) in self._waiting:
            value = self.hand_over(Location(path, SKIP), value)
        return self.serve(Location(path, "output"), value)

    def _record(self, location: Location, value: Any) -> None:
        """Keep a value, as all blocks have left it, for those that record it."""
        if self.tapping.again.is_recorded(location):
            return
        runs = self._recording.runs(location.path)
        hidden = (
            self.skips.hidden_from(runs, location, self._rows, self.order.places)
            if self._skipping
            else ()
        )
        if self.across is not None:
            value, refused = self._whole(location, value, runs)
            if refused is not None:
                _fail(runs, refused)
                return
        self._recording.keep(location, value, self._rows, self._sizes, hidden)

    def _whole(
        self, location: Location, value: Any, runs: Sequence[Run]
    ) -> tuple[Any, Exception | None]:
        assert self.across is not None
        if location not in self._recording.locations:
            return value, None
        spans = [self._rows[run] for run in runs]
        return self.across.whole(location, value, self._sizes, spans)

    def _seeing(self, location: Location, runs: list[Run], rows: Mapping[Run, Rows]) -> list[Run]:
        """Of the blocks that wait, those whose request does not skip what is around."""
        hidden = self.skips.hidden_from(runs, location, rows, self.order.places)
        if hidden:
            self._waiting[location] = hidden
        return [run for run in runs if run not in hidden]

    def _turn(self, run: Run) -> None:
        run.resume_plainly() if run.plain and NEUTRAL.entered else run.resume()
        self.after(run)

    def after(self, run: Run) -> None:
        """Note what a block that has executed waits for."""
        if not run.done and run.wanted is not None:
            self._wait(run, run.wanted)

    def _wait(self, run: Run, location: Location) -> None:
        waiting = self._waiting.get(location)
        if waiting and not run.uses_source:  # what is to be done for the location has been done
            waiting.append(run)
            return
        self._waiting.setdefault(location, []).append(run)
        if run.uses_source and location not in ENGINE_ORDER:
            self.sources.wanted.update(self.order.paths(location))
        if self.tapping.is_under_way:
            self.tapping.expect(location)
        elif self.in_forward and not self.order.learning and location not in ENGINE_ORDER:
            self.replacing.replace_all(self.order.paths(location))

    def perform(self, run: Run, paths: Sequence[str], what: str, do: Callable[[], Any]) -> Any:
        """Do something with modules for a block.

        Args:
            paths: of the modules.
            what: names it, for errors.
        """
        return do()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let modules run untraced, for a call that a block makes itself."""
        before, self._paused = self._paused, True
        try:
            with self.around_calls():
                yield
        finally:
            self._paused = before

    def _paths_to_replace(self) -> list[str]:
        if self.order.learning:
            return list(self._modules)
        wanted = [location for location in self._waiting if location not in ENGINE_ORDER]
        around = [path for location in wanted for path in self.order.paths(location)]
        return [*around, *self._recording]

    def call(self, path: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a module's forward; with its operations handed over if a block may ask for them."""
        if path in self.sources.wanted:
            return self.sources.call(path, forward, args, kwargs)
        return forward(*args, **kwargs)

    def traced(self, path: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        """What stands for a module's forward in a step: the same between its hand-overs."""
        entry, leave = Location(path, "input"), Location(path, "output")
        recorded, instrumented = self._recording, self.sources.wanted

        def traced(*args: Any, **kwargs: Any) -> Any:
            if self._paused or not (self._anywhere or getcurrent() is self._home):
                return forward(*args, **kwargs)
            if entry in self._waiting or self._observing:
                args, kwargs = self.hand_over(entry, (args, kwargs))
            if path in recorded:
                self._record(entry, (args, kwargs))
            if self._skipping:
                value = self._forward_or_skip(path, forward, args, kwargs)
            elif path in instrumented:
                value = self.sources.call(path, forward, args, kwargs)
            else:
                value = forward(*args, **kwargs)
            if self.order.learning:
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
        if not self.order.learning:
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
    def runs(self) -> Sequence[Run]:
        """The blocks of the step."""
        return self._runs

    @property
    def rows(self) -> Mapping[Run, Rows]:
        """Each block's rows, in the part of the step under way."""
        return self._rows

    @property
    def limit(self) -> Limit | None:
        """Bounds of the indices that modules look up."""
        return self._limit

    def refuse(self, location: Location, error: Exception) -> None:
        """Raise an error in the blocks that wait for a location."""
        runs = self._waiting.pop(location, [])
        with self.together(runs):
            self._resume(runs, error)

    def _resume(self, runs: Sequence[Run], error: Exception) -> None:
        for run in runs:
            run.resume(error)
            self.after(run)

    @contextmanager
    def charting(self, owner: str, *, known: bool) -> Iterator[None]:
        """A call of an instrumented function; the first one shows the order of its operations."""
        order, entry = self.order, self.order.entry_of(owner)
        before = order.charting, self._observing
        order.reach(entry)
        if not known and entry.within is None and order.is_at(entry):
            order.charting, self._observing = owner, True
            for path in self._modules:
                if not owner or path.startswith(f"{owner}."):
                    self.replacing.replace(path)
        try:
            yield
        finally:
            order.charting, self._observing = before


def _is_due(run: Run) -> bool:
    """Whether the step that a block waits for has begun."""
    return run.awaited is not None and run.awaited <= run.visit


def _fail(runs: Sequence[Run], error: Exception) -> None:
    for run in runs:
        run.fail(error)


def _not_run(location: Location, run: Run) -> str:
    return (
        f"'{location.label(run.visit)}' did not run in this step. "
        "The block asked for it, and the step ended without it."
    )


def _in_turns(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs that share an event, one event after the other: none has two blocks of one request.

    A later block of a request is to see what an earlier one wrote, and copies are made once.
    """
    turns: dict[int, list[Run]] = {}
    for run in runs:
        turns.setdefault(run.turn, []).append(run)
    return [turns[turn] for turn in sorted(turns)]
