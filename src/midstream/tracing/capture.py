"""A `with` body is skipped where it stands and becomes a Block."""

from __future__ import annotations

import dis
from dataclasses import dataclass
from types import FrameType
from typing import Any

from midstream.errors import (
    BlockLayoutError,
    CaptureError,
    SourceChangedError,
    WithBlockNotFoundError,
)
from midstream.tracing.block import Block, Code, Compiled
from midstream.tracing.checks import check_body, check_layout, does_nothing
from midstream.tracing.hooks import TraceHook
from midstream.tracing.names import resolve
from midstream.tracing.percode import PerCode
from midstream.tracing.sources import (
    Found,
    Source,
    future_flags,
    sources,
    with_position,
)
from midstream.tracing.unbound import warn_bare_saves
from midstream.tracing.verifying import Body, is_empty, is_same, is_skippable

__all__ = ["Capture", "forget_skip"]


class _BodySkipped(BaseException):
    """Leaves the body before its first statement; never seen outside `Capture`."""


def forget_skip(error: BaseException) -> None:
    """Take the signal that skipped a body out of an error's chain; it would only puzzle a reader.

    It gets there because the exit of the `with` statement, where the block is sent, handles it.
    """
    pending: list[BaseException | None] = [error]
    seen: set[int] = set()
    while pending:
        link = pending.pop()
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        if isinstance(link.__context__, _BodySkipped):
            link.__context__ = None
        pending += [link.__cause__, link.__context__]


@dataclass(frozen=True)
class _Site:
    """One `with` statement of one code object, found and verified.

    What was verified against a code object stays true of it: a later edit of the file changes
    neither the code that runs nor the source kept here.
    """

    code: Code
    compiled: Compiled
    body: Body
    is_idle: bool  # a body that does nothing, and may run no line at all


class Capture:
    """The capture of one `with` body, from the context manager's `__enter__` to its `__exit__`.

    Of an `async with` from the call of `__aenter__`, whose awaitable must be done at once, to that
    of `__aexit__`.

    Usage::

        def __enter__(self):
            self._capture = Capture.begin(sys._getframe(1))
            return self

        def __exit__(self, exc_type, exc, traceback):
            block = self._capture.finish(exc_type, exc)
            if block is None:
                return False  # a foreign exception is on its way
            ...
            return True

    Nothing runs between the two but the assignment to the header's `as` target. `finish` must be
    called whatever happened, since it restores the thread's trace function.
    """

    def __init__(self, frame: FrameType, site: _Site) -> None:
        self._frame: FrameType | None = frame
        self._site = site
        self._signal = _BodySkipped()
        self._hook = TraceHook(frame, self._trace)

    @classmethod
    def begin(cls, frame: FrameType, what: str = "trace") -> Capture:
        """Find the `with` statement that `frame` is entering and arrange to skip its body.

        Args:
            frame: the caller's frame, ``sys._getframe(1)`` in `__enter__`.
            what: name of the method that made the context manager, for messages.

        Raises:
            WithBlockNotFoundError: there is no source, or the frame is not at a `with` statement.
            SourceChangedError: the source is not what runs.
            BlockLayoutError: the body cannot be skipped as it is laid out.
            BlockSyntaxError: the body holds what a block cannot.
        """
        site = _site(frame, what)
        warn_bare_saves(frame, site.code, site.compiled)
        return cls(frame, site)

    def finish(
        self, exc_type: type[BaseException] | None, exc: BaseException | None
    ) -> Block | None:
        """Restore the trace functions and return the block with the values of its outside names.

        Returns:
            The block, if the body was skipped: `__exit__` then returns True. None if another
            exception is on its way.

        Raises:
            CaptureError: the body has run in place, as another tool took the trace function.
        """
        frame, signal = self._frame, self._signal
        if frame is None:
            raise CaptureError("this capture is finished already; begin a new one")
        self._frame = None
        try:
            if exc is not None and exc is not signal:
                return None
            if exc is None and not self._site.is_idle:
                raise _ran_in_place(self._site)
            values = resolve(frame, self._site.compiled.reads)
            return Block(code=self._site.code, values=values)
        finally:
            signal.__traceback__ = None  # it holds the frame, and the frame holds us
            self._hook.restore()

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        if frame is not self._frame:
            return None
        body = self._site.body
        # What leaves an idle body, the `with` statement's exit would not see.
        in_body = body.first <= frame.f_lineno <= body.last and not self._site.is_idle
        if event == "line" and in_body:
            raise self._signal
        return self._trace


