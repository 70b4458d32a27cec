"""What nobody should send: each is refused in plain words, and the server goes on."""

from __future__ import annotations

import gzip
import pickle
import re
import socket
import struct
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from midstream.modeling.vllm.data import Request, write
from midstream.modeling.vllm.remote.wire import EditCall, TraceCall, Versions, encode
from tests.serve.conftest import ALICE, BOB, ROOT
from tests.serve.process import Server

TRACES, EDITS = "/v1/midstream/traces", "/v1/midstream/edits"
MSGPACK = {"Content-Type": "application/msgpack"}
JSON = {"Content-Type": "application/json"}

Ask = Callable[..., httpx.Response]


MARK = Path(tempfile.mkdtemp(prefix="midstream-test-")) / "mark"


class Bomb:
    """A pickle that would leave a mark."""

    def __reduce__(self) -> Any:
        return exec, (f"open({str(MARK)!r}, 'w')",)


def trace(*requests: Request, **more: Any) -> bytes:
    """A trace as the client sends it."""
    return encode(TraceCall(versions=Versions(), trace=write(requests), **more))


def changed(**fields: Any) -> bytes:
    """A trace whose message has other fields."""
    made = msgspec.msgpack.decode(trace(Request({"prompt": "t3"}, {})))
    return msgspec.msgpack.encode({**made, **fields})


def inner(**fields: Any) -> bytes:
    """A trace whose own bytes have other fields."""
    made = msgspec.msgpack.decode(write([Request({"prompt": "t3"}, {})]))
    return changed(trace=msgspec.msgpack.encode({**made, **fields}))


def one(**fields: Any) -> bytes:
    """A trace whose one request has other fields."""
    made = msgspec.msgpack.decode(write([Request({"prompt": "t3"}, {})]))
    return inner(requests=[{**made["requests"][0], **fields}])


BODIES = {
    "empty": b"",
    "a pickle": pickle.dumps(Bomb()),
    "no map": msgspec.msgpack.encode([1, 2]),
    "cut off": trace(Request({"prompt": "t3"}, {}))[:-5],
    "too much behind": trace(Request({"prompt": "t3"}, {})) + b"x",
    "an array of four billion": b"\xdd\xff\xff\xff\xff",
    "text of four billion": b"\xdb\xff\xff\xff\xff",
    "nested": b"\x91" * 500_000,
    "nested in a field": b"\x81\xa5trace" + b"\x91" * 500_000,
    "unknown field": changed(evil=1),
    "no versions": msgspec.msgpack.encode({"trace": b""}),
    "trace is a pickle": changed(trace=pickle.dumps(Bomb())),
    "trace is text": changed(trace="x"),
    "no requests": inner(requests=[], places=[]),
    "too many requests": trace(*[Request({"prompt": "t3"}, {})] * 2000),
    "places beyond": inner(places=[7]),
    "places below": inner(places=[-2]),
    "too few places": inner(places=[]),
    "another format": inner(format="midstream-trace-9"),
    "prompt is a pickle": one(prompt={"prompt": pickle.dumps(Bomb())}),
    "prompt is nested": one(prompt={"prompt": [[[["t3"]]]]}),
    "unknown prompt": one(prompt={"multi_modal_data": {"image": "x"}}),
    "file as prompt": one(prompt={"prompt_embeds": "/etc/passwd"}),
    "settings is no map": one(settings=[1]),
    "adapter by path": one(settings={"lora_request": ["x", 1, "/etc"]}),
    "setting of another type": one(settings={"stop_token_ids": [{"x": 1}]}),
    "private setting": one(settings={"_eos_token_id": 3}),
    "our key": one(settings={"extra_args": {"midstream": b"x"}}),
    "huge n": one(settings={"n": 1 << 30}),
    "block is a pickle": one(block=pickle.dumps(Bomb())),
    "common is a pickle": inner(commons=[pickle.dumps(Bomb())], places=[1]),
    "keep is no text": one(keep=[[1]]),
}


