"""Instrumented forwards at work: their operations are handed over to the blocks of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch

from midstream.errors import SourceNotAvailableError
from midstream.interleaving.events import Check
from midstream.interleaving.indices import IndexCheck, RangeCheck
from midstream.interleaving.locations import Location
from midstream.interleaving.source.copies import template_of
from midstream.interleaving.source.functions import find_function
from midstream.interleaving.source.nodes import (
    describe_owner,
    operation_locations,
    unknown_operation,
)

if TYPE_CHECKING:
    from midstream.interleaving.interleaver import Interleaver

Sides = tuple[Location, Location]


class Instrumented:
    """A callable that can run with its operations handed over.

    Args:
        owner: path of what it belongs to.
        value: the callable.

    Attributes:
        names: its operations by their number.

    Raises:
        SourceNotAvailableError: it has no Python source.
    """

    def __init__(self, owner: str, value: Callable[..., Any]):
        self._found = find_function(value, describe_owner(owner))
        self._template = template_of(self._found.function, describe_owner(owner))
        self.names = tuple(site.name for site in self._template.sites)
        self._owner = owner
        self._sides: dict[tuple[int, int], Sides] = {}
        self._template.bind(self._found.function, print)  # fails here if it fails at all

    def sides(self, number: int, count: int) -> Sides:
        """Locations of an operation, the time the function gets to it counted from 0."""
        found = self._sides.get((number, count))
        if found is None:
            found = operation_locations(self._owner, self.names[number], count)
            self._sides[number, count] = found
        return found

    def call(self, hook: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call it with its operations going through a hook."""
        function = self._found.function
        return self._found.rebuild(self._template.bind(function, hook))(*args, **kwargs)


