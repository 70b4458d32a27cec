"""Engine-wide edits: blocks that are installed once and run beside later requests."""

from __future__ import annotations

import ast
import itertools
import sys
import textwrap
from collections.abc import Callable, Coroutine, Sequence
from types import FrameType, FunctionType
from typing import TYPE_CHECKING, Any, Literal

from midstream.errors import UnsupportedError
from midstream.modeling.capturing import Capturing, at_once
from midstream.modeling.vllm.modes import async_only, sync_only
from midstream.modeling.vllm.tracer import Tracer
from midstream.modeling.vllm.unsupported import EDIT_INVOKE
from midstream.tracing import Block
from midstream.tracing.compiling import find_calls
from midstream.tracing.shipping import dumps

if TYPE_CHECKING:
    from midstream.modeling.vllm.model import VLLM

Choice = Sequence[str] | None
"""Names of edits that a request asks for; None for all there are."""


class Edit(Capturing):
    """An edit of the engine, as ``VLLM.edit`` gives it.

    As a context manager it captures the body of its `with` statement and installs it when the body
    ends: ``with model.edit() as (tracer, edit):``.

    Attributes:
        id: its number in the engine, None until it is installed.
        name: what requests choose it by; None for one that always applies.
    """

    def __init__(self, model: VLLM, name: str | None):
        self._model, self.name = model, name
        self.id: int | None = None
        self._installed = False

    @property
    def cleared(self) -> bool:
        """Whether it was installed and no longer is: cleared, or its engine is closed."""
        return self.id is not None and not self._installed

    def clear(self) -> None:
        """Take the edit out of the engine; twice is no error.

        Requests that already run keep it until they end.
        """
        sync_only(self._model.mode, "edit.clear()", "await edit.aclear()")
        self._model._edits.clear([self])

    async def aclear(self) -> None:
        """As ``clear``, on the event loop of an asynchronous model."""
        async_only(self._model.mode, "await edit.aclear()", "edit.clear()")
        await self._model._edits.aclear([self])

    def __enter__(self) -> tuple[Tracer, Edit]:
        sync_only(self._model.mode, "with model.edit(...)", "async with model.edit(...)")
        return self._enter(sys._getframe(1))

    def __aenter__(self) -> Coroutine[Any, Any, tuple[Tracer, Edit]]:
        async_only(self._model.mode, "async with model.edit(...)", "with model.edit(...)")
        return at_once(self._enter(sys._getframe(1)))

    def _enter(self, frame: FrameType) -> tuple[Tracer, Edit]:
        if self.id is not None:
            raise UnsupportedError(
                "This edit has been installed, and an edit is installed once. Call "
                "`model.edit(...)` again, in the header of the next `with`."
            )
        self._begin(frame, "model.edit")
        return Tracer(self._model, None, {}, run=False), self

    def _captured(self, block: Block, frame: FrameType) -> None:
        self._install(block)

    async def _acaptured(self, block: Block, frame: FrameType) -> None:
        await self._ainstall(block)

    def _install(self, block: Block) -> None:
        self._model._edits.install(self, block)

    async def _ainstall(self, block: Block) -> None:
        await self._model._edits.ainstall(self, block)

    def __reduce__(self) -> Any:
        raise TypeError("an edit cannot be used inside a block: install and clear it outside")

    def __repr__(self) -> str:
        state = "cleared" if self.cleared else "installed" if self._installed else "not installed"
        return f"Edit(id={self.id}, name={self.name!r}, {state})"


class EditRegistry:
    """The edits of one model's engine, in the order of installation."""

    def __init__(self, model: VLLM):
        self._model = model
        self._ids = itertools.count()
        self._unsent: list[int] = []  # cleared here, not yet in the engine
        self.installed: list[Edit] = []

    def install(self, edit: Edit, block: Block) -> None:
        """Install a captured block in the engine, on all its ranks.

        Raises:
            TransportError: a value cannot travel, or cannot be rebuilt in the engine.
            UnsupportedError: the block opens invokes.
        """
        edit_id, label, written = self._numbered(edit, block)
        with self._model._lock:  # until it is known here, nothing may close the engine
            self._model._install("midstream_install_edit", edit_id, label, written)
            self._note(edit, edit_id)

    async def ainstall(self, edit: Edit, block: Block) -> None:
        """As ``install``, in an asynchronous engine; cancelled, it is taken out again."""
        await self._model._uncut(
            self._install(edit, *self._numbered(edit, block)), lambda: self.aclear([edit])
        )

    async def _install(self, edit: Edit, edit_id: int, label: str, written: bytes) -> None:
        await self._model._ainstall("midstream_install_edit", edit_id, label, written)
        self._note(edit, edit_id)

    def written(self, block: Block) -> bytes:
        """The block of an edit as bytes.

        Raises:
            TransportError: a value cannot travel.
            UnsupportedError: the block opens invokes.
        """
        _refuse_invokes(block)
        return dumps(block, self._model._reference)

    def _numbered(self, edit: Edit, block: Block) -> tuple[int, str, bytes]:
        """An edit's number, what errors call it, and its block as bytes."""
        written = self.written(block)
        edit_id = next(self._ids)
        return edit_id, f"'{edit.name}'" if edit.name is not None else f"number {edit_id}", written

    def _note(self, edit: Edit, edit_id: int) -> None:
        edit.id, edit._installed = edit_id, True
        self.installed.append(edit)

    def clear(self, edits: Sequence[Edit]) -> None:
        """Take edits out; no request that is submitted from now on runs them.

        The engine is told when nothing runs in it, so this never waits for other threads' requests.
        """
        for edit in self._take_out(edits):
            assert edit.id is not None
            self._unsent.append(edit.id)
        self._model._when_idle(self.send)

    async def aclear(self, edits: Sequence[Edit]) -> None:
        """As ``clear``, in an asynchronous engine; it is told when the requests of now are done."""
        ids = [edit.id for edit in self._take_out(edits)]
        if ids:
            await self._model._after_running(lambda e: e.call("midstream_clear_edits", ids))

    def _take_out(self, edits: Sequence[Edit]) -> list[Edit]:
        """Take edits out here; those that were installed."""
        found = [edit for edit in edits if edit in self.installed]
        for edit in found:
            self.installed.remove(edit)
            edit._installed = False
        return found

    def send(self) -> None:
        """Tell the engine what has been cleared."""
        ids, self._unsent = self._unsent, []
        if ids:
            self._model._call("midstream_clear_edits", ids)

    def forget(self) -> None:
        """All edits end with their engine."""
        for edit in self.installed:
            edit._installed = False
        self.installed.clear()
        self._unsent.clear()

    def chosen(self, names: Choice) -> list[int]:
        """Numbers of the edits that apply to a request.

        Args:
            names: the named edits it asks for, beside all that have no name; None for all.

        Raises:
            ValueError: no edit has one of the names.
        """
        known = [edit.name for edit in self.installed if edit.name is not None]
        for name in names or ():
            if name not in known:
                there = ", ".join(map(repr, dict.fromkeys(known))) or "none"
                raise ValueError(f"edits: no edit is called '{name}'. Installed by name: {there}.")
        return [
            edit.id
            for edit in tuple(self.installed)
            if edit.id is not None and (names is None or edit.name is None or edit.name in names)
        ]


