"""Running a block, and showing where it failed."""

from __future__ import annotations

import builtins
import functools
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from types import CodeType, FrameType
from typing import Any

from midstream.tracing import backward, saves
from midstream.tracing.block import Block
from midstream.tracing.capture import forget_skip
from midstream.tracing.saves import HELPER_NAMES, Scope, scoped
from midstream.tracing.sources import BLOCK_NAME

__all__ = ["Execution", "user_traceback"]

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_HIDDEN = frozenset({*HELPER_NAMES, *backward.HELPER_NAMES, BLOCK_NAME, "__builtins__", "__name__"})


class Execution:
    """One run of a block.

    The code form runs as a module whose globals are the block's values.

    The function form is called as ``function(model, tracer)``. Its saves are its local variables
    that hold a saved object when it returns, and its return value: a dict with `str` keys gives one
    save per key, any other value but None is saved as ``"return"``. The function's own text is not
    rewritten, so it saves with `midstream.save(x)`, and a number, string or other value that Python
    shares between names comes back only through the returned dict.
    """

    def __init__(
        self,
        block: Block,
        model: Any = None,
        tracer: Any = None,
        extra: Mapping[str, Any] | None = None,
        namespace: dict[str, Any] | None = None,
        helpers: Mapping[str, Callable[..., Any]] | None = None,
    ) -> None:
        """Prepare a run.

        Args:
            block: what to run.
            model: the function form's first argument.
            tracer: the function form's second argument.
            extra: more names for the code form; they win over the block's own values.
            namespace: where the code form's names live, the block's values among them; a new
                dictionary without it.
            helpers: what the code form calls under a hidden name (see ``backward``), where that is
                not to be what the source says.
        """
        self._block, self._arguments = block, (model, tracer)
        self._helpers = {**saves.helpers(), **backward.helpers(), **(helpers or {})}
        self._returned: dict[str, Any] = {}
        self.namespace: dict[str, Any] = (
            {**block.values, **(extra or {})} if namespace is None else namespace
        )
        self.scope = Scope() if block.function is None else _FunctionScope(block.function)

    def run(self) -> None:
        """Run the block to its end; its exceptions come out as they are."""
        with scoped(self.scope):
            if self._block.code is not None:
                self._run_code()
            elif self._block.function is not None:
                result = self._block.function(*self._arguments)
                self._returned = _named(result)

    def _run_code(self) -> None:
        assert self._block.code is not None
        compiled = self._block.code.compiled()
        self.namespace |= self._helpers
        self.namespace[BLOCK_NAME] = self._block.code
        self.namespace["__builtins__"] = builtins
        self.namespace.setdefault("__name__", "__midstream__")
        exec(compiled.code, self.namespace)

    def saves(self) -> dict[str, Any]:
        """Return the saved values by name; after an exception, those saved up to it."""
        if isinstance(self.scope, _FunctionScope):
            return {**self.scope.collect(self.scope.local_names()), **self._returned}
        visible = {name: v for name, v in self.namespace.items() if name not in _HIDDEN}
        return self.scope.collect(visible)


def _named(result: Any) -> dict[str, Any]:
    if isinstance(result, dict) and all(isinstance(key, str) for key in result):
        return dict(result)
    return {} if result is None else {"return": result}


class _FunctionScope(Scope):
    """Saves of a function: the first save notes the frame, whose variables outlive the call."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._codes = _codes(function)
        self._frame: FrameType | None = None

    def mark(self, value: Any, name: str | None = None) -> None:
        super().mark(value, name)
        if self._frame is None:
            self._frame = self._outermost()

    def _outermost(self) -> FrameType | None:
        frame: FrameType | None = sys._getframe(1)
        found = None
        while frame is not None:
            found = frame if frame.f_code in self._codes else found
            frame = frame.f_back
        return found

    def local_names(self) -> dict[str, Any]:
        return dict(self._frame.f_locals) if self._frame is not None else {}


def _codes(function: Callable[..., Any]) -> list[CodeType]:
    """Return the code objects that may be the function's own, behind wrappers and partials."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    if not hasattr(function, "__code__"):  # an object that can be called
        function = type(function).__call__
    code = getattr(function, "__code__", None)
    return [code] if isinstance(code, CodeType) else []


def user_traceback(block: Block, exc: BaseException) -> str:
    """Return the traceback of a failed block as text, without midstream's own frames.

    Source lines come from the block, as they were at capture; frames in other files have their line
    number only, since the file that lies here may not be the one that ran.
    """
    forget_skip(exc)
    shown = traceback.TracebackException.from_exception(exc, lookup_lines=False)
    _localise(shown, block)
    return "".join(shown.format())


def _localise(shown: traceback.TracebackException, block: Block) -> None:
    pending: list[traceback.TracebackException | None] = [shown]
    seen: set[int] = set()
    while pending:  # a chain may be longer than Python's stack
        link = pending.pop()
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        kept = [frame for frame in link.stack if not _is_own(frame.filename)]
        link.stack = traceback.StackSummary.from_list([_with_text(f, block) for f in kept])
        pending += [link.__cause__, link.__context__, *(link.exceptions or [])]


def _is_own(filename: str) -> bool:
    return os.path.abspath(filename).startswith(_PACKAGE)


def _with_text(frame: traceback.FrameSummary, block: Block) -> traceback.FrameSummary:
    line = block.line(frame.filename, frame.lineno or 0)
    if not line or frame.end_lineno != frame.lineno:
        # Markers under the code need all lines of an expression; its first one is shown alone.
        return traceback.FrameSummary(
            frame.filename, frame.lineno, frame.name, lookup_line=False, line=line
        )
    return traceback.FrameSummary(
        frame.filename,
        frame.lineno,
        frame.name,
        lookup_line=False,
        line=line,
        end_lineno=frame.end_lineno,
        colno=frame.colno,
        end_colno=frame.end_colno,
    )
