"""A client against servers that are wrong, or mean it ill."""

from __future__ import annotations

import gzip
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import torch

from midstream.errors import ServerError, TransportError
from midstream.modeling.vllm.data import Request
from midstream.modeling.vllm.ledger import Outcome
from midstream.modeling.vllm.payloads import BlockError, Record, pack
from midstream.modeling.vllm.payloads.segments import owner_id, remaining
from midstream.modeling.vllm.remote import client, outcomes, tree, wire
from midstream.modeling.vllm.remote.client import Server
from midstream.modeling.vllm.remote.outputs import ServedCompletion, ServedOutput

PLAIN = [Request({"prompt": "t3"}, {})]


def answering(answer: Callable[[httpx.Request], httpx.Response]) -> Server:
    """A client whose server answers so."""
    server = Server("http://server:8000", "key")
    server._http = httpx.Client(
        base_url=server.url,
        headers=client.headers("key"),
        transport=httpx.MockTransport(answer),
    )
    return server


def reply(status: int = 200, body: bytes = b"", **headers: str) -> httpx.Response:
    """An answer that comes as a stream, as over a network."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.Response(status, stream=httpx.ByteStream(body), headers=named)


def outcome(**saves: Any) -> Outcome:
    """What a request of one sequence brought home."""
    output = ServedOutput("r", None, [3], outputs=[ServedCompletion(0, "t4", [4])])
    records: list[Record | None] = [Record("r", saves=saves)]
    return Outcome(expected=1, output=output, records=records, edits=[{}], new=[{}])


def written(*found: Outcome) -> memoryview:
    """Outcomes as they come over the network."""
    return memoryview(bytearray(b"".join(outcomes.write("t", found))))


def framed(records: bytes) -> bytes:
    """A reply with these records, and no tensors."""
    return b"".join(wire.framed(wire.Reply("t", records), []))


def test_outcomes_come_home() -> None:
    """Values, outputs and whose they are survive the way; nothing is left in shared memory."""
    data = written(outcome(x=torch.arange(40_000.0)), outcome(y=[1]))
    assert remaining(owner_id()) == []
    first, second = outcomes.read(data)
    assert torch.equal(first.records[0].saves["x"], torch.arange(40_000.0))
    assert second.records[0].saves == {"y": [1]}
    assert first.output.outputs[0].token_ids == [4]
    assert first.is_complete


def test_the_key_and_the_forms_are_said() -> None:
    """Compressed answers are not asked for."""

    def answer(request: httpx.Request) -> httpx.Response:
        assert request.headers["authorization"] == "Bearer key"
        assert request.headers["accept-encoding"] == "identity"
        assert request.headers["content-type"] == "application/msgpack"
        return reply(body=b"".join(outcomes.write("t", [outcome(x=1)])))

    (found,) = answering(answer).run(PLAIN)
    assert found.records[0].saves == {"x": 1}


@pytest.mark.parametrize("announced", [True, False])
def test_answers_of_any_length(announced: bool) -> None:
    """A length that was announced, or none, and parts of all sizes: the same comes home."""
    body = bytes(written(outcome(x=torch.arange(300_000.0))))
    length = {"content-length": str(len(body))} if announced else {}
    found = client.Filled("http://server", httpx.Response(200, headers=length))
    at = 0
    for size in (1, 0, 100_000, 7, len(body)):
        found.add(body[at : at + size])
        at += size
    assert found.body == body
    (again,) = outcomes.read(found.body)
    again.records[0].saves["x"] += 1  # it can be written to
    assert torch.equal(again.records[0].saves["x"], torch.arange(300_000.0) + 1)


def test_an_answer_that_ends_early() -> None:
    """Memory that nothing came into is no part of it."""
    found = client.Filled("http://server", httpx.Response(200, headers={"content-length": "999"}))
    found.add(b"abc")
    assert bytes(found.body) == b"abc"


class Bomb:
    def __reduce__(self) -> Any:
        return sys.exit, ("unpickled",)


REPLIES = {
    "a pickle": pickle.dumps(Bomb()),
    "a pickle inside": framed(pickle.dumps(Bomb())),
    "nothing": b"",
    "a page": b"<html>",
    "nested": b"\x91" * 100_000,
    "nested inside": framed(b"\x91" * 100_000),
    "four billion": b"\xdd\xff\xff\xff\xff",
    "cut off": bytes(written(outcome(x=torch.ones(1000))))[:-10],
    "too much behind": bytes(written(outcome(x=torch.ones(1000)))) + b"x" * 64,
    "no outcome": framed(pack([Record("0", saves={"x": 1})], owner="")),
}


@pytest.mark.parametrize("name", REPLIES)
def test_replies_that_are_none(name: str) -> None:
    """Nothing is unpickled; what makes no sense is an error (E26)."""
    server = answering(lambda _: reply(body=REPLIES[name]))
    with pytest.raises((ServerError, TransportError)):
        server.run(PLAIN)


def test_a_reply_that_names_shared_memory(tmp_path: Path) -> None:
    """A server has no say in what this machine maps or removes."""
    data = pack([Record("0", saves={"x": torch.ones(100_000)})], owner=owner_id())
    (left,) = remaining(owner_id())
    try:
        server = answering(lambda _: reply(body=framed(data)))
        with pytest.raises(TransportError, match="names shared memory"):
            server.run(PLAIN)
        assert remaining(owner_id()) == [left]
    finally:
        from midstream.modeling.vllm.payloads.segments import discard

        discard(owner_id())


def test_an_error_of_a_module_that_is_not_loaded() -> None:
    """Its type's module is not imported for a server."""
    found = outcome()
    found.records[0].error = BlockError("antigravity", "Error", "text", "trace")
    (again,) = outcomes.read(written(found))
    assert again.records[0].error.message == "text"
    assert again.records[0].error.rebuild() is None
    assert "antigravity" not in sys.modules


