"""Our routes as a plugin of vLLM's server, which takes it in through its own switch."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterable
from importlib.metadata import Distribution, DistributionFinder
from typing import Any

from fastapi import FastAPI

from midstream.serve import described, page, routes
from midstream.serve.guard import Rules

NAME = "midstream-server"
"""What the plugin is called, also in `VLLM_PLUGINS`."""

_ENTRY_POINTS = f"[vllm.endpoint_plugins]\n{NAME} = midstream.serve.plugin:Plugin\n"


class Plugin:
    """An endpoint plugin of vLLM, see its protocol `EndpointPlugin`."""

    name = NAME
    required_tasks = None

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes; what they serve is in the flags, where `serve` has put it."""
        served = app.state.args.midstream
        app.state.midstream = served
        app.state.midstream_rules = Rules(served.access, served.installed, served.bounds.max_body)
        app.include_router(routes.router)
        app.include_router(page.router)
        described.know_vocabulary(served.vocabulary)
        _describe_keys(app)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Let what is served see vLLM's own state, which knows the adapters."""
        args.midstream.state = state


def _describe_keys(app: FastAPI) -> None:
    """Have the OpenAPI description say what a key is."""
    usual = app.openapi

    def openapi() -> dict[str, Any]:
        found = usual()
        found.setdefault("components", {}).setdefault("securitySchemes", {}).update(
            described.SECURITY
        )
        return found

    app.openapi = openapi  # type: ignore[method-assign]


class _Distribution(Distribution):
    """A package that has the plugin's entry point and nothing else."""

    def read_text(self, filename: str) -> str | None:
        return {
            "METADATA": f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 0\n",
            "entry_points.txt": _ENTRY_POINTS,
        }.get(filename)

    def locate_file(self, path: Any) -> Any:
        return path


class _Finder(DistributionFinder):
    """Shows the plugin to this process alone: other vLLM servers would warn about it."""

    def find_distributions(
        self, context: DistributionFinder.Context | None = None
    ) -> Iterable[Distribution]:
        wanted = None if context is None else context.name
        return [_Distribution()] if wanted in (None, NAME) else []

    def find_spec(self, *args: Any, **kwargs: Any) -> None:
        """No module is found here."""


def register() -> None:
    """Let vLLM find the plugin in this process."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
