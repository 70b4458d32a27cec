"""`midstream serve`: vLLM's OpenAI-compatible server with our engine and our routes in it."""

from __future__ import annotations

import os
import signal
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from midstream.modeling.vllm import bootstrap
from midstream.modeling.vllm.limits import Limits
from midstream.serve import flags
from midstream.serve.access import Access
from midstream.serve.starting import ends_when_told

_LAST_WORDS = 5  # seconds for answers that are on their way, once the engine has ended


def main(arguments: Sequence[str]) -> None:
    """Serve until told to stop.

    Args:
        arguments: the command line behind `midstream serve`.

    Raises:
        UnsupportedError: a setting that a server with blocks cannot work with.
        EngineBuildError: the engine did not come up.
        SystemExit: vLLM's parser, for a flag that nobody knows, and for `--help`; with status 1
            when the engine has died, so that a service manager starts the server again.
    """
    bootstrap.refuse_old_runner()
    _prepare_environment()
    import uvloop
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup

    cli_env_setup()
    args = flags.parse(arguments)
    keys = flags.access(args)
    flags.settle(args, keys)
    bounds = flags.bounds(args)
    if not uvloop.run(_serve(args, keys, bounds)):
        raise SystemExit("midstream: the engine has ended, and the server with it.")


def _prepare_environment() -> None:
    """Settle what vLLM looks up in the environment, before anything of it is imported."""
    from midstream.serve import plugin

    plugin.register()
    allowed = flags.allowed_plugins([plugin.NAME], os.environ.get("VLLM_PLUGINS"))
    os.environ["VLLM_PLUGINS"] = allowed


async def _serve(args: Namespace, access: Access, bounds: flags.Bounds) -> bool:
    """Build the engine and serve it, as vLLM's own command does, until told to stop.

    Returns:
        Whether the engine was alive to the end.
    """
    from vllm.entrypoints.launchers.api_server.entry import build_and_serve
    from vllm.entrypoints.launchers.launcher import setup_server

    from midstream import VLLM
    from midstream.serve.served import Served
    from midstream.serve.steering import Steering

    signal.signal(signal.SIGTERM, _stop_early)  # until the server has its own answer to it
    listen_address, sock = setup_server(args, reuse_port=False)
    try:
        with ends_when_told():
            model = VLLM(args.model, mode="async", dispatch=True, **flags.engine_arguments(args))
        try:
            limits = Limits(args.block_timeout, args.max_save_bytes)
            args.midstream = Served(model, access, bounds, limits)
            Steering(args.midstream)
            told = _Told(model.vllm_entrypoint)
            stopped = await build_and_serve(
                model.vllm_entrypoint,
                listen_address,
                sock,
                args,
                timeout_graceful_shutdown=_LAST_WORDS,
            )
        finally:
            await model.aclose()
        await stopped
        return told.alive
    finally:
        sock.close()


class _Told:
    """Sees when an engine is told to end, on that instance of vLLM's `AsyncLLM`.

    Attributes:
        alive: whether it had not ended by itself until then.
    """

    def __init__(self, llm: Any):
        self._resources, self._plain = llm.engine_core.resources, llm.shutdown
        self._first = self.alive = True
        llm.shutdown = self

    def __call__(self, *arguments: Any, **how: Any) -> None:
        """Have it end."""
        if self._first:
            self._first, self.alive = False, not self._resources.engine_dead
        self._plain(*arguments, **how)


def _stop_early(*_: Any) -> None:
    raise KeyboardInterrupt("terminated")
