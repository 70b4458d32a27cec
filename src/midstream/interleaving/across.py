"""What an interleaver needs where the same blocks run in several processes, on parts of tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from midstream.interleaving.copies import Rows
from midstream.interleaving.events import Check, Event
from midstream.interleaving.locations import Location

if TYPE_CHECKING:
    from midstream.interleaving.run import Run


class Across(Protocol):
    """The processes, seen from one of them. All of them call the same, in the same order."""

    def begin(self, runs: Sequence[Run]) -> None:
        """Blocks are going to execute."""

    def agree(self, runs: Sequence[Run]) -> Sequence[Run]:
        """They have. Those that failed in one process fail in all; the ones ended here."""

    def event(
        self,
        location: Location,
        value: Any,
        sizes: Sequence[int],
        spans: Sequence[Rows],
        check: Check | None = None,
        is_models: Callable[[torch.Tensor], bool] | None = None,
        is_whole: Callable[[torch.Tensor], bool] | None = None,
    ) -> Event:
        """One hand-over, whose blocks are given whole tensors; see ``Event`` and its `refused`."""

    def whole(
        self, location: Location, value: Any, sizes: Sequence[int], spans: Sequence[Rows]
    ) -> tuple[Any, Exception | None]:
        """A value with whole tensors, in these rows at least; or why there is none."""

    def call(
        self, run: Run, path: str, function: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """A block's own call of a module, or of a method of one, with whole tensors."""

    def parameter(self, run: Run | None, path: str, name: str) -> torch.Tensor:
        """A whole parameter of a module."""