# --- finding a site ------------------------------------------------------------------------------

_sites: PerCode[dict[int, _Site]] = PerCode(lambda _: {})
"""Verified sites by code object and entering instruction."""


def _site(frame: FrameType, what: str) -> _Site:
    sites = _sites(frame.f_code)
    site = sites.get(frame.f_lasti)
    if site is None:
        site = sites[frame.f_lasti] = _find_site(frame, what)
    return site


def _find_site(frame: FrameType, what: str) -> _Site:
    source, found = _find(frame, what)
    name, lines = source.filename, source.lines
    check_layout(name, lines, found.node, found.item, what)
    check_body(name, lines, found.node, found.item)
    body = Body.of(found.node)
    is_idle = does_nothing(found.node.body) or is_empty(frame.f_code, body)
    if not is_idle and not is_skippable(frame.f_code, frame.f_lasti, body):
        raise BlockLayoutError(
            f"{name}:{body.first}: the body of {what}(...) starts with `try`, which would catch "
            "the signal that skips it; put any statement, `pass` will do, before the `try`"
        )
    flags = source.block.flags if source.block is not None else future_flags(frame.f_code)
    text = source.text(body.first, body.last)
    code = Code(text, name, body.first, frame.f_code.co_qualname, flags, found.class_name)
    return _Site(code, code.compiled(), body, is_idle)


def _find(frame: FrameType, what: str) -> tuple[Source, Found]:
    """Return the source that runs, and the statement in it."""
    position, index = with_position(frame)
    tried = 0
    for source in sources(frame):
        tried += 1
        try:
            found = source.find(position, index)
            if found is not None and _verified(frame, source, found):
                return source, found
        except (SyntaxError, ValueError):
            continue  # a file that no longer compiles is not what runs
    if not tried:
        raise _no_source(frame, what)
    if not _is_entering(frame):
        raise WithBlockNotFoundError(
            f"{frame.f_code.co_filename}:{frame.f_lineno} is not a `with` statement: write "
            f"`with model.{what}(...):` where the body stands; entering it through ExitStack, a "
            "helper or a decorator leaves no body to capture. A helper can pass `block=fn`"
        )
    raise SourceChangedError(
        f"{frame.f_code.co_filename}:{frame.f_lineno}: the source is not the code that runs: "
        "it was edited after it was imported, or a tool rewrote it. Restart, or reload the module"
    )


def _verified(frame: FrameType, source: Source, found: Found) -> bool:
    if source.block is not None:
        return True  # the frame runs a block of ours, compiled from this very text
    code = frame.f_code
    return is_same(code, frame.f_lasti, source.codes(code), Body.of(found.node))


_ENTERING = ("BEFORE_WITH", "BEFORE_ASYNC_WITH")


def _is_entering(frame: FrameType) -> bool:
    return dis.opname[frame.f_code.co_code[frame.f_lasti]] in _ENTERING


def _ran_in_place(site: _Site) -> CaptureError:
    return CaptureError(
        f"{site.code.filename}:{site.body.first}: the body ran in place instead of being captured: "
        "something replaced the thread's trace function while the `with` statement was entered; "
        "pass the body as a function, `block=fn`"
    )


def _no_source(frame: FrameType, what: str) -> WithBlockNotFoundError:
    filename = frame.f_code.co_filename
    where = f"no source for the body of {what}(...) at {filename}:{frame.f_lineno}: "
    if not filename.startswith("<"):
        return WithBlockNotFoundError(
            f"{where}the file cannot be read (moved, deleted, or installed without sources). "
            "Run from where it lies, or pass the body as a function, `block=fn`"
        )
    if filename == "<stdin>":
        advice = "the plain prompt and a piped script keep no text. Put it in a file, use IPython"
    else:
        advice = "register text run by `exec` with `linecache`; in a notebook, avoid cell magics"
    return WithBlockNotFoundError(f"{where}{advice}, or pass the body as a function, `block=fn`")
