"""Flags of vLLM's own on a server of ours: TLS, adapters by name, tools. At last it is killed."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from midstream import VLLM
from midstream.errors import ServerError
from tests.serve.process import Server, ended, json_call

peft = pytest.importorskip("peft")
openai = pytest.importorskip("openai")

KEY = "key"
TRACES = "/v1/midstream/traces"
PROMPT = "The capital of France is"
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 1}
FLAGS = (
    *("--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "4"),
    *("--kv-cache-memory-bytes", str(1 << 28), "--served-model-name", "demo"),
    *("--enable-lora", "--max-lora-rank", "8"),
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
)
_ARGUMENTS = {
    "type": "object",
    "properties": {"n": {"enum": [1, 2]}},
    "required": ["n"],
    "additionalProperties": False,
}
TOOL: dict[str, Any] = {"name": "go", "strict": True, "parameters": _ARGUMENTS}
CHAT: list[Any] = [{"role": "user", "content": "Go."}]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A certificate for this machine that nobody has signed, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    folder = tmp_path_factory.mktemp("tls")
    made = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-days", "2", "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=IP:127.0.0.1"),
            *("-out", str(made[0]), "-keyout", str(made[1])),
        ],
        check=True,
        capture_output=True,
    )
    return str(made[0]), str(made[1])


@pytest.fixture(scope="module")
def adapted(demo_path: Path) -> Any:
    """HuggingFace's demo model with an adapter that changes what it says."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(demo_path, dtype=torch.float32)
    how = {"r": 8, "lora_alpha": 8, "target_modules": ["q_proj", "o_proj"]}
    return peft.get_peft_model(model, peft.LoraConfig(**how, init_lora_weights=False)).eval()


@pytest.fixture(scope="module")
def server(
    demo_path: Path, adapted: Any, certificate: tuple[str, str], tmp_path_factory: Any
) -> Iterator[Server]:
    """A server of the demo model with TLS, an adapter and tools."""
    folder = str(tmp_path_factory.mktemp("adapter"))
    adapted.save_pretrained(folder)
    made = Server(
        *("--ssl-certfile", certificate[0], "--ssl-keyfile", certificate[1]),
        *("--lora-modules", f"loud={folder}", "--api-key", KEY),
        model=str(demo_path),
        flags=FLAGS,
        VLLM_LOGGING_LEVEL="WARNING",
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", certificate[0])
        try:
            yield made.wait()
        finally:
            made.end()


@pytest.fixture
def model(server: Server) -> Iterator[Any]:
    """The model as a client has it."""
    made = VLLM("demo", serve=server.url, api_key=KEY)
    yield made
    made.close()


def test_a_certificate_of_ones_own(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """`SSL_CERT_FILE` names it to a client; without that the client refuses, and says so (E14)."""
    monkeypatch.delenv("SSL_CERT_FILE")
    with pytest.raises(ServerError, match="SSL_CERT_FILE"):
        VLLM("demo", serve=server.url, api_key=KEY)
    with pytest.raises(ServerError):
        VLLM("demo", serve=server.url.replace("https", "http"), api_key=KEY)


def test_an_adapter_by_its_name(server: Server, model: Any, adapted: Any) -> None:
    """A trace with it reads what HuggingFace computes with it, plain routes use it too (E14)."""
    settings = {**GREEDY, "lora_request": "loud"}
    with model.trace(PROMPT, **settings) as tracer:
        stream = sum(model.model.layers[11].output).save()
        logits = model.logits.save()
    ids = torch.tensor([tracer.result.prompt_token_ids])
    with torch.no_grad():
        right = adapted(ids, output_hidden_states=True)
        with adapted.disable_adapter():
            plain = adapted(ids, output_hidden_states=True)
    assert (right.logits[0, -1] - plain.logits[0, -1]).abs().max() > 1e-1
    torch.testing.assert_close(logits[0], right.logits[0, -1], atol=1e-2, rtol=0)
    torch.testing.assert_close(stream, right.hidden_states[12][0], atol=1e-2, rtol=1e-3)
    with model.trace(PROMPT, **GREEDY):
        without = model.logits.save()
    torch.testing.assert_close(without[0], plain.logits[0, -1], atol=1e-2, rtol=0)
    body = {"model": "loud", "prompt": PROMPT, **GREEDY}
    reply = json_call(server.url, "POST", "/v1/completions", KEY, json=body)
    assert reply.json()["choices"][0]["text"] == tracer.result.outputs[0].text


def test_tools(server: Server, model: Any) -> None:
    """A stock client's tool is called, also beside an edit, whose values are in the reply (E14)."""
    with model.edit(name="look") as (_, edit):
        norm = float(model.model.layers[3].output[0].norm()).save()
    # a client of httpx's own takes the certificate from the environment
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key=KEY, http_client=httpx.Client()
    ) as stock:
        found = stock.chat.completions.create(
            model="demo",
            messages=CHAT,
            tools=[{"type": "function", "function": TOOL}],
            tool_choice={"type": "function", "function": {"name": "go"}},
            temperature=0.0,
            max_tokens=80,
            extra_body={"midstream": {"edits": ["look"]}},
        )
    (call,) = found.choices[0].message.tool_calls
    assert call.function.name == "go"
    assert json.loads(call.function.arguments)["n"] in (1, 2)
    assert found.model_extra["midstream"]["saves"]["norm"] > 0
    edit.clear()


def test_killed(server: Server) -> None:
    """Ten seconds after SIGKILL of the server no engine is left (E28)."""
    below = server.below()
    assert below
    body = {"prompt": "t3", "settings": {"max_tokens": 450}, "background": True, "code": "pass"}
    assert json_call(server.url, "POST", TRACES, KEY, json=body).status_code == 202
    server.process.kill()
    assert ended(below, 10)
