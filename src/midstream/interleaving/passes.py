"""One backward pass beside a block: it stops where the block asks for a gradient."""

from __future__ import annotations

import threading
from contextvars import copy_context
from types import TracebackType
from typing import Any, Self

import torch
from greenlet import getcurrent, greenlet
from torch.utils.weak import WeakTensorKeyDictionary

from midstream.errors import OutOfOrderError, UnsupportedError
from midstream.interleaving.frames import user_line
from midstream.interleaving.modes import KeptModes
from midstream.interleaving.notes import annotate
from midstream.interleaving.origins import Place, edge_of, place_of
from midstream.interleaving.paused import Given, Gradient, Paused
from midstream.interleaving.structure import describe

__all__ = ["BackwardPass", "current_pass"]

_TWICE = (
    "A backward pass frees what the next one needs: write `loss.backward(retain_graph=True)` for "
    "every pass over this graph but the last."
)


class _Threads(threading.local):
    """The passes of a thread that have begun and not ended, in the order in which they began.

    Autograd's engine keeps what it is doing for the thread: a pass may begin while another stands
    still, but it has to end before that one goes on.
    """

    def __init__(self) -> None:
        self.passes: list[BackwardPass] = []


_THREAD = _Threads()


class _Unwind(BaseException):
    """Ends a pass where it stands; no `except Exception` of a user's hook holds it up."""


def current_pass() -> BackwardPass | None:
    """The innermost pass whose body is executing here, if one is."""
    here = getcurrent()
    return next((one for one in reversed(_THREAD.passes) if one.block is here), None)


