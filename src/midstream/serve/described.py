"""What the OpenAPI description says of our routes."""

from __future__ import annotations

from typing import Any

from midstream.modeling.vllm.remote.wire import FRAMES, MEDIA

_TEXT: dict[str, Any] = {"type": "string"}
_NUMBER: dict[str, Any] = {"type": "integer"}
_FLAG: dict[str, Any] = {"type": "boolean"}
_ANY: dict[str, Any] = {"type": "object", "additionalProperties": True}
_BINARY: dict[str, Any] = {"type": "string", "format": "binary"}


def _object(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    made = {"type": "object", "properties": properties, "additionalProperties": False}
    return {**made, "required": list(required)} if required else made


_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "code"],
            "properties": {
                "message": _TEXT,
                "type": _TEXT,
                "code": _NUMBER,
                "param": {"type": ["string", "null"]},
            },
        }
    },
}
_TOKEN: dict[str, Any] = {"type": "integer", "minimum": 0}
_PROMPT: dict[str, Any] = {"type": "string", "format": "prompt"}
_MESSAGE = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": _TEXT,
        "content": {"anyOf": [_PROMPT, {"type": "array", "items": _ANY}, {"type": "null"}]},
    },
    "description": "What the model's chat template takes.",
}
_CODE = {
    "type": "string",
    "format": "python",
    "description": "Python that uses `model` and `tracer`; empty for none.",
}
_EDIT_NAME = {"type": "string", "format": "edit", "minLength": 1, "maxLength": 200}
_SETTINGS = {
    "type": "object",
    "description": "Sampling settings. Others of vLLM's sampling parameters are taken too.",
    "properties": {
        "max_tokens": {"type": ["integer", "null"], "minimum": 1, "maximum": 2**30 - 1},
        "temperature": {"type": "number", "minimum": 0, "maximum": 2},
        "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        "top_k": {"type": "integer", "minimum": -1, "maximum": 2**31 - 1},
        "n": {"type": "integer", "minimum": 1, "maximum": 1024},
        "seed": {"type": ["integer", "null"], "minimum": -(2**63), "exclusiveMaximum": 2**63},
        "ignore_eos": _FLAG,
        "stream_saves": _FLAG,
        "edits": {
            "type": ["array", "null"],
            "items": _EDIT_NAME,
            "description": "Names of installed edits.",
        },
    },
    "additionalProperties": False,
}
_TRACE_BODY = _object(
    ("prompt",),
    prompt={
        "anyOf": [
            {**_PROMPT, "minLength": 1},
            {"type": "array", "items": _TOKEN, "minItems": 1},
            {"type": "array", "items": _MESSAGE, "minItems": 1},
        ]
    },
    settings=_SETTINGS,
    code=_CODE,
    stream=_FLAG,
    background=_FLAG,
)
_NAME = {"anyOf": [{"type": "string", "minLength": 1, "maxLength": 200}, {"type": "null"}]}
_EDIT_BODY = _object(("code",), code=_CODE, name=_NAME)
_EDIT_INFO = {
    "type": "object",
    "required": ["id", "name", "mine", "everywhere"],
    "properties": {
        "id": _NUMBER,
        "name": {"type": ["string", "null"]},
        "mine": _FLAG,
        "everywhere": _FLAG,
    },
}
_STARTED = {
    "type": "object",
    "required": ["id", "status"],
    "properties": {"id": _TEXT, "status": _TEXT},
}
_CLEARED = {
    "type": "object",
    "required": ["cleared"],
    "properties": {"cleared": {"type": "array", "items": _NUMBER}},
}
_LISTED = {
    "type": "object",
    "required": ["edits"],
    "properties": {"edits": {"type": "array", "items": _EDIT_INFO}},
}


def _answers(
    what: str, schema: Any, *errors: int, more: Any = None, packed: str = MEDIA
) -> dict[str, Any]:
    kinds = {"application/json": {"schema": schema}, packed: {"schema": _BINARY}}
    if packed == FRAMES:
        kinds["text/event-stream"] = {}
    found = {"200": {"description": what, "content": kinds}, **(more or {})}
    for status in (401, 403, *errors):
        found[str(status)] = {
            "description": _WHY[status],
            "content": {"application/json": {"schema": _ERROR}},
        }
    return {"responses": found, "security": [{"key": []}]}


_WHY = {
    400: "Something in the request is wrong; the text names it.",
    401: "No key, or a wrong one.",
    403: "Not with this key.",
    404: "There is none, or it is another key's.",
    408: "The body did not come in time.",
    409: "Another version of midstream or Python.",
    413: "Too large.",
    415: "Neither JSON nor msgpack, or compressed.",
    429: "The key has as many as it may have.",
    500: "The server failed.",
    503: "The engine has ended.",
}
_BODY_ERRORS = (400, 408, 409, 413, 415, 429, 500, 503)


def _takes(schema: Any) -> dict[str, Any]:
    content = {"application/json": {"schema": schema}, MEDIA: {"schema": _BINARY}}
    return {"requestBody": {"required": True, "content": content}}


def _id(schema: Any) -> dict[str, Any]:
    return {"parameters": [{"name": "id", "in": "path", "required": True, "schema": schema}]}


_WAIT = {
    "name": "wait",
    "in": "query",
    "required": False,
    "description": "Seconds to wait for it.",
    "schema": {"type": "number", "minimum": 0, "maximum": 60},
}
_RUNS = {
    "202": {
        "description": "It runs.",
        "content": {"application/json": {"schema": _STARTED}, MEDIA: {"schema": _BINARY}},
    }
}

TRACE = {
    **_takes(_TRACE_BODY),
    **_answers("What it brought home.", _ANY, *_BODY_ERRORS, more=_RUNS, packed=FRAMES),
}
_FOUND = _id(_TEXT)
FETCH = {
    "parameters": [*_FOUND["parameters"], _WAIT],
    **_answers("What it brought home.", _ANY, 400, 404, 500, 503, more=_RUNS, packed=FRAMES),
}
CANCEL = {**_id(_TEXT), **_answers("It is gone.", _STARTED, 404)}
EDIT = {**_takes(_EDIT_BODY), **_answers("It is installed.", _EDIT_INFO, *_BODY_ERRORS)}
LIST = _answers("The edits.", _LISTED)
CLEAR = {**_id(_NUMBER), **_answers("It is cleared.", _CLEARED, 404, 503)}
CLEAR_ALL = _answers("They are cleared.", _CLEARED, 503)
SHOW = _answers("The model.", _ANY)
SECURITY = {"key": {"type": "http", "scheme": "bearer"}}


def know_vocabulary(size: int) -> None:
    """Have the description say which token ids the served model has."""
    _TOKEN["maximum"] = size - 1
