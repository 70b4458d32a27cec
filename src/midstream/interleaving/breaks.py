"""A forward recorded with breaks at all declared locations, so that it never has to run again.

What a block will replace is not known when it is recorded. What a module returns goes on in a
tensor of its own, filled in the recording, so that a replacement leaves the module's to its other
holders. What a module is called with goes on as it is, since the module may be there to write into
it; a replacement is put into it for the time of the call. A result that lies in an argument's
memory goes on as it is too, and a replacement is written there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from midstream.interleaving.copies import counting_edits, row_axis
from midstream.interleaving.locations import Location
from midstream.interleaving.replacing import Forward
from midstream.interleaving.routes import Needs
from midstream.interleaving.source.calls import Instrumented, Sides
from midstream.interleaving.structure import flatten
from midstream.interleaving.tapped import Recorder, Tapped

if TYPE_CHECKING:
    from midstream.interleaving.interleaver import Interleaver


class DeclaredForward(Tapped):
    """A forward with breaks at all that blocks may ask for, operations inside forwards too.

    Args:
        interleaver: serves the blocks at the breaks.
        needs: the declared locations.
    """

    complete = True

    def __init__(self, interleaver: Interleaver, needs: Needs):
        super().__init__(interleaver, needs)
        within = {each.within for each in needs.locations if each.within is not None}
        self._owners = {owner for path in within for owner in _around(path)}

    @property
    def paths(self) -> set[str]:
        """The modules that have breaks, or operations with breaks."""
        return super().paths | self._owners

    def record(
        self,
        recorder: Recorder,
        forward: Forward,
        kwargs: dict[str, Any],
        sizes: Sequence[int] = (),
    ) -> Any:
        """Run the model's forward and have it recorded, see ``Tapped.record``."""
        tensors = [each for each in kwargs.values() if _is_tensor(each)]
        tensors.sort(key=torch.Tensor.dim)  # token ids: positions may have three numbers a row
        sizes = sizes or tuple(len(each) for each in tensors[:1])
        return super().record(recorder, forward, kwargs, sizes)

    def _with_breaks(self, recorder: Recorder, path: str, forward: Forward) -> Forward:
        sides = Location(path, "input"), Location(path, "output")
        inner = self.instrumented(recorder, path, forward)

        def tapped(*args: Any, **kwargs: Any) -> Any:
            if self._interleaver.is_paused:
                return forward(*args, **kwargs)
            return self.around(recorder, sides, inner, args, kwargs)

        return tapped

    def instrumented(self, recorder: Recorder, path: str, function: Forward) -> Forward:
        """A function with breaks at its operations, if it has any."""
        if path not in self._owners:
            return function
        return partial(self._with_operations, recorder, Instrumented(path, function))

    def _with_operations(
        self, recorder: Recorder, instrumented: Instrumented, /, *args: Any, **kwargs: Any
    ) -> Any:
        return instrumented.call(_Operations(self, recorder, instrumented), args, kwargs)

    def around(
        self,
        recorder: Recorder,
        sides: Sides,
        call: Forward,
        args: Any,
        kwargs: Any,
        callee: Any = None,
    ) -> Any:
        """Call something between the breaks it has.

        Args:
            callee: what an operation calls.
        """
        enter, leave = sides
        entered = None
        if enter in self.needs.locations:
            entered, (args, kwargs) = _Break.make((args, kwargs), recorder, self._may_replace)
            recorder.pause(partial(self._at, enter, entered, _module(callee)))
        value = call(*args, **kwargs)  # the arguments are held: what it makes lies elsewhere
        given = _storages((args, kwargs, getattr(callee, "__self__", None)))
        undo = None if entered is None else entered.undoing(value)
        if leave not in self.needs.locations:
            if undo is not None:
                recorder.pause(undo)
            return value
        return self.leave(recorder, leave, value, undo, given)

    def leave(
        self,
        recorder: Recorder,
        location: Location,
        value: Any,
        before: Callable[[], None] | None = None,
        given: Set[int] = frozenset(),
    ) -> Any:
        """A break behind a call.

        Args:
            before: is done first in each run.
            given: where the memory of what was called with begins.

        Returns:
            What the forward goes on with.
        """
        left, value = _Break.make(value, recorder, partial(self._owns, given))

        def serve() -> None:
            if before is not None:
                before()
            self._at(location, left, None)

        recorder.pause(serve)
        return value

    def _owns(self, given: Set[int], leaf: torch.Tensor) -> bool:
        """Whether a result goes on in a tensor of its own."""
        return self._may_replace(leaf) or (self._has_rows(leaf) and _storage(leaf) not in given)

    def _has_rows(self, leaf: torch.Tensor) -> bool:
        """Whether blocks may change a leaf."""
        if row_axis(leaf, self._sizes) is None:
            return False
        return not self._interleaver.sources.is_whole(leaf)

    def _may_replace(self, leaf: torch.Tensor) -> bool:
        """Whether an argument has to go on in a tensor of its own: the model's are not written."""
        return self._has_rows(leaf) and self._interleaver.sources.is_models(leaf)

    def _at(self, location: Location, at: _Break, callee: torch.nn.Module | None) -> None:
        if not self.live:
            return
        interleaver, value = self._interleaver, at.held
        versions = at.versions() if location in interleaver.waiting else None
        if location.within is None:
            given = interleaver.serve(location, value)
        else:
            check = interleaver.sources.check_of(location, callee, value)
            given = interleaver.hand_over(location, value, check=check)
        if versions is not None:
            at.take(given, versions)


