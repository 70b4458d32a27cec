"""The first thing that sees a request: keys, sizes, and what only our own code may set."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from midstream.modeling.vllm.wire import KEY
from midstream.serve.access import CALLER, Access, Caller, Owner, is_local_name
from midstream.serve.bodies import Counted, Gone, Replayed, check_headers, headers_of, read
from midstream.serve.installed import Installed
from midstream.serve.problems import Problem, of_error
from midstream.serve.steered import Steered

logger = logging.getLogger(__name__)

_FREE = ("/health",)
_ADMIN = (  # routes of vLLM's that reach into what others run
    "/inference/v1/abort_requests",
    "/scale_elastic_ep",
    "/start_profile",
    "/stop_profile",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
)
_OURS = ("/v1/midstream", "/midstream")
_MARK = "x-midstream"  # a header that a page from elsewhere cannot send without being asked
_SAFE = ("GET", "HEAD", "OPTIONS")


class _Choice(msgspec.Struct, forbid_unknown_fields=True):
    """What an OpenAI request asks for in its field `midstream`."""

    edits: list[str] | None = None


class _Peek(msgspec.Struct):
    """What is looked at of a JSON body: our field, and where a client could set our key."""

    midstream: _Choice | None = None
    stream: Any = None
    vllm_xargs: Any = None
    sampling_params: Any = None


class Rules(msgspec.Struct):
    """What the guard goes by.

    Attributes:
        access: the keys.
        installed: the edits.
        max_body: bytes of a request's body.
    """

    access: Access
    installed: Installed
    max_body: int


class Guard:
    """ASGI middleware around all of vLLM's server and ours; its rules are in the app's state."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or refuse it."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        rules: Rules = scope["app"].state.midstream_rules
        try:
            caller = Caller(_owner(scope, rules.access))
            if scope["type"] == "http":
                receive, send = await self._checked(scope, receive, send, caller, rules)
        except Gone:
            return
        except Problem as problem:
            await _refuse(problem, scope, receive, send)
            return
        token = CALLER.set(caller)
        try:
            await self._app(scope, receive, send)
        finally:
            CALLER.reset(token)

    async def _checked(
        self, scope: Scope, receive: Receive, send: Send, caller: Caller, rules: Rules
    ) -> tuple[Receive, Send]:
        """Look at the body, and arrange for what edits leave to get into the reply."""
        headers = headers_of(scope)
        check_headers(headers, rules.max_body)
        if scope["method"] in _SAFE:
            return receive, send
        if "json" not in headers.get("content-type", "json"):
            if _is_ours(scope):
                return receive, send  # which reads and bounds its bodies itself
            caller.edits = rules.installed.chosen(caller.owner, None)
            return Counted(receive, rules.max_body), send
        body = await read(receive, rules.max_body)
        peek = _peek(body)
        _refuse_our_key(peek)
        if not _is_ours(scope):
            try:
                choice = peek.midstream
                names = choice.edits if choice is not None else None
                caller.edits = rules.installed.chosen(caller.owner, names)
            except ValueError as error:
                raise Problem(400, str(error), param="midstream.edits") from error
            caller.asked = choice is not None
        return Replayed(body, receive), Steered(send, caller, scope, bool(peek.stream)).sender()


def _owner(scope: Scope, access: Access) -> Owner:
    """Whose the request is.

    Raises:
        Problem: it has no key, or comes from a page that is not the server's.
    """
    headers = headers_of(scope)
    if _path(scope) in _FREE or _asks_first(scope, headers):
        return Owner("")
    owner, by_itself = access.owner(headers.get("authorization", ""))
    if owner is None:
        raise Problem(401, "A key is needed: Authorization: Bearer KEY. Yours is none of them.")
    if access.open:
        _refuse_strange_pages(headers)
    if access.open or by_itself:
        _refuse_other_sites(scope, headers)
    if _path(scope) in _ADMIN and not owner.admin:
        raise Problem(403, "This route takes an admin key (--admin-key).")
    if by_itself and scope.get("method") not in _SAFE and _MARK not in headers:
        raise Problem(403, "What changes something takes the key as Authorization: Bearer KEY.")
    return owner


def _asks_first(scope: Scope, headers: Mapping[str, str]) -> bool:
    """Whether a browser asks if a page may ask, which vLLM's server answers before any route."""
    asks = "origin" in headers and "access-control-request-method" in headers
    return scope.get("method") == "OPTIONS" and asks


def _refuse_strange_pages(headers: Mapping[str, str]) -> None:
    """Keep pages that a browser on this machine shows from using a server without keys."""
    host, origin = headers.get("host", ""), headers.get("origin", "")
    if host and not is_local_name(host):
        raise Problem(403, f"Host {host!r}: a server without an API key answers to localhost only.")
    if origin and not is_local_name(origin.partition("://")[2]):
        raise Problem(403, f"Origin {origin!r}: a server without an API key serves no other pages.")


def _refuse_other_sites(scope: Scope, headers: Mapping[str, str]) -> None:
    """Refuse what another site's page has a browser ask for, which need not say an origin.

    A link from there to our page is followed: that shows it to whoever sits at the browser.
    """
    if headers.get("sec-fetch-site") != "cross-site":
        return
    how = headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest")
    if how != ("navigate", "document") or scope.get("method") not in _SAFE:
        raise Problem(403, "Sec-Fetch-Site: cross-site: another site's page may not ask for this.")


def _path(scope: Scope) -> str:
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def _is_ours(scope: Scope) -> bool:
    return _path(scope).startswith(_OURS)


def _peek(body: bytes) -> _Peek:
    if not body.strip():
        return _Peek()
    try:
        return msgspec.json.decode(body, type=_Peek)
    except msgspec.ValidationError as error:
        if "midstream" in str(error):
            raise Problem(400, f"midstream: {error}", param="midstream") from error
        return _Peek()  # no object; whoever reads it says so
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Problem(400, f"The body is no JSON: {error}") from error
    except RecursionError:
        raise Problem(400, "The body is no JSON that is read: it is nested too deep.") from None


def _refuse_our_key(peek: _Peek) -> None:
    """Refuse a client's own words where only our code may write.

    Raises:
        Problem: naming the field.
    """
    params = peek.sampling_params if isinstance(peek.sampling_params, dict) else {}
    for name, given in (("vllm_xargs", peek.vllm_xargs), ("extra_args", params.get("extra_args"))):
        if isinstance(given, dict) and KEY in given:
            raise Problem(
                400,
                f"{name}: '{KEY}' is set by midstream's server alone. Send blocks to "
                '/v1/midstream/traces, and choose edits with "midstream": {"edits": [...]}.',
                param=name,
            )


async def _refuse(problem: Problem, scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket":
        await _close(receive, send)
        return
    response = of_error(problem).response()
    response.headers["Connection"] = "close"  # what is left of the body is not read
    await response(scope, receive, send)


async def _close(receive: Receive, send: Send) -> None:
    message: Message = await receive()
    if message["type"] == "websocket.connect":
        await send({"type": "websocket.close", "code": 1008})
