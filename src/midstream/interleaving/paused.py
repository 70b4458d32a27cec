"""A backward pass that stands at a node of its graph: the gradients there, read and edited."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from midstream.errors import OutOfOrderError
from midstream.interleaving.origins import Place, version_of
from midstream.interleaving.structure import describe

__all__ = ["Given", "Gradient", "Paused"]


class Given:
    """The gradient of one tensor as a block has it.

    Attributes:
        value: a private copy, or what the block has put in its place.
        place: where it stands in the graph.
        line: number of the user's line that asked for it, 0 if unknown.
    """

    def __init__(self, place: Place, gradient: torch.Tensor, line: int):
        self.place, self.line = place, line
        self.value = place.rows(gradient).clone()
        self.note(gradient)

    def note(self, gradient: torch.Tensor) -> None:
        """Take the value to be what `gradient` has in its rows."""
        self._base: torch.Tensor | None = self.place.rows(gradient)
        self._noted, self._version = self.value, version_of(self.value)

    def is_changed(self) -> bool:
        """Whether the block has written to the value, or assigned another.

        The version counter misses writes through `.numpy()` and `.data`; on a CPU the bytes tell.
        """
        value, base = self.value, self._base
        if value is not self._noted or version_of(value) != self._version:
            return True
        return base is not None and _is_legible(value, base) and not _same(value, base)

    def release(self) -> None:
        """The pass goes on: what becomes of the value from here on is the block's own affair."""
        self._base = None

    @property
    def is_pending(self) -> bool:
        """Whether the pass still stands where the gradient is, and will take changes."""
        return self._base is not None


class Paused:
    """The gradients at one node, from the arrival of the pass until it goes on.

    Args:
        node: the node.
        gradients: one per output of the node; None where none arrived.

    Attributes:
        node: the node.
    """

    def __init__(self, node: Any, gradients: Sequence[torch.Tensor | None]):
        self.node = node
        self._gradients = list(gradients)
        self._givens: list[Given] = []
        self._records, self._is_edited = torch.is_grad_enabled(), False

    def give(self, place: Place, line: int) -> Given | None:
        """Give a block the gradient of a tensor, with what it has changed so far at this node.

        Returns:
            None if no gradient arrived.
        """
        with torch.inference_mode(False), torch.set_grad_enabled(self._records):
            self._settle()
            gradient = self._gradients[place.edge.output_nr]
            if gradient is None:
                return None
            given = Given(place, gradient, line)
        self._givens.append(given)
        return given

    def leave(self) -> tuple[torch.Tensor | None, ...] | None:
        """The gradients that the pass goes on with; None for those that arrived, untouched."""
        self._settle()
        for given in self._givens:
            given.release()
        return tuple(self._gradients) if self._is_edited else None

    def _settle(self) -> None:
        """Write what has changed into new gradients: those that arrived may have other owners."""
        for given in self._givens:
            if given.is_changed():
                number = given.place.edge.output_nr
                gradient = self._gradients[number]
                assert gradient is not None
                self._gradients[number] = written = given.place.written(gradient, given.value)
                given.note(written)
                self._is_edited = True


class Gradient:
    """The gradient of one tensor in one backward pass.

    Args:
        ask: lets the pass run until it has the gradient of a tensor.
        tensor: the tensor.
    """

    __slots__ = ("_ask", "_tensor")

    def __init__(self, ask: Callable[[torch.Tensor], Given], tensor: torch.Tensor):
        self._ask, self._tensor = ask, tensor

    @property
    def grad(self) -> torch.Tensor:
        """The gradient, of the tensor's shape: a copy, the same one each time.

        The pass goes on with it as it is when the block asks for the next one or the body ends:
        writing into it, or assigning a tensor of its shape, changes all that comes after.
        `retain_grad()` keeps it as it arrived.

        Raises:
            OutOfOrderError: the pass has been there, or does not come there.
            UnsupportedError: a later pass is under way.
            ValueError: what is assigned has another shape.
        """
        return self._ask(self._tensor).value

    @grad.setter
    def grad(self, value: torch.Tensor) -> None:
        given = self._ask(self._tensor)
        if not isinstance(value, torch.Tensor):
            raise TypeError(
                f"`.grad` was assigned {describe(value)}, expected a tensor "
                f"{describe(given.value)}. To stop the gradient, assign `torch.zeros_like(...)`."
            )
        if value.shape != given.value.shape:
            raise ValueError(
                f"`.grad` was assigned {describe(value)}, but the gradient is "
                f"{describe(given.value)}: a replacement must have its shape. To change some rows, "
                "write into them: `h.grad[rows] = ...`."
            )
        if not given.is_pending:
            raise OutOfOrderError(
                f"The backward pass has gone on from this gradient {describe(given.value)}, which "
                f"was read in line {given.line}: a change comes too late. Make it before another "
                "gradient is asked for."
            )
        given.value = value

    @grad.deleter
    def grad(self) -> None:
        raise TypeError(
            "A gradient cannot be deleted while its backward pass runs. To stop it, assign "
            "`torch.zeros_like(...)`."
        )


def _is_legible(value: torch.Tensor, base: torch.Tensor) -> bool:
    """Whether comparing the bytes costs no synchronisation, and is possible."""
    plain = type(value) is torch.Tensor and value.layout is torch.strided
    return plain and value.device.type == base.device.type == "cpu" and value.dtype == base.dtype


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equality that holds for NaN too."""
    return torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())