class Sources:
    """Operations inside the forwards of one model.

    Attributes:
        wanted: paths of the modules and operations that run instrumented in this step.
    """

    def __init__(self, interleaver: Interleaver):
        self._interleaver = interleaver
        self._prepared: dict[str, tuple[Any, Instrumented | None]] = {}
        self._charted: set[str] = set()
        self._inside: dict[str, Instrumented] = {}
        self.wanted: set[str] = set()

    def _models_tensors(self) -> Iterator[torch.Tensor]:
        for module in self._interleaver.modules.values():
            yield from module.parameters(recurse=False)
            yield from module.buffers(recurse=False)

    @cached_property
    def _storages(self) -> frozenset[int]:
        return frozenset(each.untyped_storage().data_ptr() for each in self._models_tensors())

    @cached_property
    def _places(self) -> frozenset[tuple[int, int]]:
        return frozenset(map(_place, self._models_tensors()))

    def is_models(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a parameter or buffer of the model, or a view of one."""
        return tensor.untyped_storage().data_ptr() in self._storages

    def is_whole(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is all of a parameter or buffer, under whatever name and shape."""
        return _place(tensor) in self._places

    def begin_step(self) -> None:
        """Forget what the last step wanted."""
        self.wanted.clear()
        self._inside.clear()

    def call(self, owner: str, value: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a module's forward, or what an operation calls, with its operations handed over."""
        instrumented = self._prepare(owner, value)
        if instrumented is None:
            return value(*args, **kwargs)
        before = self._inside.get(owner)
        self._inside[owner] = instrumented
        self._refuse_unknown(owner, instrumented)
        try:
            with self._interleaver.charting(owner, known=owner in self._charted):
                result = instrumented.call(_Calls(self, instrumented), args, kwargs)
            self._charted.add(owner)
            return result
        finally:
            if before is None:
                del self._inside[owner]
            else:
                self._inside[owner] = before

    def _prepare(self, owner: str, value: Callable[..., Any]) -> Instrumented | None:
        """A callable made ready; None if that is not possible, which those who wait are told.

        Only modules' forwards are kept: what an operation calls may hold tensors of the step.
        """
        kept = self._prepared.get(owner)
        if kept is not None and _is_same(kept[0], value):
            return kept[1]
        instrumented = None
        try:
            self._refuse_module(owner, value)
            instrumented = Instrumented(owner, value)
        except Exception as error:  # noqa: BLE001  # it is the blocks' error, never the engine's
            self._refuse(error, self._waiting(owner))
        if self._interleaver.order.owner(owner) is None:
            self._prepared[owner] = value, instrumented
        return instrumented

    def _refuse_module(self, owner: str, value: Any) -> None:
        if isinstance(value, torch.nn.Module):
            paths = [p for p, module in self._interleaver.modules.items() if module is value]
            where = f" '{paths[0]}'" if paths else ""
            raise SourceNotAvailableError(
                f"'{owner}' calls the module{where}, whose operations are in that module's own "
                "`.source`."
            )

    def _waiting(self, owner: str) -> list[Location]:
        return [place for place in self._interleaver.waiting if place.within == owner]

    def _refuse_unknown(self, owner: str, instrumented: Instrumented) -> None:
        """End the wait for operations that a function turns out not to have."""
        for location in self._waiting(owner):
            error = self._unknown(location, instrumented)
            if error is not None:
                self._refuse(error, [location])

    def _refuse(self, error: Exception, locations: Iterable[Location]) -> None:
        for location in locations:
            self._interleaver.refuse(location, error)

    def check(self, location: Location) -> str:
        """Why an operation cannot be waited for any more; empty if it can.

        Raises:
            AttributeError: the function that is running has no such operation.
        """
        owner = location.within
        while owner is not None:
            instrumented = self._inside.get(owner)
            if instrumented is None and self._interleaver.order.has_begun(owner):
                return (
                    f" '{owner or 'model'}' has begun without its operations, since nothing asked "
                    "for them before. Write its `.source` on a line of its own at the beginning "
                    "of the block."
                )
            if owner == location.within and instrumented is not None:
                error = self._unknown(location, instrumented)
                if error is not None:
                    raise error
            owner = self._interleaver.order.owner(owner)
        return ""

    def _unknown(self, location: Location, instrumented: Instrumented) -> AttributeError | None:
        name = location.path.rpartition(".")[2].partition("[")[0]
        if name in instrumented.names:
            return None
        what = describe_owner(location.within or "")
        return AttributeError(unknown_operation(what, name, instrumented.names))

    def operate(self, sides: Sides, callee: Any, args: Any, kwargs: Any) -> Any:
        """Carry out one operation between its two hand-overs."""
        enter, leave = sides
        hand_over = self._interleaver.hand_over
        check = self.check_of(enter, callee, (args, kwargs))
        args, kwargs = hand_over(enter, (args, kwargs), check=check)
        if callee is None:
            (value,) = args
        elif enter.path in self.wanted:
            value = self.call(enter.path, callee, args, kwargs)
        else:
            value = callee(*args, **kwargs)
        return hand_over(leave, value, check=self.check_of(leave, None, value))

    def check_of(self, location: Location, callee: Any, value: Any) -> Check | None:
        """What keeps blocks from writing indices that the model cannot look up."""
        limit = self._interleaver.limit
        if limit is None or location not in self._interleaver.waiting:
            return None
        if isinstance(callee, torch.nn.Module):
            return IndexCheck(callee, value, limit)
        return RangeCheck(value)


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    """Where a tensor's numbers begin, and how many there are."""
    return tensor.data_ptr(), tensor.numel()


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, MethodType) and isinstance(other, MethodType):
        return one.__self__ is other.__self__ and one.__func__ is other.__func__
    return one is other


class _Calls:
    """The hook of one call of an instrumented function: counts how often it gets to a site."""

    def __init__(self, sources: Sources, instrumented: Instrumented):
        self._sources, self._instrumented = sources, instrumented
        self._counts: Counter[int] = Counter()

    def __call__(self, number: int, callee: Any, /, *args: Any, **kwargs: Any) -> Any:
        count = self._counts[number]
        self._counts[number] = count + 1
        sides = self._instrumented.sides(number, count)
        return self._sources.operate(sides, callee, args, kwargs)
