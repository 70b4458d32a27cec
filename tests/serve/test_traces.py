"""Traces over HTTP: as JSON, as server-sent events, in the background."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from midstream.serve.reports import Latest
from tests.serve.conftest import ALICE, BOB, ROOT
from tests.serve.process import Server, json_call
from tests.support.checkpoints import checkpoint

TRACES = "/v1/midstream/traces"
LOOP = "for step in tracer.all():\n    model.model.layers[1].output[0]\n"

Ask = Callable[..., httpx.Response]
Run = Callable[..., dict[str, Any]]


def array(value: dict[str, Any]) -> np.ndarray[Any, Any]:
    """A tensor of a JSON reply."""
    data = np.frombuffer(base64.b64decode(value["data"]), value["dtype"])
    return data.reshape(value["shape"])


@pytest.fixture(scope="module")
def logits() -> torch.Tensor:
    """HuggingFace's logits behind the last token of the prompt 3 4 5."""
    path = checkpoint("T-LLAMA", with_tokenizer=True)
    hf = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        found: torch.Tensor = hf(torch.tensor([[3, 4, 5]])).logits[0]
    return found


def test_a_block_sent_as_text(run: Run, logits: torch.Tensor) -> None:
    """A client in any language sends source and gets values as JSON, bit for bit (case 99)."""
    found = run("x = model.logits.save()\ntexts = ['''a\nb'''].save()\nprint('said')")
    saved = torch.tensor(array(found["saves"]["x"]))[0]
    assert (logits[-2] - logits[-1]).abs().max() > 1e-2
    torch.testing.assert_close(saved, logits[-1], atol=1e-3, rtol=0)
    assert found["saves"]["texts"] == ["a\nb"]
    assert found["prints"] == ["said\n"]
    assert found["token_ids"][0] == int(logits[-1].argmax())
    assert found["errors"] == []


def test_text_that_is_no_text(run: Run, ask: Ask) -> None:
    """What JSON cannot hold comes as its escapes, and takes nothing else with it."""
    found = run(
        "bad = chr(0xd800)\nx = [bad, 10**5000, 7].save()\nprint(bad)\n"
        "import warnings; warnings.warn(bad)\nraise ValueError(bad)"
    )
    assert found["saves"]["x"][0] == {"repr": r"'\ud800'"}
    assert found["saves"]["x"][2] == 7
    assert found["prints"] == ["\\ud800\n"]
    assert found["warnings"] == [r"\ud800"]
    assert found["errors"][0]["message"] == r"\ud800"
    state = ask("GET", "/midstream/state", ROOT)
    assert state.status_code == 200  # the page shows it as well
    assert state.json()["errors"][0]["text"] == r"ValueError: \ud800"


def test_a_client_that_reads_slowly() -> None:
    """It gets the latest output of each request, and the server keeps no other (E2)."""

    async def reading() -> list[tuple[int, Any] | None]:
        latest = Latest()
        for step in range(1000):
            latest.put(step % 2, step)
        found = [await latest.get(), await latest.get()]
        latest.put(0, "more")
        latest.end()
        return [*found, await latest.get(), await latest.get()]

    assert asyncio.run(reading()) == [(0, 998), (1, 999), (0, "more"), None]


def test_a_block_that_fails(run: Run) -> None:
    """Its error is in the reply with its line; the request is not the server's failure."""
    found = run("x = [1].save()\n1 / 0")
    assert found["errors"][0]["type"] == "ZeroDivisionError"
    assert "line 2" in found["errors"][0]["traceback"]
    assert found["saves"] == {"x": [1]}
    assert found["finish_reason"] == "error"


def test_events_while_it_runs(ask: Ask) -> None:
    """A streaming trace tells the growing text, and at the end all of what is saved."""
    body = {"prompt": [3, 4, 5], "settings": {"max_tokens": 4, "temperature": 0.0}}
    reply = ask("POST", TRACES, json={**body, "code": "x = [7].save()", "stream": True})
    events = [part.split("\n") for part in reply.text.strip().split("\n\n")]
    kinds = [lines[0].removeprefix("event: ") for lines in events]
    data = [json.loads(lines[1].removeprefix("data: ")) for lines in events]
    assert kinds == ["started", *["output"] * (len(kinds) - 2), "reply"]
    ids = [each["outputs"][0]["token_ids"] for each in data[1:-1]]
    last = data[-1]["results"][0]["outputs"][0]
    assert len(ids) >= 2
    assert all(last["token_ids"][: len(each)] == each for each in ids)
    assert last["saves"] == {"x": [7]}


