"""The page at `/midstream`: what the server does, for people."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from midstream.serve.access import CALLER, NOBODY, Owner
from midstream.serve.problems import of_error

router = APIRouter(include_in_schema=False)

_HTML = Path(__file__).parent / "static" / "midstream.html"
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; frame-ancestors 'none'; base-uri 'none'"
)


def _owner() -> Owner:
    caller = CALLER.get()
    return caller.owner if caller is not None else NOBODY


@router.get("/midstream")
async def page(request: Request) -> Response:
    """The page; it asks for what it shows once a second."""
    headers = {"Content-Security-Policy": _POLICY, "Cache-Control": "no-store"}
    return Response(_HTML.read_bytes(), media_type="text/html; charset=utf-8", headers=headers)


@router.get("/midstream/state")
async def state(request: Request) -> Response:
    """What the page shows to the key that asks."""
    found = await request.app.state.midstream.page_state(_owner())
    return JSONResponse(found, headers={"Cache-Control": "no-store"})


@router.delete("/midstream/edits/{number}")
async def clear(request: Request, number: int) -> Response:
    """Clear an edit from the page."""
    served: Any = request.app.state.midstream
    try:
        cleared = await served.installed.clear(served.call, _owner(), number)
    except Exception as error:  # noqa: BLE001  # the page shows it
        return of_error(error).response()
    return JSONResponse({"cleared": cleared})


@router.delete("/midstream/traces/{name}")
async def cancel(request: Request, name: str) -> Response:
    """Cancel a trace from the page."""
    served: Any = request.app.state.midstream
    try:
        served.traces.forget(served.traces.find(_owner(), name))
    except Exception as error:  # noqa: BLE001  # the page shows it
        return of_error(error).response()
    return JSONResponse({"status": "deleted"})
