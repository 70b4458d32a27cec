"""What a client asks for, checked before anything of it runs: values first, code not at all."""

from __future__ import annotations

import io
import tokenize
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any

import msgspec

from midstream.modeling.vllm.data import Request, read
from midstream.modeling.vllm.remote.wire import MOST_REQUESTS, TraceCall, Versions, decode
from midstream.modeling.vllm.wire import KEY, MODEL, TRACER
from midstream.serve import asked
from midstream.serve.problems import Problem
from midstream.tracing import Block
from midstream.tracing.block import Code
from midstream.tracing.shipping import Opened, dumps

LONGEST_SOURCE = 1 << 20
"""Characters of a block that comes as text."""

_MODEL, _TRACER = object(), object()


class TextCall(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A trace of one request as JSON.

    Attributes:
        prompt: text, token ids, or chat messages.
        settings: sampling settings, `edits`, and `stream_saves`: with ``stream``, send what the
            block appends to the lists it saves as it does.
        code: the block's source, which uses `model` and `tracer`; none by default.
        stream: answer with server-sent events while it runs.
        background: answer at once with the trace's id.
    """

    prompt: (
        str
        | Annotated[list[int | float | dict[str, Any]], msgspec.Meta(max_length=asked.MOST_ITEMS)]
    )
    settings: dict[str, Any] = {}
    code: str = ""
    stream: bool = False
    background: bool = False


class TextEdit(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """An edit as JSON.

    Attributes:
        code: its source, which uses `model` and `tracer`.
        name: what requests choose it by.
    """

    code: str
    name: str | None = None


def trace_call(body: bytes) -> tuple[TraceCall, list[Request]]:
    """A trace that came as msgpack, with its requests.

    Raises:
        ValueError: it is none, or of another version.
        Problem: it has too many requests.
    """
    versions(body)
    call = decode(body, TraceCall, "trace")
    try:
        requests = read(call.trace)
    except IndexError as error:
        raise ValueError(f"This is no captured trace: {error}") from error
    if not 1 <= len(requests) <= MOST_REQUESTS:
        raise Problem(400, f"{len(requests)} requests: a trace has 1 to {MOST_REQUESTS}.")
    for request in requests:
        check(request)
    return call, requests


def versions(body: bytes) -> None:
    """Refuse a message of another version, whatever else is in it.

    Raises:
        DataVersionError: naming both versions.
        ValueError: it names none.
    """

    class Said(msgspec.Struct):
        versions: Versions

    Versions().check(decode(body, Said, "message of midstream's").versions, "client")


def text_call(body: bytes) -> tuple[TextCall, list[Request]]:
    """A trace that came as JSON, with its one request.

    Raises:
        Problem: naming the field at fault.
    """
    call = from_json(body, TextCall)
    whole = {"messages": call.prompt} if asked.is_chat(call.prompt) else _flat(call.prompt)
    block = text_block(call.code) if call.code.strip() else b""
    settings = {name: _number(value) for name, value in call.settings.items()}
    request = Request(whole, settings, block, where="a block sent as text")
    check(request)
    return call, [request]


def from_json(body: bytes, kind: Any) -> Any:
    """A JSON body as a type.

    Raises:
        Problem: naming the field at fault.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Problem(
            400, f"The body is not what is expected: {error}", param=_field(error)
        ) from None


def _field(error: Exception) -> str | None:
    text = str(error)
    if "`$." in text:
        return text.rpartition("`$.")[2].rstrip("`")
    return text.split("`")[1] if text.count("`") >= 2 else None


def text_block(source: str) -> bytes:
    """A block's source as the engine takes blocks.

    Raises:
        Problem: it is too long.
    """
    if len(source) > LONGEST_SOURCE:
        raise Problem(413, f"code: longer than {LONGEST_SOURCE} characters.", param="code")
    code = Code(_as_body(source), "<midstream>", 1)
    block = Block(code=code, values={"model": _MODEL, "tracer": _TRACER})
    return dumps(block, lambda value: {id(_MODEL): MODEL, id(_TRACER): TRACER}.get(id(value)))


def _as_body(source: str) -> str:
    """Source indented like the body of a statement, the insides of its texts excepted."""
    inside: set[int] = set()
    if not source.strip():
        return "    pass\n"
    lines = source.split("\n")
    if lines[0][:1].isspace():
        return f"{source}\n"
    with suppress(tokenize.TokenError, SyntaxError):  # the engine says what is wrong with it
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            inside.update(range(token.start[0] + 1, token.end[0] + 1))
    found = (f"    {line}" if n not in inside else line for n, line in enumerate(lines, 1))
    return "\n".join(found) + "\n"


def check(request: Request) -> None:
    """Refuse a request whose values are not of the types they have to be.

    Raises:
        Problem: naming the field.
        DataVersionError: its block is of another version.
    """
    asked.check(request.prompt)
    if not all(isinstance(name, str) for name in request.settings):
        raise Problem(400, "settings: names are text.", param="settings")
    edits = request.settings.get("edits")
    if edits is not None and not asked.is_list_of(edits, str):
        raise Problem(400, f"edits={edits!r:.100}: expected a list of names.", param="edits")
    if not isinstance(request.settings.get("stream_saves", False), bool):
        raise Problem(400, "stream_saves: true or false.", param="stream_saves")
    lora = request.settings.get("lora_request")
    if lora is not None and not isinstance(lora, str):
        raise Problem(
            400,
            "lora_request: on a server it is the name of an adapter that it was started with.",
            param="lora_request",
        )
    block = request.common or request.block
    if block:
        Opened(block)  # reads the versions; its values stay bytes


def _flat(prompt: Any) -> dict[str, Any]:
    if isinstance(prompt, str):
        return {"prompt": prompt}
    return {"prompt_token_ids": [_number(token) for token in prompt]}


def _number(value: Any) -> Any:
    """A value; to JSON 3.0 is the same number as 3."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def sampling(settings: Mapping[str, Any]) -> Any:
    """VLLM's sampling parameters, every field of the type it has to be.

    Raises:
        Problem: naming the field.
    """
    from vllm.sampling_params import SamplingParams

    from midstream.modeling.vllm import arguments

    given = dict(arguments.without_ours(settings))
    if KEY in (given.get("extra_args") or {}):
        raise Problem(400, f"extra_args: '{KEY}' is set by midstream alone.", param="extra_args")
    for name in given:
        if name.startswith("_") or name in _NOT_FOR_CLIENTS:
            raise Problem(400, f"'{name}' cannot be set over HTTP.", param=name)
    try:
        given = arguments.sampling_fields(given)
    except TypeError as error:
        raise Problem(400, str(error), kind="TypeError") from error
    check_numbers(given)
    try:
        # JSON has text where a mapping's keys are numbers
        as_text = any(isinstance(key, str) for key in given.get("logit_bias") or ())
        params = msgspec.convert(given, SamplingParams, str_keys=as_text)
    except msgspec.ValidationError as error:
        raise Problem(400, f"settings: {error}", param=_field(error)) from None
    if params.n > MOST_REQUESTS:
        raise Problem(400, f"n={params.n}: at most {MOST_REQUESTS}.", param="n")
    return params


def check_numbers(settings: Mapping[str, Any]) -> None:
    """Refuse whole numbers that the engine's processes have no form for, see ``arguments``.

    Raises:
        Problem: naming the field.
    """
    from midstream.modeling.vllm import arguments

    found = arguments.oversized(settings)
    if found is not None:
        name, bits = found
        raise Problem(400, f"{name}: a number of more than {bits + 1} bits.", param=name)


_NOT_FOR_CLIENTS = frozenset(
    {"output_kind", "skip_clone", "output_text_buffer_length", "trace_decode_token_ids"}
)


def chosen_edits(requests: Sequence[Request], choose: Any) -> list[list[int]]:
    """Numbers of the edits that run beside each request; ``choose`` gives them for names.

    Raises:
        Problem: there is none of a name.
    """
    try:
        return [choose(request.settings.get("edits")) for request in requests]
    except ValueError as error:
        raise Problem(400, str(error), kind="ValueError", param="edits") from error