def test_a_trace_in_the_background(ask: Ask) -> None:
    """It is started, asked for by its id, and fetched once."""
    body = {"prompt": [3, 4, 5], "settings": {"max_tokens": 40}, "code": f"x = [7].save()\n{LOOP}"}
    started = ask("POST", TRACES, json={**body, "background": True})
    assert started.status_code == 202
    path = f"{TRACES}/{started.json()['id']}"
    assert ask("GET", path).status_code in (200, 202)
    deadline = time.monotonic() + 60
    while (reply := ask("GET", f"{path}?wait=10")).status_code == 202:
        assert time.monotonic() < deadline
    assert reply.json()["results"][0]["outputs"][0]["saves"] == {"x": [7]}
    assert ask("GET", path).status_code == 404


def _background(ask: Ask, **more: Any) -> str:
    body = {"prompt": [3, 4, 5], "settings": {"max_tokens": 450, "ignore_eos": True}, "code": LOOP}
    started = ask("POST", TRACES, json={**body, "background": True}, **more)
    assert started.status_code == 202, started.text
    name: str = started.json()["id"]
    return name


def test_a_trace_that_is_cancelled(ask: Ask) -> None:
    """`DELETE` ends it in the engine too."""
    path = f"{TRACES}/{_background(ask)}"
    assert ask("GET", path).status_code == 202
    assert ask("DELETE", path).status_code == 200
    assert ask("GET", path).status_code == 404
    assert blocks_end(ask)


def blocks_end(ask: Ask, seconds: float = 20.0) -> bool:
    """Whether the engine holds no block after some time."""
    deadline = time.monotonic() + seconds
    while ask("GET", "/midstream/state", ROOT).json()["load"]["blocks"]:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def test_another_keys_trace(ask: Ask) -> None:
    """Nobody reads or cancels a trace of another key, an administrator neither."""
    path = f"{TRACES}/{_background(ask)}"
    for key in (BOB, ROOT):
        assert ask("GET", path, key).status_code == 404
        assert ask("DELETE", path, key).status_code == 404
    assert ask("GET", path).status_code == 202
    assert ask("DELETE", path).status_code == 200
    assert blocks_end(ask)


def test_requests_cannot_be_aborted_past_their_owners(ask: Ask) -> None:
    """VLLM's route that aborts requests by their ids is the administrator's (stock: anyone's)."""
    refused = ask("POST", "/inference/v1/abort_requests", json={"request_ids": ["trace-0"]})
    assert refused.status_code == 403


@pytest.mark.parametrize("wait", ["-1", "61", "nan", "inf", "soon", ""])
def test_how_long_a_trace_is_waited_for(ask: Ask, wait: str) -> None:
    """It is seconds from 0 to 60, as the description says; what was not fetched is still there."""
    body = {"prompt": [3], "settings": {"max_tokens": 1}, "background": True}
    path = f"{TRACES}/{ask('POST', TRACES, json=body).json()['id']}"
    refused = ask("GET", f"{path}?wait={wait}")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "wait")
    assert ask("GET", f"{path}?wait=60").status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away(server: Server, ask: Ask, stream: bool) -> None:
    """A closed connection ends the trace, while stock servers go on (E25)."""
    body = {"prompt": [3, 4, 5], "settings": {"max_tokens": 450, "ignore_eos": True}, "code": LOOP}
    before = ask("GET", "/midstream/state", ROOT).json()["load"]

    def leave() -> None:
        with httpx.Client(headers={"Authorization": f"Bearer {ALICE}"}) as http:
            timeout = httpx.Timeout(1.0)
            path = server.url + TRACES
            with http.stream("POST", path, json={**body, "stream": stream}, timeout=timeout) as r:
                for part in r.iter_raw():
                    if b"event: output" in part:  # a step has run
                        break

    try:
        leave()
    except httpx.TimeoutException:
        assert not stream
    assert blocks_end(ask)
    after = ask("GET", "/midstream/state", ROOT).json()["load"]
    steps = after["eager steps"] - before["eager steps"]
    assert 0 < steps < 400


