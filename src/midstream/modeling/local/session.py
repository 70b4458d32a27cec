"""`model.session()`: traces in order that see each other's variables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from midstream.errors import UnsupportedError
from midstream.modeling.local.hosted import LocalBlock
from midstream.tracing.names import resolve

if TYPE_CHECKING:
    from midstream.modeling.base import Model

_MISSING = object()


class Session:
    """A scope of traces: what one has bound, saved or not, later ones can read."""

    def __init__(self, model: Model):
        self._model = model
        self._names: dict[str, Any] = {}
        self._outside: dict[str, Any] = {}  # the caller's own variables of those names, then

    def __enter__(self) -> Session:
        if self._model._session is not None:
            raise UnsupportedError(
                "A session inside a session is not supported: the traces of the outer one see each "
                "other's variables already. Leave the inner one out."
            )
        self._model._session = self
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._model._session = None
        self._names.clear()
        self._outside.clear()

    def note(self, blocks: Sequence[LocalBlock], frame: FrameType | None) -> None:
        """Keep what a trace's blocks have bound."""
        for block in blocks:
            self._names.update(block.names)
        if frame is not None:
            found = resolve(frame, set(self._names))
            self._outside = {name: found.get(name, _MISSING) for name in self._names}

    def names(self, frame: FrameType | None) -> Mapping[str, Any]:
        """What earlier traces have bound, but for what the caller has bound anew since."""
        found = resolve(frame, set(self._names)) if frame is not None else {}
        return {
            name: value
            for name, value in self._names.items()
            if found.get(name, _MISSING) is self._outside.get(name, _MISSING)
        }
