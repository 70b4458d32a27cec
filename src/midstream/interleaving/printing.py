"""What a block prints and warns about, kept for the caller's process.

While a block executes, the standard streams and the hook and filters of `warnings` are its own;
at every switch they change places with the engine's. What the engine's other threads print
meanwhile goes where it would have gone, and so does what a block's own threads print.
"""

from __future__ import annotations

import io
import sys
import warnings
from collections.abc import Iterator
from types import FrameType
from typing import Any, Literal, NamedTuple, TypeAlias

import greenlet

from midstream.interleaving.frames import is_user_file, user_line

PRINT_LIMIT = 1 << 20
"""Characters that a block may print; what is more is dropped, and its output says so."""

WARNING_LIMIT = 1000
"""Warnings that a block may raise; those beyond are counted only."""

_TEXT_LIMIT = 10_000  # characters of one warning
_SWITCH_COST = 256  # characters that a change of stream counts as, since it takes memory too

StreamName: TypeAlias = Literal["stdout", "stderr"]

# Their dictionaries: every visit of every block passes here.
_sys, _warnings = sys.__dict__, warnings.__dict__
# The last of the five is what `catch_warnings(record=True)` replaces.


class Notice(NamedTuple):
    """A warning on its way to the caller's process."""

    message: str
    category: type[Warning]
    file: str
    line: int


class Output:
    """What one block has printed and warned about.

    Use as a context manager around every switch into the block.
    """

    def __init__(self) -> None:
        self._printed: list[tuple[StreamName, io.StringIO]] = []
        self._room = PRINT_LIMIT
        self._notices: list[Notice] = []
        self._dropped = 0
        self._filters = [_ALWAYS]  # its own list: a block may add to it
        # what it had put in those places when it was last left
        self._left: tuple[Any, ...] = (_STDOUT, _STDERR, _show, self._filters, _RECORD)

    # Without a function of their own: these lines cost half of what a call of one does.

    def __enter__(self) -> None:
        _engine[0] = (
            _sys["stdout"],
            _sys["stderr"],
            _warnings["showwarning"],
            _warnings["filters"],
            _warnings["_showwarnmsg_impl"],
        )
        (
            _sys["stdout"],
            _sys["stderr"],
            _warnings["showwarning"],
            _warnings["filters"],
            _warnings["_showwarnmsg_impl"],
        ) = self._left

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self._left = (
            _sys["stdout"],
            _sys["stderr"],
            _warnings["showwarning"],
            _warnings["filters"],
            _warnings["_showwarnmsg_impl"],
        )
        (
            _sys["stdout"],
            _sys["stderr"],
            _warnings["showwarning"],
            _warnings["filters"],
            _warnings["_showwarnmsg_impl"],
        ) = _engine[0]

    def write(self, stream: StreamName, text: str) -> None:
        """Take printed text, as far as there is room."""
        if not text or self._room < 0:
            return
        if not self._printed or self._printed[-1][0] != stream:
            self._printed.append((stream, io.StringIO()))
            self._room -= _SWITCH_COST
        kept = text[: max(0, self._room)]
        self._printed[-1][1].write(kept)
        self._room -= len(text)

    def warn(self, notice: Notice) -> None:
        """Take a warning, unless there are too many."""
        if len(self._notices) >= WARNING_LIMIT:
            self._dropped += 1
            return
        self._notices.append(notice._replace(message=notice.message[:_TEXT_LIMIT]))

    def prints(self) -> Iterator[tuple[StreamName, str]]:
        """What was printed, in order."""
        for stream, text in self._printed:
            yield stream, text.getvalue()
        if self._room < 0:
            yield (
                "stderr",
                f"\n[midstream: the block printed more than {PRINT_LIMIT} characters; the rest is "
                "dropped. Save what is long, with `.save()`.]\n",
            )

    def notices(self) -> list[Notice]:
        """What was warned about, in order."""
        if not self._dropped:
            return self._notices
        text = f"{self._dropped} further warnings of this block were dropped."
        return [*self._notices, self._notices[-1]._replace(message=text, category=UserWarning)]


class _Stream(io.TextIOBase):
    """A standard stream as blocks see it: text goes to the block that writes it."""

    encoding, errors = "utf-8", "strict"

    def __init__(self, name: StreamName):
        self._name: StreamName = name

    def writable(self) -> bool:
        return True

    def write(self, text: str, /) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() takes text, and was given a {type(text).__name__}.")
        output = _current()
        if output is not None:
            output.write(self._name, text)
        elif self._outside is not None:
            self._outside.write(text)
        return len(text)

    def flush(self) -> None:
        if _current() is None and self._outside is not None:
            self._outside.flush()

    @property
    def _outside(self) -> Any:
        return _engine[0][self._name == "stderr"]

    def close(self) -> None:
        """Nothing: all blocks share it."""


def _current() -> Output | None:
    """The output of the block that executes; None in the engine and in other threads."""
    run = getattr(greenlet.getcurrent(), "block_run", None)
    return None if run is None else run.output


def _show(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: Any = None,
    line: str | None = None,
) -> None:
    """Stands for `warnings.showwarning` while a block executes."""
    output = _current()
    if output is None:
        _show_outside(message, category, filename, lineno, file, line)
        return
    if not is_user_file(filename):  # a `stacklevel` that leads out of the block
        filename, lineno = user_line(_warning_frame())
    output.warn(Notice(str(message), category, filename, lineno))


def _show_outside(*warning: Any) -> None:
    """Show a warning as the engine would; `catch_warnings(record=True)` replaces a part of that."""
    _, _, hook, _, recording = _engine[0]
    if hook is _HOOK:
        recording(warnings.WarningMessage(*warning))
    else:
        hook(*warning)


def _warning_frame() -> FrameType | None:
    """The frame that warned, behind those of `warnings` itself."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") in ("warnings", __name__):
        frame = frame.f_back
    return frame


_STDOUT, _STDERR = _Stream("stdout"), _Stream("stderr")
_ALWAYS = ("always", None, Warning, None, 0)  # the caller's filters decide
_HOOK, _RECORD = _warnings["_showwarning_orig"], _warnings["_showwarnmsg_impl"]
_engine: list[tuple[Any, ...]] = [(sys.stdout, sys.stderr, warnings.showwarning, [], _RECORD)]
