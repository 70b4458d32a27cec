"""What a `VLLM` has of midstream servers: which one runs what it sends, if one does."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, Literal

import torch

from midstream.errors import UnsupportedError
from midstream.modeling.vllm import arguments as args
from midstream.modeling.vllm.remote.aio import AsyncServer
from midstream.modeling.vllm.remote.client import Server
from midstream.modeling.vllm.remote.tree import stand_in
from midstream.modeling.vllm.unsupported import refuse_elsewhere


class Elsewhere:
    """The servers that a `VLLM` has spoken to, each with its connections.

    Attributes:
        mode: "sync", or "async".
    """

    mode: Literal["sync", "async"]
    repo: str
    _lock: threading.RLock
    _home: tuple[str, str | None] | None = None
    _taps: tuple[str, ...]
    _servers: dict[tuple[str, str | None], Server | AsyncServer]

    @property
    def _is_elsewhere(self) -> bool:
        """Whether everything this model sends goes to a server."""
        return self._home is not None

    def _server(self, serve: str | None, api_key: str | None) -> Server | AsyncServer | None:
        """The server that is to run something; None for this model's own engine.

        Raises:
            TypeError: a key without a server.
            ValueError: the address is none.
        """
        if serve is None and self._home is not None:
            serve, api_key = self._home[0], self._home[1] if api_key is None else api_key
        if serve is None:
            if api_key is not None:
                raise TypeError("api_key= is a server's: name the server with serve='http://...'.")
            return None
        with self._lock:
            if (serve, api_key) not in self._servers:
                kind = AsyncServer if self.mode == "async" else Server
                self._servers[serve, api_key] = kind(serve, api_key)
            return self._servers[serve, api_key]

    def _tree_from(self, serve: str, api_key: str | None) -> torch.nn.Module:
        """Ask a server for its model's modules, and have it run everything from now on.

        Raises:
            ServerError: it cannot be reached, or refuses.
        """
        server = Server(serve, api_key)
        try:
            found = server.about()
        finally:
            server.close()
        self._home, self._taps = (serve, api_key), tuple(found.taps)
        return stand_in(found.tree)

    def _check_settings(self, settings: Mapping[str, Any], *, streams: bool = False) -> None:
        """Check what a trace or an invoke is given; without vLLM its server checks the rest.

        Args:
            streams: whether its outputs can be had as they come.

        Raises:
            TypeError: an unknown keyword, or both spellings of one.
            UnsupportedError: it names another place for the block to run.
        """
        if not self._is_elsewhere:
            args.check_settings(settings, streams=streams)
            return
        args.check_ours(settings, streams=streams)
        for name in settings:
            refuse_elsewhere(name)

    def _let_go_of_servers(self) -> list[Server | AsyncServer]:
        with self._lock:
            found = list(self._servers.values())
            self._servers.clear()
        return found


def refuse_local(dispatch: bool, rename: Any, engine: Mapping[str, Any]) -> None:
    """Refuse what only an engine of one's own can have, where a server is named.

    Raises:
        UnsupportedError: naming it.
    """
    given = [*(["dispatch"] if dispatch else []), *(["rename"] if rename else []), *engine]
    if given:
        raise UnsupportedError(
            f"VLLM(..., serve=...) has no engine of its own, so {given[0]}= has nothing to act on. "
            "Start the server with it (`midstream serve MODEL ...`), or leave serve= out."
        )


NO_ENGINE = (
    "This model has no engine of its own: VLLM(..., serve=...) sends everything to its server. "
    "Build the model without serve=, or use what a server does: traces, generate and edits."
)
