"""An edit that is installed in a midstream server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from midstream.modeling.vllm.edits import Edit
from midstream.modeling.vllm.modes import async_only, sync_only
from midstream.tracing import Block

if TYPE_CHECKING:
    from midstream.modeling.vllm.model import VLLM


class RemoteEdit(Edit):
    """An edit of a server, as ``VLLM.edit(serve=...)`` gives it.

    It lasts until it is cleared or the server ends, also when this process has ended.
    """

    def __init__(self, model: VLLM, name: str | None, server: Any):
        super().__init__(model, name)
        self._server = server

    def clear(self) -> None:
        """Take the edit out of the server; twice is no error.

        Raises:
            ServerError: the server cannot be reached.
        """
        sync_only(self._model.mode, "edit.clear()", "await edit.aclear()")
        if self._installed:
            self._server.clear(self.id)
            self._installed = False

    async def aclear(self) -> None:
        """As ``clear``, on the event loop of an asynchronous model."""
        async_only(self._model.mode, "await edit.aclear()", "edit.clear()")
        if self._installed:
            await self._server.clear(self.id)
            self._installed = False

    def _install(self, block: Block) -> None:
        self._take(self._server.install(self.name, self._model._edits.written(block)))

    async def _ainstall(self, block: Block) -> None:
        self._take(await self._server.install(self.name, self._model._edits.written(block)))

    def _take(self, number: int) -> None:
        self.id, self._installed = number, True