def test_a_compressed_answer() -> None:
    """It could be of any size, and is not taken."""
    bomb = gzip.compress(b"0" * 1_000_000)
    server = answering(lambda _: reply(body=bomb, content_encoding="gzip"))
    with pytest.raises(ServerError, match="compressed"):
        server.run(PLAIN)


def test_an_answer_that_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading ends at the bound."""
    monkeypatch.setattr(client, "MOST_BYTES", 1000)
    server = answering(lambda _: reply(body=b"x" * 1001))
    with pytest.raises(ServerError, match="more than 1000 bytes"):
        server.run(PLAIN)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"error": {"message": "why", "type": "T", "code": 503}}', "503 T: why"),
        (b'{"error": "Unauthorized"}', "Unauthorized"),
        (b"Bad gateway", "Bad gateway"),
        (b"\xff\xfe", "503"),
    ],
)
def test_errors_have_the_servers_text(body: bytes, text: str) -> None:
    """Whoever answers, what was said is in the error, with its status (G58)."""
    server = answering(lambda _: reply(503, body))
    with pytest.raises(ConnectionError, match=text) as refused:
        server.run(PLAIN)
    assert refused.value.status == 503


def test_what_is_tried_again() -> None:
    """A request that has been sent is sent once, whatever becomes of it."""
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        raise httpx.ReadError("gone")

    with pytest.raises(ServerError, match="failed: ReadError"):
        answering(answer).run(PLAIN)
    assert asked == ["/v1/midstream/traces"]


def test_redirections_are_not_followed() -> None:
    """A key goes to the server that was named and to no other."""
    server = answering(lambda _: reply(307, location="http://elsewhere/"))
    with pytest.raises(ServerError, match="307"):
        server.run(PLAIN)


def test_trees_that_make_no_sense() -> None:
    """A tree is names and no code, within bounds."""
    whole = tree.Branch("Root", "", {"a": tree.Branch("A", "x=1"), "b": tree.Branch("A", same=1)})
    made = tree.stand_in(msgspec.convert(msgspec.to_builtins(whole), tree.Branch))
    assert made.a is made.b
    assert repr(made.a) == "A(x=1)"
    deep = tree.Branch("A")
    for _ in range(100):
        deep = tree.Branch("A", "", {"a": deep})
    for bad in (deep, tree.Branch("A", "", {"a": tree.Branch("A", same=9)})):
        with pytest.raises(ValueError, match="module tree"):
            tree.stand_in(bad)