class _Break:
    """A value at a break.

    Args:
        held: the value as a break finds it in each run.
        leaves: its leaves.
        own: tensors of their own that some of them go on in.
        storages: where the memory of each leaf begins.
    """

    def __init__(
        self,
        held: Any,
        leaves: list[Any],
        own: dict[int, torch.Tensor],
        storages: list[int | None],
    ):
        self.held, self._leaves, self._own, self._storages = held, leaves, own, storages
        self._before: dict[int, torch.Tensor] = {}

    @classmethod
    def make(
        cls, value: Any, recorder: Recorder, own: Callable[[torch.Tensor], bool]
    ) -> tuple[_Break, Any]:
        """The break of a value, and what the forward goes on with; nothing else may hold that.

        Args:
            value: what the forward has there when it is recorded.
            recorder: whose memory it lies in.
            own: which of its leaves go on in a tensor of their own.
        """
        leaves, build = flatten(value)
        held = [_held(recorder, leaf) for leaf in leaves]
        mine = {i: leaf.clone() for i, leaf in enumerate(leaves) if _is_tensor(leaf) and own(leaf)}
        buffers = {index: recorder.hold(leaf) for index, leaf in mine.items()}
        made = cls(build(held), held, buffers, [_storage(leaf) for leaf in leaves])
        return made, build([mine.get(i, leaf) for i, leaf in enumerate(leaves)]) if mine else value

    def versions(self) -> list[int | None]:
        """By leaf, what changes when it is written to; None where nothing tells."""
        return [_version(leaf) for leaf in self._leaves]

    def take(self, given: Any, versions: Sequence[int | None]) -> None:
        """Have the forward go on with what the blocks have left.

        Args:
            versions: of the leaves, before.
        """
        self._before.clear()
        for index, new in enumerate(flatten(given)[0]):
            leaf = self._leaves[index]
            if index in self._own:
                if new is not leaf or versions[index] is None or _version(leaf) != versions[index]:
                    self._own[index].copy_(new)
            elif new is not leaf:
                self._before[index] = leaf.clone()
                leaf.copy_(new)

    def undoing(self, value: Any) -> Callable[[], None]:
        """Gives other holders their arguments back behind a call.

        Args:
            value: what it returned. What lies in an argument's memory is the call's result.
        """
        returned = _storages(value)
        kept = [i for i, storage in enumerate(self._storages) if storage not in returned]

        def undo() -> None:
            for index in kept:
                if index in self._before:
                    self._leaves[index].copy_(self._before.pop(index))
            self._before.clear()

        return undo


class _Operations:
    """The hook of an instrumented function while it is recorded, see ``source.calls``."""

    def __init__(self, forward: DeclaredForward, recorder: Recorder, instrumented: Instrumented):
        self._forward, self._recorder, self._instrumented = forward, recorder, instrumented
        self._counts: Counter[int] = Counter()

    def __call__(self, number: int, callee: Any, /, *args: Any, **kwargs: Any) -> Any:
        count = self._counts[number]
        self._counts[number] = count + 1
        sides = self._instrumented.sides(number, count)
        if callee is not None:
            call = self._forward.instrumented(self._recorder, sides[0].path, callee)
            return self._forward.around(self._recorder, sides, call, args, kwargs, callee)
        (value,) = args
        for location in sides:  # a value that is given a name: nothing is called in between
            if location in self._forward.needs.locations:
                value = self._assigned(location, value)
        return value

    def _assigned(self, location: Location, value: Any) -> Any:
        if location.side == "output":
            return self._forward.leave(self._recorder, location, value)
        args, _ = self._forward.leave(self._recorder, location, ((value,), {}))
        return args[0]


def _around(path: str) -> Iterator[str]:
    """A module or operation, and those that its function is reached through."""
    yield path
    while (outer := f".{path}".rpartition(".source."))[1]:
        path = outer[0][1:]
        yield path


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


def _held(recorder: Recorder, leaf: Any) -> Any:
    """A leaf as a break finds it; writes to it are counted where that is possible."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    with counting_edits():
        return recorder.hold(leaf)


def _version(leaf: Any) -> int | None:
    if not isinstance(leaf, torch.Tensor) or leaf.is_inference():
        return None
    return leaf._version


def _storage(leaf: Any) -> int | None:
    """Where the memory of a tensor begins."""
    return leaf.untyped_storage().data_ptr() if isinstance(leaf, torch.Tensor) else None


def _storages(value: Any) -> Set[int]:
    found = (_storage(leaf) for leaf in flatten(value)[0])
    return frozenset(storage for storage in found if storage is not None)


def _module(call: Any) -> torch.nn.Module | None:
    """A module that is called; nothing else is kept, which might hold tensors of a step."""
    return call if isinstance(call, torch.nn.Module) else None