@pytest.mark.parametrize("name", BODIES)
def test_messages_that_make_no_sense(ask: Ask, name: str) -> None:
    """Values are looked at before code, and what is not known is refused (E17, case 99)."""
    reply = ask("POST", TRACES, content=BODIES[name], headers=MSGPACK)
    assert reply.status_code in (400, 409), reply.text
    assert reply.json()["error"]["message"]
    assert not MARK.exists()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", None),
        (b"{", None),
        (b"[" * 200_000, None),
        (b'{"prompt":' + b"[" * 200_000, None),
        (b'{"prompt": {"a": 1}}', "prompt"),
        (b'{"prompt": ""}', "prompt"),
        (b'{"prompt": "t3", "evil": 1}', "evil"),
        (b'{"prompt": "t3", "code": 3}', "code"),
        (b'{"prompt": "t3", "settings": {"max_tokens": "x"}}', "settings.max_tokens"),
        (b'{"prompt": "t3", "settings": {"edits": "x"}}', "edits"),
        (b'{"prompt": "\xff"}', None),
        (b'{"settings": {}}', "prompt"),
    ],
)
def test_json_that_makes_no_sense(ask: Ask, body: bytes, param: str | None) -> None:
    """The answer names the field (case 99)."""
    reply = ask("POST", TRACES, content=body, headers=JSON)
    assert reply.status_code == 400, reply.text
    named = reply.json()["error"].get("param")
    assert param is None or named in (param, param.rpartition(".")[2])


@pytest.mark.parametrize(
    ("settings", "status"),
    [
        ({"seed": 2**64 - 1}, 400),
        ({"seed": 2**63 - 1}, 200),
        ({"max_tokens": 2**31 - 1}, 400),
        ({"max_tokens": 2**30 - 1, "stop_token_ids": [*range(100)]}, 200),
        ({"top_k": 2**40}, 400),
        ({"stop_token_ids": [2**31]}, 400),
        ({"logit_bias": {"5": 1e300}}, 200),
        ({"logit_bias": {"99999999": 1.0}}, 400),
        ({"temperature": 1e308}, 400),
        ({"repetition_penalty": 5e-324}, 200),
    ],
)
def test_numbers_beyond_all_bounds(ask: Ask, settings: dict[str, Any], status: int) -> None:
    """None ends the engine, as some of them would if they reached it."""
    body = {"prompt": [3], "settings": {"max_tokens": 2, **settings}}
    assert ask("POST", TRACES, json=body).status_code == status
    assert ask("POST", TRACES, json={"prompt": [3], "settings": {"max_tokens": 1}}).is_success


def test_bodies_of_other_kinds(ask: Ask) -> None:
    """Only JSON and msgpack are taken, and nothing that would have to be unpacked first."""
    body = b'{"prompt": "t3"}'
    assert (
        ask("POST", TRACES, content=body, headers={"Content-Type": "text/plain"}).status_code == 415
    )
    packed = {**JSON, "Content-Encoding": "gzip"}
    bomb = gzip.compress(b"[" + b"0," * 10_000_000 + b"0]")
    for path in (TRACES, EDITS, "/v1/completions", "/tokenize"):
        reply = ask("POST", path, content=bomb, headers=packed)
        assert reply.status_code == 415
    pickled = {"Content-Type": "application/python-pickle"}
    assert ask("POST", EDITS, content=pickle.dumps(Bomb()), headers=pickled).status_code == 415


@pytest.mark.parametrize("path", [TRACES, EDITS, "/v1/completions", "/v1/audio/transcriptions"])
def test_a_body_that_is_too_long(server: Server, ask: Ask, path: str) -> None:
    """It is refused by its length, before it is read, and as it comes where it has none."""
    before = server.memory()
    reply = ask("POST", path, content=b"x" * ((1 << 24) + 1), headers=JSON)
    assert reply.status_code == 413

    def parts() -> Any:
        for _ in range(300):
            yield b"[" * (1 << 16)

    with suppress(httpx.WriteError):  # the server has closed the connection before all was sent
        assert ask("POST", path, content=parts(), headers=JSON).status_code == 413
    assert server.memory() - before < 200 << 20


