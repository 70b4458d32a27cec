"""One request of a trace that has several."""

from __future__ import annotations

import ast
import sys
import textwrap
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

from midstream.errors import PromptError
from midstream.tracing import Block, Capture
from midstream.tracing.checks import does_nothing

if TYPE_CHECKING:
    from midstream.modeling.vllm.tracer import Tracer


class Invoke:
    """What `tracer.invoke(...)` gives: a context manager whose body is one request's block."""

    def __init__(self, tracer: Tracer, prompt: dict[str, Any] | None, settings: Mapping[str, Any]):
        self._tracer, self._prompt, self._settings = tracer, prompt, dict(settings)
        self._capture: Capture | None = None

    def __enter__(self) -> Invoke:
        self._capture = Capture.begin(sys._getframe(1), "tracer.invoke")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        capture, self._capture = self._capture, None
        assert capture is not None
        block = capture.finish(kind, error)
        if block is None:
            return False
        if self._prompt is not None:
            self._tracer._add(self._prompt, self._settings, block)
        elif not _does_nothing(block):
            raise PromptError(
                "An invoke without a prompt has no request to run beside, so what its body does "
                "would vanish. Give it a prompt."
            )
        return True


def _does_nothing(block: Block) -> bool:
    return block.code is not None and does_nothing(
        ast.parse(textwrap.dedent(block.code.source)).body
    )
