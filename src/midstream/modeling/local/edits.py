"""Edits of a local model: blocks that run beside every later call."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

from midstream.interleaving.copies import Rows
from midstream.modeling.capturing import Capturing
from midstream.modeling.local.hosted import LocalBlock
from midstream.modeling.local.running import Beside
from midstream.modeling.local.tracer import Tracer
from midstream.tracing import Block

if TYPE_CHECKING:
    from midstream.modeling.base import Model


class Edit(Capturing):
    """What `model.edit()` gives: its body becomes a part of the edited model.

    Args:
        model: what is edited.
        edited: the model that has the edit afterwards: another one, or the same.
    """

    def __init__(self, model: Model, edited: Model):
        self._model, self._edited = model, edited
        self._tracer = Tracer(edited, "edit", None, {})

    def __enter__(self) -> Any:
        self._begin(sys._getframe(1), "model.edit")
        return self._tracer if self._edited is self._model else (self._tracer, self._edited)

    def _captured(self, block: Block, frame: FrameType) -> None:
        self._edited._edits = (*self._edited._edits, block)


def edits_beside(model: Model, spans: Sequence[Rows]) -> list[Beside]:
    """A model's edits for one call: each of them beside each input's rows, in their turn."""
    found = []
    for turn, block in enumerate(model._edits):
        for rows in spans:
            tracer = Tracer(model, "edit", None, {})
            hosted = LocalBlock(block, model, tracer, dict(block.values), is_edit=True)
            hosted.run.turn = turn
            found.append(Beside(hosted, rows))
    return found
