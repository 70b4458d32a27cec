"""`model.session()`: several traces in order, with nothing of others between them."""

from __future__ import annotations

import builtins
import dis
import threading
from types import CodeType, TracebackType
from typing import Any, Literal

from midstream.errors import CaptureError, UnsupportedError
from midstream.modeling.vllm.unsupported import ASYNC_SESSION
from midstream.tracing import Block

_NAMES = frozenset(vars(builtins))


class Session:
    """A scope of traces, see ``VLLM.session``."""

    def __init__(self, model: Sessions):
        self._model = model
        self._thread = 0
        self._unsaved: dict[str, str] = {}  # variables and where they were bound
        self._pending: dict[str, str] = {}  # those of the trace under way

    def __enter__(self) -> Session:
        self._model._lock.acquire()
        if self._model._session is not None:
            self._model._lock.release()
            raise UnsupportedError(
                "A session inside a session is not supported: the traces of the outer one already "
                "run in order. Leave the inner one out."
            )
        self._thread = threading.get_ident()
        self._model._session = self
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._model._session = None
        self._model._lock.release()

    def _check(self, block: Block) -> None:
        """Refuse a block that reads what an earlier one of the session did not save.

        Raises:
            CaptureError: naming the variable, and where it was bound.
        """
        if block.code is None:
            return
        for name in sorted(block.code.compiled().reads - block.values.keys() - _NAMES):
            if name in self._unsaved:
                raise CaptureError(
                    f"The block reads `{name}`, which the trace at {self._unsaved[name]} has bound "
                    f"but not saved, so its value stayed in the engine. Save it there: "
                    f"`{name} = {name}.save()`."
                )

    def _note(self, block: Block) -> None:
        """Note the variables that a block assigns."""
        if block.code is not None:
            where = f"{block.code.filename}, line {block.code.first_line}"
            self._pending.update(dict.fromkeys(_bound(block.code.compiled().code), where))

    def _finish_trace(self) -> None:
        """From here on the trace's variables are an earlier trace's."""
        self._unsaved.update(self._pending)
        self._pending.clear()


def _bound(code: CodeType) -> set[str]:
    instructions = dis.get_instructions(code)
    return {found.argval for found in instructions if found.opname.startswith("STORE_NAME")}


class Sessions:
    """What a `VLLM` does with sessions."""

    mode: Literal["sync", "async"]
    _lock: Any
    _session: Session | None

    @property
    def _own_session(self) -> Session | None:
        """The session that this thread is in."""
        session = self._session
        return session if session and session._thread == threading.get_ident() else None

    def session(self) -> Session:
        """A scope of traces that run in order: ``with model.session():``.

        Each trace runs when its own `with` ends, and what it saved can be used in the next, as
        without a session. In a session other threads' requests wait, and a block that uses a
        variable which an earlier trace bound and did not save is refused with the place to save it.

        Raises:
            UnsupportedError: (on entering) the thread is in a session already; the model is
                asynchronous, where traces run in the order in which they are awaited.
        """
        if self.mode == "async":
            raise UnsupportedError(ASYNC_SESSION)
        return Session(self)
