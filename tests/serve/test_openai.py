"""Stock clients: the openai package, and vLLM's own routes under its own flags."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from midstream.errors import MidstreamError
from tests.serve.conftest import ALICE, BOB, ROOT
from tests.serve.process import Server

openai = pytest.importorskip("openai")

GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0.0, "max_tokens": 4}
CHAT: list[Any] = [{"role": "user", "content": "t3 t4 t5"}]
CALM = """
for step in tracer.all():
    for part in model.model.layers[1].output:
        part[:] = -part
    norm = float(model.logits.norm()).save()
"""

Ask = Callable[..., httpx.Response]


@pytest.fixture
def stock(server: Server) -> Iterator[Any]:
    """OpenAI's client with Alice's key."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=ALICE, max_retries=0) as made:
        yield made


@pytest.fixture
def calm(ask: Ask) -> int:
    """The number of an edit of Alice's that steers every step."""
    reply = ask("POST", "/v1/midstream/edits", json={"name": "calm", "code": CALM})
    assert reply.status_code == 200, reply.text
    number: int = reply.json()["id"]
    return number


def named(*names: str) -> dict[str, Any]:
    """The part of a request that chooses edits."""
    return {"midstream": {"edits": list(names)}}


def test_chat_and_completions(stock: Any, ask: Ask) -> None:
    """Without edits they are vLLM's; the same prompt gives the same text."""
    chat = stock.chat.completions.create(messages=CHAT, **GREEDY)
    whole = stock.completions.create(prompt="t3 t4 t5", **GREEDY)
    assert chat.choices[0].message.content.strip() == whole.choices[0].text.strip()
    assert chat.usage.completion_tokens == 4
    assert "midstream" not in (chat.model_extra or {})
    assert [each.id for each in stock.models.list()] == ["tiny"]


def test_steering_by_a_named_edit(stock: Any, model: Any, calm: int) -> None:
    """Chat, completion and the client's generate are steered alike, and unlike the clean one.

    (Case 39).
    """
    clean = stock.chat.completions.create(messages=CHAT, extra_body=named(), **GREEDY)
    chat = stock.chat.completions.create(messages=CHAT, extra_body=named("calm"), **GREEDY)
    whole = stock.completions.create(prompt=[3, 4, 5], extra_body=named("calm"), **GREEDY)
    (own,) = model.generate([3, 4, 5], max_tokens=4, temperature=0.0, edits=["calm"])
    found = [chat.choices[0].message.content, whole.choices[0].text, own.outputs[0].text]
    assert len({text.strip() for text in found}) == 1
    assert clean.choices[0].message.content.strip() != found[0].strip()
    assert chat.model_extra["midstream"]["edits"] == [calm]
    assert chat.model_extra["midstream"]["saves"]["norm"] == pytest.approx(own.saves["norm"])
    assert clean.model_extra["midstream"] == {"edits": [], "saves": {}, "errors": []}


