"""One request of a trace that has several."""

from __future__ import annotations

import ast
import sys
import textwrap
from collections.abc import Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any

from midstream.errors import PromptError
from midstream.modeling.capturing import Capturing
from midstream.tracing import Block
from midstream.tracing.checks import does_nothing

if TYPE_CHECKING:
    from midstream.modeling.vllm.tracer import Tracer


class Invoke(Capturing):
    """What `tracer.invoke(...)` gives: a context manager whose body is one request's block."""

    def __init__(self, tracer: Tracer, prompt: dict[str, Any] | None, settings: Mapping[str, Any]):
        self._tracer, self._prompt, self._settings = tracer, prompt, dict(settings)

    def __enter__(self) -> Invoke:
        self._begin(sys._getframe(1), "tracer.invoke")
        return self

    def _captured(self, block: Block, frame: FrameType) -> None:
        if self._prompt is not None:
            self._tracer._add(self._prompt, self._settings, block)
        elif not _does_nothing(block):
            raise PromptError(
                "An invoke without a prompt has no request to run beside, so what its body does "
                "would vanish. Give it a prompt."
            )


def _does_nothing(block: Block) -> bool:
    return block.code is not None and does_nothing(
        ast.parse(textwrap.dedent(block.code.source)).body
    )