@pytest.mark.parametrize("form", ["text", "chat", "ids"])
def test_prompts_that_are_far_too_long(ask: Ask, form: str) -> None:
    """They are refused by their length: their tokens would be looked for while nobody is served."""
    text = "t3 " * (1 << 21)
    prompts: dict[str, Any] = {
        "text": text,
        "chat": [{"role": "user", "content": [{"type": "text", "text": text}]}],
        "ids": [3] * (1 << 21),
    }
    begin = time.monotonic()
    reply = ask("POST", TRACES, json={"prompt": prompts[form], "settings": {"max_tokens": 1}})
    assert reply.status_code == 400
    assert re.search("characters|length", reply.json()["error"]["message"])
    assert reply.json()["error"]["param"] == "prompt"
    assert time.monotonic() - begin < 5
    packed = {"ids": {"prompt_token_ids": prompts["ids"]}, "chat": {"messages": prompts["chat"]}}
    whole = packed.get(form, {"prompt": text})
    reply = ask("POST", TRACES, content=trace(Request(whole, {})), headers=MSGPACK)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "prompt")


@pytest.mark.parametrize("content", [{}, 3, True, ["t3"], [[]]])
def test_messages_that_are_no_text(ask: Ask, content: Any) -> None:
    """What no chat template makes text of is refused, not written out as Python shows it."""
    prompt = [{"role": "user", "content": content}]
    reply = ask("POST", TRACES, json={"prompt": prompt, "settings": {"max_tokens": 1}})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "prompt")


@pytest.mark.parametrize("depth", [100, 400, 480, 900])
def test_messages_that_are_nested(ask: Ask, depth: int) -> None:
    """However deep a part of a message is, the answer is no failure of the server's."""
    part = b'{"a":' * depth + b"1" + b"}" * depth
    content = b'{"prompt": [{"role": "user", "content": [' + part + b"]}]}"
    reply = ask("POST", TRACES, content=content, headers=JSON)
    assert reply.status_code in (200, 400), reply.text


def test_edits_that_make_no_sense(ask: Ask) -> None:
    """Nothing is installed, and the engine's reason comes back."""
    cases: list[Any] = [
        {"code": 3},
        {"code": "x = ("},
        {"code": "-" * 50_000 + "1"},
        {"code": "x", "name": ""},
        {"code": "x", "name": "n" * 300},
        {"code": "x" * (1 << 21)},
        {"code": "with tracer.invoke('t3'):\n    pass\nreturn 3"},
    ]
    for body in cases:
        assert ask("POST", EDITS, json=body).status_code in (400, 413), body
    for block in (b"", b"\x80\x05N.", pickle.dumps(Bomb())):
        body = encode(EditCall(versions=Versions(), block=block))
        reply = ask("POST", EDITS, content=body, headers=MSGPACK)
        assert reply.status_code in (400, 409), reply.text
    assert ask("GET", EDITS).json() == {"edits": []}


@pytest.mark.parametrize("name", ["0", "-1", "1e9", "999999", "9" * 400, "%2e%2e", "x", "\u0661"])
def test_numbers_that_are_nobodys(ask: Ask, name: str) -> None:
    """Ids that there are not, or that are no ids."""
    for method, path in (("DELETE", EDITS), ("DELETE", TRACES), ("GET", TRACES)):
        assert ask(method, f"{path}/{name}").status_code in (404, 405)


def test_an_edit_that_loops_for_ever(ask: Ask) -> None:
    """It fails beside each request that it acts on, which goes on without it."""
    ask("POST", EDITS, json={"name": "loop", "code": "while True:\n    pass"})
    body = {"model": "tiny", "prompt": "t3", "max_tokens": 2, "midstream": {"edits": ["loop"]}}
    reply = ask("POST", "/v1/completions", json=body)
    assert reply.status_code == 200
    assert "block_timeout=2" in reply.json()["midstream"]["errors"][0]
    assert reply.json()["usage"]["completion_tokens"] == 2