def test_a_stream_that_is_steered(stock: Any, calm: int) -> None:
    """The values come in one chunk more, before the end."""
    whole = stock.chat.completions.create(messages=CHAT, extra_body=named("calm"), **GREEDY)
    stream = stock.chat.completions.create(
        messages=CHAT, stream=True, extra_body=named("calm"), **GREEDY
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text.strip() == whole.choices[0].message.content.strip()
    last = chunks[-1].model_extra["midstream"]
    assert last["saves"]["norm"] == pytest.approx(whole.model_extra["midstream"]["saves"]["norm"])
    assert [chunk for chunk in chunks[:-1] if "midstream" in (chunk.model_extra or {})] == []


def test_several_prompts_that_are_steered(stock: Any, model: Any, calm: int) -> None:
    """Each one's values are there, in a list in the order of the prompts (O16)."""
    prompts = [[3, 4, 5, 6], [7, 8]]
    wanted = [
        output.saves["norm"]
        for output in model.generate(prompts, max_tokens=4, temperature=0.0, edits=["calm"])
    ]
    assert abs(wanted[0] - wanted[1]) > 1e-2
    found = stock.completions.create(prompt=prompts, extra_body=named("calm"), **GREEDY)
    assert found.model_extra["midstream"]["saves"]["norm"] == pytest.approx(wanted)


def test_values_that_are_no_text(stock: Any, ask: Ask) -> None:
    """They spoil neither the reply nor the stream."""
    code = "x = [chr(0xd800), 10**5000].save()\nraise ValueError(chr(0xd800))"
    ask("POST", "/v1/midstream/edits", json={"name": "odd", "code": code})
    whole = stock.completions.create(prompt="t3", extra_body=named("odd"), **GREEDY)
    assert whole.model_extra["midstream"]["saves"]["x"][0] == {"repr": r"'\ud800'"}
    assert r"\ud800" in whole.model_extra["midstream"]["errors"][0]
    *_, last = stock.completions.create(prompt="t3", stream=True, extra_body=named("odd"), **GREEDY)
    assert last.model_extra["midstream"] == whole.model_extra["midstream"]


def test_an_edit_acts_without_being_named(stock: Any, server: Server, calm: int) -> None:
    """A stock request of its owner's runs all edits, another's none."""
    steered = stock.completions.create(prompt="t3 t4 t5", **GREEDY)
    clean = stock.completions.create(prompt="t3 t4 t5", extra_body=named(), **GREEDY)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=BOB) as bob:
        others = bob.completions.create(prompt="t3 t4 t5", **GREEDY)
        with pytest.raises(openai.BadRequestError, match="no edit is called 'calm'"):
            bob.completions.create(prompt="t3", extra_body=named("calm"), **GREEDY)
    assert steered.choices[0].text != clean.choices[0].text
    assert others.choices[0].text == clean.choices[0].text


