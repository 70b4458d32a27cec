"""What a server answers when it cannot do what it was asked."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response

from midstream.errors import DataVersionError, EngineDeadError, MidstreamError
from midstream.modeling.vllm.remote.wire import Failed, Failure
from midstream.serve import values


class Problem(Exception):  # noqa: N818 - an answer, not a failure of the server
    """An answer that is an error.

    Args:
        status: the HTTP status.
        text: what went wrong and what to do.
        kind: the error's class; by default one for the status.
        param: the field at fault.
    """

    def __init__(self, status: int, text: str, *, kind: str = "", param: str | None = None):
        super().__init__(text)
        self.status, self.text, self.param = status, text, param
        self.kind = kind or _KINDS.get(status, "BadRequestError")

    def response(self) -> Response:
        """The answer."""
        body = Failed(Failure(values.text(self.text), self.kind, self.status, self.param))
        headers = {"WWW-Authenticate": 'Basic realm="midstream", charset="UTF-8"'}
        return Response(
            msgspec.json.encode(body),
            self.status,
            headers if self.status == 401 else None,
            "application/json",
        )


_KINDS = {
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "TimeoutError",
    409: "ConflictError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    429: "RateLimitError",
    503: "ServiceUnavailableError",
}


_DEAD = "The engine has ended, and the server with it. What its process printed is in the log."
# not the engine's own text: it names the blocks that ran, which may be anybody's


def of_error(error: BaseException) -> Problem:
    """The answer to an error that came up while a request was looked at."""
    if isinstance(error, Problem):
        return error
    kind, text = type(error).__name__, str(error)
    if isinstance(error, DataVersionError):
        return Problem(409, text, kind=kind)
    if isinstance(error, EngineDeadError) or kind == "EngineDeadError":
        return Problem(503, _DEAD, kind="EngineDeadError")
    if isinstance(error, RecursionError):
        return Problem(400, f"Something in the request is nested too deep: {text}")
    if isinstance(error, MidstreamError | ValueError | TypeError | NotImplementedError | KeyError):
        return Problem(400, text, kind=kind)
    if any(each.__name__ == "VLLMClientError" for each in type(error).__mro__):
        return Problem(400, text, kind=kind, param=_param(error))
    return Problem(500, f"{kind}: {text}", kind="InternalServerError")


def _param(error: Any) -> str | None:
    found = getattr(error, "parameter", None)
    return found if isinstance(found, str) else None
