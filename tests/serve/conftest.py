"""One server for the session, with keys, and what its tests ask of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from midstream import VLLM
from midstream.modeling.vllm import bootstrap
from tests.serve.process import TEMPLATE, Server, json_call

# HuggingFace's model, the reference, imports Triton, which an engine in this process prepares first
bootstrap.prepare_process(bootstrap.installed())

ALICE, BOB, ROOT = "alice-key", "bob-key", "root-key"


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """A server that two clients and an administrator have keys of."""
    made = Server(
        *("--api-key", ALICE, BOB, "--admin-key", ROOT, "--block-timeout", "2"),
        *("--max-save-bytes", str(1 << 27), "--max-traces-per-key", "40"),
        *("--max-body-bytes", str(1 << 24), "--chat-template", TEMPLATE),
    )
    try:
        yield made.wait()
    finally:
        made.end()


@pytest.fixture
def ask(server: Server) -> Iterator[Callable[..., httpx.Response]]:
    """Ask the server something with Alice's key; afterwards it must be alive and hold nothing."""
    yield lambda method, path, key=ALICE, **more: json_call(server.url, method, path, key, **more)
    assert json_call(server.url, "DELETE", "/v1/midstream/edits", ALICE).is_success
    deadline = time.monotonic() + 30  # what was cancelled ends with the step that runs
    while json_call(server.url, "GET", "/midstream/state", ROOT).json()["load"]["blocks"]:
        assert time.monotonic() < deadline, "the engine still holds a block"
        time.sleep(0.1)


@pytest.fixture(scope="session")
def model(server: Server) -> Iterator[Any]:
    """The model as a client without vLLM has it: the tree is the server's."""
    made = VLLM("tiny", serve=server.url, api_key=ALICE)
    yield made
    made.close()


@pytest.fixture
def run(ask: Callable[..., httpx.Response]) -> Callable[..., dict[str, Any]]:
    """Run a trace that is sent as text; the reply's one sequence."""

    def running(code: str, prompt: Any = (3, 4, 5), **settings: Any) -> dict[str, Any]:
        settings = {"max_tokens": 3, "temperature": 0.0, **settings}
        prompt = prompt if isinstance(prompt, str) else list(prompt)
        body = {"prompt": prompt, "settings": settings, "code": code}
        reply = ask("POST", "/v1/midstream/traces", json=body)
        assert reply.status_code == 200, reply.text
        found: dict[str, Any] = reply.json()["results"][0]["outputs"][0]
        return found

    return running