class Editable:
    """What a `VLLM` does with edits."""

    mode: Literal["sync", "async"]
    _edits: EditRegistry
    _server: Callable[[str | None, str | None], Any]

    @property
    def edits(self) -> tuple[Edit, ...]:
        """The edits that are installed, in the order of installation."""
        return tuple(self._edits.installed)

    def edit(
        self,
        *,
        name: str | None = None,
        inplace: bool = True,
        block: Callable[..., Any] | None = None,
        serve: str | None = None,
        api_key: str | None = None,
    ) -> Any:
        """Install a block in the engine, to run beside every later request that it applies to.

        ``with model.edit(name="calm") as (tracer, edit):`` installs its body when it ends; with
        mode="async" it is an ``async with``. Builds the engine if it is not up. What is installed
        ends with the engine.

        Args:
            name: lets requests choose the edit: ``edits=["calm"]``. Several may share one.
            inplace: True; there is no copy of an engine to edit.
            block: a function ``block(model, tracer)`` to install in place of a `with` body.
            serve, api_key: address of a midstream server to install it in, and a key for it. It
                runs beside requests of that key, and with an admin's key beside all.

        Returns:
            The edit: a context manager, or, with ``block``, installed (with mode="async" a
            coroutine that installs it and gives it).

        Raises:
            TypeError: the name is no text.
            ValueError: ``inplace=False``.
            TransportError: a value that the block uses cannot travel to the engine.
            UnsupportedError: the block opens invokes (at the end of the `with`).
        """
        if not inplace:
            raise ValueError(
                "edit(inplace=False): there is no copy of the engine's model to edit. Install the "
                "edit under a name and choose it per request with `edits=[...]`."
            )
        if name is not None and not isinstance(name, str):
            raise TypeError(f"An edit's name is text; got {type(name).__name__}.")
        edit = self._new_edit(name, self._server(serve, api_key))
        if block is None:
            return edit
        if self.mode == "async":
            return self._installed(edit, Block(function=block))
        edit._install(Block(function=block))
        return edit

    def _new_edit(self, name: str | None, server: Any) -> Edit:
        from midstream.modeling.vllm.remote.edits import RemoteEdit  # which is an Edit

        model = self._edits._model
        return Edit(model, name) if server is None else RemoteEdit(model, name, server)

    async def _installed(self, edit: Edit, block: Block) -> Edit:
        await edit._ainstall(block)
        return edit

    def clear_edits(self) -> None:
        """Take all edits out of the engine, see ``Edit.clear``."""
        sync_only(self.mode, "model.clear_edits()", "await model.aclear_edits()")
        self._edits.clear(self.edits)

    async def aclear_edits(self) -> None:
        """As ``clear_edits``, on the event loop of an asynchronous model."""
        async_only(self.mode, "await model.aclear_edits()", "model.clear_edits()")
        await self._edits.aclear(self.edits)


def _refuse_invokes(block: Block) -> None:
    """Refuse `tracer.invoke(...)` in the text of an edit.

    What the text does not show, a helper's call, is refused where it runs.

    Raises:
        UnsupportedError: it is there.
    """
    line = _invoke_in_body(block) if block.code is not None else _invoke_in_function(block)
    code = block.code or block.listing
    if line is not None and code is not None:
        raise UnsupportedError(EDIT_INVOKE.format(where=f" ({code.filename}, line {line})"))


def _invoke_in_body(block: Block) -> int | None:
    assert block.code is not None
    for call in block.code.compiled().calls:
        if call.method == "invoke" and isinstance(block.values.get(call.name), Tracer):
            return call.line
    return None


def _invoke_in_function(block: Block) -> int | None:
    """The line in a plain function, whose second argument is the tracer."""
    if not isinstance(block.function, FunctionType) or block.listing is None:
        return None
    code = block.function.__code__
    try:
        tree = ast.parse(textwrap.dedent(block.listing.source))
    except SyntaxError:
        return None  # a lambda in the middle of an expression
    for call in find_calls(tree):
        if call.method == "invoke" and call.name in code.co_varnames[1 : code.co_argcount][:1]:
            return call.line + block.listing.first_line - 1
    return None