def test_an_edit_that_fails(stock: Any, ask: Ask) -> None:
    """The request goes on without it, and the error is in the reply."""
    clean = stock.completions.create(prompt="t3 t4 t5", **GREEDY)
    ask("POST", "/v1/midstream/edits", json={"name": "bad", "code": "x = [1].save()\n1 / 0"})
    found = stock.completions.create(prompt="t3 t4 t5", extra_body=named("bad"), **GREEDY)
    assert found.choices[0].text == clean.choices[0].text
    assert "ZeroDivisionError" in found.model_extra["midstream"]["errors"][0]
    assert found.model_extra["midstream"]["saves"] == {"x": [1]}


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"vllm_xargs": {"midstream": "x"}}, "set by midstream"),
        ({"midstream": {"edits": "calm"}}, "midstream"),
        ({"midstream": {"edit": ["calm"]}}, "unknown field"),
        ({"midstream": 3}, "midstream"),
        ({"midstream": {"edits": ["none"]}}, "no edit is called 'none'"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_a_request_may_not_say(
    stock: Any, ask: Ask, body: dict[str, Any], text: str, stream: bool
) -> None:
    """What only our code may set, and what is no choice of edits, is a 400 that names it."""
    with pytest.raises(openai.BadRequestError, match=text):
        stock.completions.create(prompt="t3", extra_body=body, stream=stream, **GREEDY)


def test_our_key_in_other_letters(ask: Ask) -> None:
    """A key that JSON spells with an escape is the same key."""
    raw = '{"model":"tiny","prompt":"t3","vllm_xargs":{"midstre\\u0061m":"x"}}'
    headers = {"Content-Type": "application/json"}
    assert ask("POST", "/v1/completions", content=raw, headers=headers).status_code == 400


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_every_route_checks_the_key_of_ours(ask: Ask, path: str) -> None:
    """Whichever way a request takes to the engine, our key in it is refused."""
    body = {"model": "tiny", "messages": CHAT, "input": "t3", "max_tokens": 2}
    reply = ask("POST", path, json={**body, "vllm_xargs": {"midstream": "x"}})
    assert reply.status_code == 400
    raw = {"token_ids": [3], "sampling_params": {"extra_args": {"midstream": "x"}}}
    assert ask("POST", "/inference/v1/generate", json=raw).status_code == 400


def test_responses_carry_values_too(ask: Ask, calm: int) -> None:
    """Routes that answer with JSON have the values; a stream without a place for them refuses."""
    body = {"model": "tiny", "input": "t3 t4", "max_output_tokens": 3, **named("calm")}
    reply = ask("POST", "/v1/responses", json=body)
    assert reply.status_code == 200, reply.text
    assert reply.json()["midstream"]["edits"] == [calm]
    refused = ask("POST", "/v1/responses", json={**body, "stream": True})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "midstream"


def test_a_prompt_that_edits_cannot_see_whole(stock: Any, calm: int) -> None:
    """It is the request's error, as with a block (G50)."""
    with pytest.raises(openai.BadRequestError):
        stock.completions.create(prompt=[3] * 600, **GREEDY)


def test_the_openapi_description(ask: Ask) -> None:
    """It has our routes beside vLLM's, and what they take."""
    found = ask("GET", "/openapi.json").json()
    assert "/v1/chat/completions" in found["paths"]
    trace = found["paths"]["/v1/midstream/traces"]["post"]
    assert "application/json" in trace["requestBody"]["content"]
    assert set(found["paths"]["/v1/midstream/edits"]) == {"get", "post", "delete"}
    assert found["components"]["securitySchemes"]["key"]["scheme"] == "bearer"


def test_the_model_is_described(ask: Ask) -> None:
    """Tree, limits and versions of what is served."""
    found = ask("GET", "/v1/midstream/model").json()
    assert found["tree"][0] == "LlamaForCausalLM"
    assert found["limits"]["block_timeout"] == 2.0
    assert found["limits"]["max_traces_per_key"] == 40
    assert found["versions"]["vllm"].startswith("0.32")
    assert found["code"] is True


@pytest.mark.parametrize("path", ["/metrics", "/version", "/openapi.json", "/midstream", "/load"])
def test_the_key_covers_every_route(ask: Ask, path: str) -> None:
    """Routes that vLLM leaves open take the key as well; health alone does not (E16, E18)."""
    assert ask("GET", path, None).status_code == 401
    assert ask("OPTIONS", path, None).status_code == 401
    assert ask("GET", path, "wrong").status_code == 401
    assert ask("GET", path).status_code == 200
    assert ask("GET", "/health", None).status_code == 200


def test_a_page_that_asks_first(ask: Ask) -> None:
    """A browser asks without a key whether a page may ask; nothing but that is answered."""
    asks = {"Origin": "http://x.example", "Access-Control-Request-Method": "GET"}
    reply = ask("OPTIONS", "/metrics", None, headers=asks)
    assert "CORS origin" in reply.text
    assert "vllm" not in reply.text
    assert "vllm" in ask("GET", "/metrics").text


def test_two_media_types(ask: Ask) -> None:
    """The guard goes by the same header as the route behind it."""
    body = b'{"model": "tiny", "prompt": "t3", "max_tokens": 1, "midstream": {"edits": ["none"]}}'
    kinds = [("Content-Type", "application/json"), ("Content-Type", "text/plain")]
    headers = [("Authorization", f"Bearer {ALICE}"), *kinds]
    url = str(ask("GET", "/health").url.join("/v1/completions"))
    assert httpx.post(url, content=body, headers=headers).status_code == 400


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/invocations", "/v1/completions"])
def test_the_key_covers_what_is_posted(ask: Ask, path: str) -> None:
    """Also where vLLM generates, or encodes, without asking for one (E18)."""
    body = {"model": "tiny", "prompt": "t3", "tokens": [3], "max_tokens": 1}
    assert ask("POST", path, None, json=body).status_code == 401
    assert ask("POST", path, json=body).status_code == 200


def test_metrics_count(ask: Ask, stock: Any) -> None:
    """VLLM's metrics are there, and count."""
    stock.completions.create(prompt="t3", **GREEDY)
    assert "vllm:generation_tokens_total" in ask("GET", "/metrics", ROOT).text


def test_nothing_of_ours_is_unknown(model: Any) -> None:
    """An edit that a client names and does not have is an error of its call (E22)."""
    with pytest.raises(MidstreamError, match="no edit is called 'calm'"):
        model.generate([3], max_tokens=1, edits=["calm"])
