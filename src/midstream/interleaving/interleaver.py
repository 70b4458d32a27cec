"""Blocks beside the forward passes of one model.

A step is one forward pass. During it, the modules that a block waits for have their `forward`
replaced on the instance; when the step ends they are as before. The order in which a model calls
its modules is learned in the first step that has a block, with every module replaced; from then on
a request for a location that has been passed is known at once, and only wanted modules and those
that call them are touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from midstream.errors import OutOfOrderError
from midstream.interleaving.events import Event, Rows
from midstream.interleaving.indices import IndexCheck, Limit
from midstream.interleaving.locations import ENGINE_ORDER, LOGITS, SAMPLES, Location
from midstream.interleaving.run import EXCHANGE, Run


class Interleaver:
    """Serves one model's locations to the blocks that wait for them.

    Args:
        modules: the model's modules by path, each once, as a block names them.
        limit: bounds of the indices that modules look up, which blocks must keep.
    """

    def __init__(self, modules: Mapping[str, torch.nn.Module], limit: Limit | None = None):
        self._modules, self._limit = modules, limit
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
        self._paused = False
        self.in_forward = False
        self.in_step = False
        self.starting = False  # whether blocks execute up to their first access, one by one

    def begin_step(self, runs: Sequence[Run]) -> None:
        """Begin a step with these blocks active; they execute up to their first access in it."""
        self._position = -1
        self._passed.clear()
        self.in_step = self.starting = True
        try:
            for run in runs:
                run.interleaver = self
                if not run.started or run.awaited is not None:
                    self._turn(run)
        finally:
            self.starting = False
            EXCHANGE.give(None)
        self._learning = self.wants_modules and not self._learned

    @property
    def wants_modules(self) -> bool:
        """Whether a block waits for a module, so that the forward has to be accompanied."""
        return any(location not in ENGINE_ORDER for location in self._waiting)

    @contextmanager
    def phase(self, rows: Mapping[Run, Rows], sizes: Sequence[int]) -> Iterator[None]:
        """A part of the step in which modules run: the forward, then the head.

        Args:
            rows: the rows of each active block's request.
            sizes: lengths along which a tensor counts as one row per request or token.
        """
        self._rows, self._sizes, self.in_forward = rows, sizes, True
        try:
            for path in self._paths_to_replace():
                self._replace(path)
            yield
        finally:
            self.in_forward = False
            self._restore()
            EXCHANGE.give(None)

    def finish_step(self, *, learned: bool = True) -> None:
        """End the step: a block that still waits asked for what this step did not reach.

        Args:
            learned: whether the step ran all its phases, so that the order of modules is known.
        """
        waiting, self._waiting = self._waiting, {}
        self._learned = self._learned or (learned and self._learning)
        self._learning = False
        self.in_step = False  # a block that catches the error and asks again is refused at once
        for location, runs in waiting.items():
            for run in runs:
                run.resume(
                    OutOfOrderError(
                        f"'{location.label(run.visit)}' did not run in this step. "
                        "The block asked for it, and the step ended without it."
                    )
                )

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
        check: Callable[[int, torch.Tensor], None] | None = None,
    ) -> Any:
        """Offer a value to the blocks that wait for it.

        Args:
            value: what the model goes on with unless a block changes it.
            rows, sizes: as in ``phase``, for a value that is handed over outside one.
            check: called with a leaf's place and a tensor, raises if no block may write it there.

        Returns:
            The value the model goes on with.
        """
        self._pass(location)
        runs = self._waiting.pop(location, None)
        if not runs:
            return value
        if rows is None:
            rows, sizes = self._rows, self._sizes
        if self._limit is not None and location.side == "input":
            check = IndexCheck(self._modules[location.path], value, self._limit)
        event = Event(value, sizes, [rows[run] for run in runs], check)
        for run in runs:
            self._serve(run, location, event, rows[run])
        return event.result()

    def _serve(self, run: Run, location: Location, event: Event, rows: Rows) -> None:
        """Give one block its rows, let it execute, and take back what it changed."""
        served = event.serve(rows)
        run.served = {location: served}
        try:
            run.resume()
            served.settle(location, run.visit)
        except Exception as error:  # noqa: BLE001  # a failed copy is the block's error, never the engine's
            if run.marks is not None:
                place = f'File "{run.marks.file}", line {run.marks.line}'
                error.add_note(f"Met in the value that was read at {place}.")
            run.fail(error) if run.done else run.resume(error)
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
        index = ENGINE_ORDER.get(location, self._order.get(location))
        if index is None:  # wherever it is, it comes before the logits
            index = ENGINE_ORDER[LOGITS] - 1
        if location not in self._passed and index > self._position:
            return
        text = f"'{location.label(run.visit)}' was requested but the model already ran past it"
        if run.marks is not None:
            text += (
                f": the block had already been given '{run.marks.location.label(run.visit)}'. "
                f"Move this access above line {run.marks.line}"
            )
        raise OutOfOrderError(text + ".")

    def _pass(self, location: Location) -> None:
        index = ENGINE_ORDER.get(location, self._order.get(location))
        if index is None and self._learning:
            index = self._order[location] = len(self._order)
        if index is None:  # a module the first step did not call: its place in the order is unknown
            self._passed.add(location)
        else:
            self._position = max(self._position, index)

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
        return [path for location in wanted for path in self._paths(location)]

    def _paths(self, location: Location) -> list[str]:
        """The location's module, and those whose call is under way when it is reached.

        A block that was given the one may go on to the output of the others, and a call that is
        under way can no longer be replaced.
        """
        found = self._around.get(location)
        if found is None:
            found = self._around[location] = [location.path, *self._callers(location)]
        return found

    def _callers(self, location: Location) -> list[str]:
        order, index = self._order, self._order.get(location)
        if index is None:  # not called in the first step: as the tree has it
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
        made = self._made.get(path)
        if made is None or made[0] is not own:
            made = self._made[path] = (own, self._traced(path, module.forward))
        module.__dict__["forward"] = made[1]

    def _restore(self) -> None:
        for module, own in self._replaced.values():
            if own is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = own
        self._replaced.clear()

    def _traced(self, path: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        entry, leave = Location(path, "input"), Location(path, "output")

        def traced(*args: Any, **kwargs: Any) -> Any:
            if self._paused:
                return forward(*args, **kwargs)
            if entry in self._waiting or self._learning:
                args, kwargs = self.hand_over(entry, (args, kwargs))
            value = forward(*args, **kwargs)
            if leave in self._waiting or self._learning:
                value = self.hand_over(leave, value)
            return value

        return traced