def test_saves_that_are_too_large(ask: Ask) -> None:
    """The limit is that request's error, with its name in it (O20)."""
    code = "import torch\nx = torch.zeros(1 << 26).save()"
    body = {"prompt": [3], "settings": {"max_tokens": 1}, "code": code}
    found = ask("POST", TRACES, json=body).json()["results"][0]["outputs"][0]
    assert "max_save_bytes=134217728" in found["errors"][0]["message"]


def test_too_many_edits(ask: Ask) -> None:
    """A key has so many edits and no more."""
    for _ in range(64):
        assert ask("POST", EDITS, json={"code": "pass"}).status_code == 200
    assert ask("POST", EDITS, json={"code": "pass"}).status_code == 429
    assert ask("POST", EDITS, BOB, json={"code": "pass"}).status_code == 200
    assert ask("DELETE", EDITS, BOB).status_code == 200


def test_connections_that_never_say_anything(server: Server, ask: Ask) -> None:
    """A thousand half-open connections keep nobody from being served; memory stays flat."""
    before, sockets = server.memory(), []
    host, port = server.url.removeprefix("http://").split(":")
    head = b"POST /v1/midstream/traces HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n"
    try:
        for index in range(1000):
            half = socket.create_connection((host, int(port)), timeout=10)
            half.sendall(
                head if index % 2 else head + f"Authorization: Bearer {ALICE}\r\n\r\n{{".encode()
            )
            sockets.append(half)
        begin = time.monotonic()
        body = {"prompt": [3], "settings": {"max_tokens": 1}, "code": "x = [1].save()"}
        assert ask("POST", TRACES, json=body).json()["results"][0]["outputs"][0]["saves"] == {
            "x": [1]
        }
        assert time.monotonic() - begin < 20
        assert server.memory() - before < 100 << 20
    finally:
        for half in sockets:
            half.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            half.close()
    assert ask("GET", "/health").status_code == 200


def test_frames_that_are_no_http(server: Server, ask: Ask) -> None:
    """Bytes that are no request are answered with 400, or the connection is closed."""
    host, port = server.url.removeprefix("http://").split(":")
    for data in (b"\x00" * 1000, b"GET\r\n\r\n", b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n"):
        with socket.create_connection((host, int(port)), timeout=10) as raw:
            raw.sendall(data + b"\r\n\r\n")
            assert raw.recv(100).startswith((b"HTTP/1.1 400", b""))
    assert ask("GET", "/health").status_code == 200


def test_keys_that_are_no_keys(ask: Ask) -> None:
    """Every form of a missing or wrong key is 401, websockets and pages included."""
    wrong = ["", "Bearer", f"bearer{ALICE}", f"Token {ALICE}", "Basic !!!", "Basic Og=="]
    for value in wrong:
        for path in ("/v1/models", "/midstream", "/midstream/state", EDITS):
            assert ask("GET", path, None, headers={"Authorization": value}).status_code == 401
    assert ask("GET", "/v1/models", None, headers={"Authorization": f"bearer {ALICE}"}).is_success


def test_pages_from_elsewhere(ask: Ask) -> None:
    """A key that a browser sends by itself changes nothing without our own page's mark."""
    basic = httpx.BasicAuth("", ROOT)._auth_header
    found = {"Authorization": basic}
    assert ask("GET", "/midstream", None, headers=found).status_code == 200
    assert ask("DELETE", "/midstream/edits/1", None, headers=found).status_code == 403
    elsewhere = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}
    reads = ask("GET", "/midstream/state", None, headers={**found, **elsewhere})
    assert reads.status_code == 403
    assert ask("GET", "/midstream/state", headers=elsewhere).status_code == 200  # a key of its own
    marked = {**found, "X-Midstream": "page"}
    assert ask("DELETE", "/midstream/edits/1", None, headers=marked).status_code == 404
