"""A server without keys and without code, and how servers end."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.serve.process import FLAGS, Server, command, ended, environment, json_call
from tests.support.checkpoints import checkpoint

TRACES, EDITS = "/v1/midstream/traces", "/v1/midstream/edits"
LONG = {"model": "tiny", "prompt": "t3", "max_tokens": 400, "ignore_eos": True}


@pytest.fixture(scope="module")
def closed() -> Iterator[Server]:
    """A server without keys that runs no blocks of clients."""
    made = Server("--no-code")
    try:
        yield made.wait()
    finally:
        made.end()


@pytest.fixture
def killed_by_a_block() -> Iterator[Server]:
    """A server whose engine is going to end."""
    made = Server("--api-key", "key")
    try:
        yield made.wait()
    finally:
        made.end()


def test_no_code(closed: Server) -> None:
    """With `--no-code` no block runs, whatever it is sent as; plain traces and edits do."""
    body = {"prompt": "t3", "settings": {"max_tokens": 2, "temperature": 0.0}}
    refused = json_call(closed.url, "POST", TRACES, json={**body, "code": "x = [1].save()"})
    assert refused.status_code == 403
    assert "--no-code" in refused.json()["error"]["message"]
    assert json_call(closed.url, "GET", "/v1/midstream/model").json()["code"] is False
    edit = json_call(closed.url, "POST", EDITS, json={"name": "one", "code": "x = [1].save()"})
    assert edit.status_code == 200  # whoever reaches a server without keys is its administrator
    found = json_call(closed.url, "POST", TRACES, json=body).json()["results"][0]["outputs"][0]
    assert found["saves"] == {"x": [1]}
    assert json_call(closed.url, "DELETE", EDITS).json() == {"cleared": [1]}


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "evil.example:8000"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1.evil.example"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},
        {
            "Sec-Fetch-Site": "cross-site",
            "Sec-Fetch-Mode": "navigate",
            "Sec-Fetch-Dest": "document",
        },
    ],
)
def test_pages_from_elsewhere(closed: Server, headers: dict[str, str]) -> None:
    """A page in a browser on this machine cannot use a server that needs no key."""
    body = {"model": "tiny", "prompt": "t3", "max_tokens": 1}
    for path in ("/v1/completions", TRACES):
        reply = json_call(closed.url, "POST", path, json=body, headers=headers)
        assert reply.status_code == 403
    ours = {"Origin": closed.url, "Sec-Fetch-Site": "same-origin"}
    assert json_call(closed.url, "GET", "/midstream/state", headers=ours).status_code == 200
    follows = "Sec-Fetch-Dest" in headers  # a link to the page from elsewhere
    reply = json_call(closed.url, "GET", "/midstream", headers=headers)
    assert reply.status_code == (200 if follows else 403)


def test_told_to_end(closed: Server) -> None:
    """SIGTERM lets what runs finish, then ends the server, and nothing is left (E28)."""
    below = closed.below()
    assert below
    text: list[str] = []
    first = threading.Event()

    def stream() -> None:
        path = f"{closed.url}/v1/completions"
        with httpx.stream("POST", path, json={**LONG, "stream": True}, timeout=120) as reply:
            for line in reply.iter_lines():
                text.append(line)
                first.set()

    thread = threading.Thread(target=stream)
    thread.start()
    assert first.wait(60)
    closed.terminate()
    thread.join(60)
    chunks = [json.loads(line[6:]) for line in text if line.startswith("data: {")]
    assert text[-2:] == ["data: [DONE]", ""], text[-3:]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert closed.process.wait(60) in (0, -15), closed.log()
    assert ended(below, 10)


def test_an_engine_that_ends(killed_by_a_block: Server) -> None:
    """The server ends with it, with a status by which a service manager starts it again.

    Who waits is told, and of nobody else's block.
    """
    below = killed_by_a_block.below()
    url, running = killed_by_a_block.url, {"settings": {"max_tokens": 450, "ignore_eos": True}}
    told: list[Any] = []

    def wait() -> None:
        body = {**running, "prompt": "t3", "code": "for step in tracer.all():\n    model.logits"}
        told.append(json_call(url, "POST", TRACES, "key", json=body))

    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(0.5)
    body = {"prompt": "t3", "code": "import os\nos._exit(3)"}
    reply = json_call(url, "POST", TRACES, "key", json=body)
    waiting.join(60)
    for each in (reply, *told):
        assert each.status_code == 503
        assert "engine has ended" in each.json()["error"]["message"]
        assert "a block sent as text" not in each.text
    assert killed_by_a_block.process.wait(60) == 1, killed_by_a_block.log()
    assert ended(below, 10)


def start(*flags: str, **more: str) -> str:
    """What a server that does not start says."""
    model = str(checkpoint("T-LLAMA", with_tokenizer=True))
    begin = time.monotonic()
    ran = subprocess.run(
        command("serve", model, *FLAGS, *flags),
        capture_output=True, text=True, timeout=120, env=environment(more), check=False,
    )  # fmt: skip
    assert ran.returncode != 0
    assert time.monotonic() - begin < 60
    return ran.stdout + ran.stderr


def test_a_server_that_does_not_start() -> None:
    """It is refused before a model is loaded, with what to do."""
    assert "Set --api-key" in start("--host", "0.0.0.0")


def test_told_to_end_while_its_engine_starts() -> None:
    """SIGTERM before the server answers ends it and all that it has started."""
    made = Server("--no-code")
    try:
        deadline = time.monotonic() + 120
        while len(made.below()) < 2:  # the engine's process, and Python's tracker of resources
            assert time.monotonic() < deadline, "no engine process was started"
            time.sleep(0.1)
        below = made.below()
        made.terminate()
        assert made.process.wait(20) == 128 + 15
        assert ended(below, 10)
    finally:
        made.end()