class BackwardPass:
    """One run of ``loss.backward(...)``; a context manager whose body meets its gradients.

    They come in the reverse order of the forward. All hooks are gone when it ends, which it does
    with the body, however that ends.

    Args:
        loss: as for ``loss.backward``.
        args, kwargs: its arguments.

    Attributes:
        block: the greenlet that the body runs in.
    """

    def __init__(self, loss: torch.Tensor, *args: Any, **kwargs: Any):
        self._loss: Any = loss
        self._arguments = args, kwargs
        self._givens = WeakTensorKeyDictionary()
        self._paused: Paused | None = None
        self._awaited: Any = None
        self._task: int | None = None
        self._error: BaseException | None = None
        self._is_overtaken = False
        self._refusal = "This backward pass has not begun: ask inside its `with` statement."
        self.block: greenlet | None = None

    def of(self, tensor: torch.Tensor) -> Gradient:
        """The gradient of a tensor, as the attribute `grad` of what is returned."""
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"Gradients are those of tensors, not of {describe(tensor)}.")
        return Gradient(self.given, tensor)

    def __enter__(self) -> Self:
        self.block, self._refusal = getcurrent(), ""
        self._greenlet = greenlet(self._main)
        self._greenlet.gr_context = copy_context()
        self._records = torch.is_grad_enabled()
        _THREAD.passes.append(self)
        try:
            # Stopping at once, where the pass begins, shows errors of its arguments here.
            edge = edge_of(self._loss)
            self._advance(edge.node if edge is not None else None)
        except BaseException:
            self._abort()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if self in _THREAD.passes:
                self._end_later_ones()
            if kind is None and self._is_overtaken:
                raise UnsupportedError(self._refusal)
            if kind is None:
                self._advance(None)
        finally:
            self._abort()

    def given(self, tensor: torch.Tensor) -> Given:
        """The gradient of a tensor; the pass runs until it is there."""
        given: Given | None = self._givens.get(tensor)
        if given is None:
            self._check_turn()
            given = self._givens[tensor] = self._ask(tensor)
        return given

    def _check_turn(self) -> None:
        if self._refusal:
            kind = UnsupportedError if self._is_overtaken else OutOfOrderError
            raise kind(self._refusal)
        if getcurrent() is self._greenlet:
            raise UnsupportedError(
                "A hook that the backward pass runs cannot ask it for another gradient: ask in the "
                "body of its `with` statement."
            )
        if _THREAD.passes[-1:] != [self]:
            raise UnsupportedError(
                "Another backward pass has begun since this one did, and has not ended: end its "
                "`with` statement before asking this one for a gradient."
            )

    def _ask(self, tensor: torch.Tensor) -> Given:
        place = place_of(tensor)
        if place is None:
            raise OutOfOrderError(
                f"A tensor {describe(tensor)} has no gradient: it does not require grad. It has to "
                "be computed, with gradients on, from something that does."
            )
        if self._paused is None or self._paused.node is not place.edge.node:
            self._advance(place.edge.node)
        given = self._paused.give(place, user_line()[1]) if self._paused is not None else None
        if given is None:
            raise OutOfOrderError(self._absence(tensor, place))
        return given

    def _absence(self, tensor: torch.Tensor, place: Place) -> str:
        """Why the pass has not met the gradient of a tensor."""
        root, node = edge_of(self._loss), place.edge.node
        if self._paused is not None or root is None or node not in _upstream(root.node):
            return (
                f"The loss does not depend on this tensor {describe(tensor)}, so its backward pass "
                "has no gradient of it. It has to be what the loss was computed from: the value "
                "that the model went on with, not another computed from it."
            )
        before = _upstream(node)
        lines = [given.line for given in self._givens.values() if given.place.edge.node in before]
        advice = f"Move this read above line {lines[0]}" if lines else "Ask for this gradient first"
        limited = ", and name the tensor in `inputs=`" if "inputs" in self._arguments[1] else ""
        return (
            f"The backward pass has already passed the gradient of this tensor {describe(tensor)}: "
            f"gradients come in the reverse order of the forward. {advice}{limited}."
        )

    def _advance(self, node: Any) -> None:
        """Let the pass run until it is at a node, or with None to its end."""
        if self._greenlet.dead:
            return
        handle = node.register_prehook(self._pause) if node is not None else None
        self._awaited, self._greenlet.parent = node, getcurrent()
        try:
            with KeptModes():
                self._greenlet.switch()
        finally:
            if handle is not None:
                handle.remove()
        self._raise()

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is None:
            return
        self._refusal = f"This backward pass has failed with {type(error).__name__}: {error}"
        if type(error) is RuntimeError and "through the graph a second time" in str(error):
            annotate(error, _TWICE)
        try:
            raise error
        finally:
            del error  # its traceback has this frame

    def _abort(self) -> None:
        """End the pass where it stands, and let go of everything."""
        if not self._greenlet.dead:
            self._greenlet.parent = getcurrent()
            with KeptModes():
                self._greenlet.throw(_Unwind)
        if self in _THREAD.passes:
            _THREAD.passes.remove(self)
        self._givens.clear()
        self._loss, self._arguments = None, ((), {})  # who holds the pass does not hold the graph
        self._refusal = self._refusal or (
            "This backward pass has ended: ask for gradients inside its `with` statement."
        )

    def _end_later_ones(self) -> None:
        while (later := _THREAD.passes[-1]) is not self:
            later._refusal = (
                "This backward pass was ended, because the body of an earlier one went on while "
                "this one's waited: let the body of a backward statement wait for nothing of the "
                "model's. Read what it needs before it."
            )
            later._is_overtaken = True
            later._abort()

    # In the greenlet of the pass.

    def _main(self) -> None:
        args, kwargs = self._arguments
        try:
            # All devices in this thread: a hook in another one could not switch to the block.
            torch.set_grad_enabled(self._records)
            with torch.autograd.set_multithreading_enabled(False):
                self._loss.backward(*args, **kwargs)
        except _Unwind:
            pass
        except BaseException as error:  # noqa: BLE001  # raised again where the block waits
            self._error = error

    def _pause(self, gradients: tuple[torch.Tensor | None, ...]) -> Any:
        task = torch._C._current_graph_task_id()
        self._task = task if self._task is None else self._task
        if task != self._task:
            return None  # another pass over the same graph, which a hook of the user's runs
        self._paused = Paused(self._awaited, gradients)
        try:
            with KeptModes():
                self._greenlet.parent.switch()
            return self._paused.leave()
        finally:
            self._paused = None


def _upstream(node: Any) -> set[Any]:
    """The nodes that a backward pass comes to after a node, and the node."""
    seen, waiting = set(), [node]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
    return seen
