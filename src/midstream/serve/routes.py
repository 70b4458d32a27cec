"""The routes of midstream: traces, edits, the model."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response, StreamingResponse

from midstream.modeling.vllm.remote.wire import EDITS, FRAMES, MEDIA, MODEL, TRACES
from midstream.serve import described
from midstream.serve.access import CALLER, NOBODY, Owner
from midstream.serve.bodies import Gone, read
from midstream.serve.problems import Problem, of_error
from midstream.serve.served import Served

router = APIRouter()

Handler = Callable[[Request], Awaitable[Response]]


def _answering(handler: Handler) -> Handler:
    """A handler whose errors are answers, and that ends when its client has gone."""

    async def answer(request: Request) -> Response:
        served = _served(request)
        try:
            served.refuse_if_dead()
            return await handler(request)
        except Gone:
            return Response(status_code=499)
        except Exception as error:  # noqa: BLE001  # whatever it is, the client is told
            problem = of_error(error)
            if problem.status >= 500:
                served.log(error)
            served.traces.note(_owner(), f"{problem.status} {problem.kind}: {problem.text}")
            return problem.response()

    answer.__name__ = handler.__name__
    answer.__doc__ = handler.__doc__
    return answer


def _other_methods(path: str, *there: str) -> None:
    """Have a path answer to other methods with those there are, as one route would."""

    async def refuse(request: Request) -> Response:
        refused = Problem(405, f"{request.method}: there is {', '.join(there)}.").response()
        refused.headers["Allow"] = ", ".join(there)
        return refused

    others = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}.difference(there)
    router.add_api_route(path, refuse, methods=sorted(others), include_in_schema=False)


def _served(request: Request) -> Served:
    served: Served = request.app.state.midstream
    return served


def _owner() -> Owner:
    caller = CALLER.get()
    return caller.owner if caller is not None else NOBODY


async def _body(request: Request) -> tuple[bytes, bool]:
    """The body, and whether it is JSON.

    Raises:
        Problem: it is neither JSON nor msgpack.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in ("application/json", MEDIA):
        raise Problem(415, f"Content-Type {kind!r}: expected {MEDIA} or application/json.")
    limit = _served(request).bounds.max_body
    return await read(request.receive, limit), kind == "application/json"


def _answer(request: Request, value: Any, status: int = 200) -> Response:
    """A message in the form that the client accepts: msgpack if it says so, else JSON."""
    if MEDIA in request.headers.get("accept", ""):
        return Response(msgspec.msgpack.encode(value), status, media_type=MEDIA)
    return Response(msgspec.json.encode(value), status, media_type="application/json")


@router.post(TRACES, openapi_extra=described.TRACE, response_class=Response)
@_answering
async def run_trace(request: Request) -> Response:
    """Run a trace: its prompts, each with a block beside its forward passes."""
    body, is_json = await _body(request)
    served, owner = _served(request), _owner()
    ready = await served.prepare(body, is_json, owner)
    if ready.stream:
        events = served.events(ready, owner)
        return StreamingResponse(events, media_type="text/event-stream")
    trace = served.start(ready, owner)
    if ready.background:
        return _answer(request, {"id": trace.id, "status": "running"}, 202)
    try:
        await _or_gone(request, trace.task)
    except BaseException:
        served.traces.forget(trace)
        raise
    return await served.reply(trace, packed=FRAMES in request.headers.get("accept", ""))


async def _or_gone(request: Request, task: Any) -> None:
    """Wait for a task, as long as its client does.

    Raises:
        Gone: the client has closed the connection.
    """

    async def leaving() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    gone = asyncio.ensure_future(leaving())
    try:
        done, _ = await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
    if task not in done:
        raise Gone


@router.get(TRACES + "/{id}", openapi_extra=described.FETCH, response_class=Response)
@_answering
async def fetch_trace(request: Request) -> Response:
    """Fetch what a trace brought home, once; or hear that it still runs."""
    served = _served(request)
    trace = served.traces.find(_owner(), request.path_params["id"])
    assert trace.task is not None
    await asyncio.wait([trace.task], timeout=_wait(request))
    if not trace.task.done():
        return _answer(request, {"id": trace.id, "status": "running"}, 202)
    return await served.reply(trace, packed=FRAMES in request.headers.get("accept", ""))


def _wait(request: Request) -> float:
    text = request.query_params.get("wait", "0")
    with suppress(ValueError):
        if 0 <= (seconds := float(text)) <= 60:
            return seconds
    raise Problem(400, f"wait={text[:50]!r}: expected seconds, 0 to 60.", param="wait")


@router.delete(TRACES + "/{id}", openapi_extra=described.CANCEL, response_class=Response)
@_answering
async def cancel_trace(request: Request) -> Response:
    """Cancel a trace, or let go of what it brought home."""
    traces = _served(request).traces
    trace = traces.find(_owner(), request.path_params["id"])
    traces.forget(trace)
    return _answer(request, {"id": trace.id, "status": "deleted"})


@router.post(EDITS, openapi_extra=described.EDIT, response_class=Response)
@_answering
async def install_edit(request: Request) -> Response:
    """Install an edit, to run beside later requests of the same key."""
    body, is_json = await _body(request)
    return _answer(request, await _served(request).install(body, is_json, _owner()))


@router.get(EDITS, openapi_extra=described.LIST, response_class=Response)
@_answering
async def list_edits(request: Request) -> Response:
    """List the installed edits that are one's own or act on one's requests."""
    return _answer(request, {"edits": _served(request).installed.listed(_owner())})


@router.delete(EDITS, openapi_extra=described.CLEAR_ALL, response_class=Response)
@_answering
async def clear_edits(request: Request) -> Response:
    """Clear all of one's own edits."""
    served = _served(request)
    return _answer(request, {"cleared": await served.installed.clear(served.call, _owner(), None)})


@router.delete(EDITS + "/{id}", openapi_extra=described.CLEAR, response_class=Response)
@_answering
async def clear_edit(request: Request) -> Response:
    """Clear one edit. Requests that run keep it until they end."""
    text, served = request.path_params["id"], _served(request)
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise Problem(404, "You have no edit of that number.", param="id")
    cleared = await served.installed.clear(served.call, _owner(), int(text))
    return _answer(request, {"cleared": cleared})


@router.get(MODEL, openapi_extra=described.SHOW, response_class=Response)
@_answering
async def show_model(request: Request) -> Response:
    """Show the model: its module tree, limits, versions."""
    return _answer(request, _served(request).about)


_other_methods(TRACES, "POST")
_other_methods(TRACES + "/{id}", "GET", "DELETE")
_other_methods(EDITS, "GET", "POST", "DELETE")
_other_methods(EDITS + "/{id}", "DELETE")
_other_methods(MODEL, "GET")