def test_too_many_traces(server: Server, ask: Ask) -> None:
    """A key has so many traces that run or wait, and no more; another key's do not count."""
    body = {"prompt": [3], "settings": {"max_tokens": 1}}
    started = [ask("POST", TRACES, json={**body, "background": True}) for _ in range(40)]
    refused = ask("POST", TRACES, json=body)
    assert refused.status_code == 429
    assert "--max-traces-per-key" in refused.json()["error"]["message"]
    assert json_call(server.url, "POST", TRACES, BOB, json=body).status_code == 200
    for reply in started:
        assert ask("DELETE", f"{TRACES}/{reply.json()['id']}").status_code == 200
    assert ask("POST", TRACES, json=body).status_code == 200


def test_answers_that_nobody_reads(server: Server, ask: Ask) -> None:
    """A trace counts until its client has taken what it brought home, and so holds no more."""
    code = "import torch\nx = torch.ones(1 << 24, dtype=torch.uint8).save()"
    body = {"prompt": [3], "settings": {"max_tokens": 1}, "code": code}
    with httpx.Client(headers={"Authorization": f"Bearer {BOB}"}, timeout=60) as http:
        with http.stream("POST", server.url + TRACES, json=body) as unread:
            assert unread.status_code == 200
            plain = {"prompt": [3], "settings": {"max_tokens": 1}, "background": True}
            started = [ask("POST", TRACES, BOB, json=plain) for _ in range(40)]
    assert [reply.status_code for reply in started] == [202] * 39 + [429]
    for reply in started[:39]:
        path = f"{TRACES}/{reply.json()['id']}"
        assert ask("DELETE", path, BOB).status_code == 200
    deadline = time.monotonic() + 20  # the connection that was left has been seen to be closed
    while (last := ask("POST", TRACES, BOB, json=plain)).status_code == 429:
        assert time.monotonic() < deadline
    assert ask("DELETE", f"{TRACES}/{last.json()['id']}", BOB).status_code == 200


def test_two_clients_at_once(server: Server, ask: Ask) -> None:
    """Each gets what its own block saved (case 99, E24)."""
    found: dict[int, Any] = {}

    def one(number: int, key: str) -> None:
        body = {"prompt": [3, 4, 5 + number], "settings": {"max_tokens": 8, "temperature": 0.0}}
        code = f"number = [{number}].save()\nfor step in tracer.all():\n    x = model.logits.save()"
        reply = json_call(server.url, "POST", TRACES, key, json={**body, "code": code})
        found[number] = reply.json()["results"][0]["outputs"][0]

    threads = [threading.Thread(target=one, args=(i, (ALICE, BOB)[i % 2])) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i]["saves"]["number"] for i in range(8)] == [[i] for i in range(8)]
    for number in range(8):
        together = array(found[number]["saves"]["x"]).argmax()
        assert together == found[number]["token_ids"][-1]
    assert len({str(found[i]["token_ids"]) for i in range(8)}) > 1


def test_aborted_while_another_runs(server: Server, ask: Ask) -> None:
    """Two streams at once: one is left, the other is whole."""

    async def both() -> int:
        headers = {"Authorization": f"Bearer {ALICE}"}
        body = {"prompt": [3, 4], "settings": {"max_tokens": 60, "ignore_eos": True}, "code": LOOP}
        async with httpx.AsyncClient(headers=headers, timeout=60) as http:
            path = server.url + TRACES
            left = asyncio.ensure_future(http.post(path, json={**body, "stream": True}))
            stays = asyncio.ensure_future(http.post(path, json=body))
            await asyncio.sleep(0.3)
            left.cancel()
            return len((await stays).json()["results"][0]["outputs"][0]["token_ids"])

    assert asyncio.run(both()) == 60
    assert blocks_end(ask)
