"""`serve=`: the client of the server, with blocks, edits and generations."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from itertools import chain
from typing import Any

import httpx
import pytest
import torch

from midstream import VLLM
from midstream.errors import (
    CaptureError,
    DataVersionError,
    InterventionError,
    PromptError,
    ServerError,
    UnsupportedError,
)
from midstream.modeling.vllm.data import Request
from midstream.modeling.vllm.remote import client, wire
from tests.serve.conftest import ALICE, BOB, ROOT
from tests.serve.process import Server, environment, json_call

GREEDY: dict[str, Any] = {"temperature": 0.0}
IDS = [3, 4, 5]

Ask = Callable[..., httpx.Response]


@pytest.fixture
def bob(server: Server) -> Any:
    """The model as another client has it."""
    made = VLLM("tiny", serve=server.url, api_key=BOB)
    yield made
    made.close()


@pytest.fixture
def root(server: Server) -> Any:
    """The model as the administrator has it; its edits are gone afterwards."""
    made = VLLM("tiny", serve=server.url, api_key=ROOT)
    yield made
    made.close()
    assert json_call(server.url, "DELETE", "/v1/midstream/edits", ROOT).is_success


def tokens(model: Any, **settings: Any) -> list[int]:
    """What the model generates for the prompt."""
    (output,) = model.generate(IDS, max_tokens=3, **GREEDY, **settings)
    return list(output.outputs[0].token_ids)


def steer(model: Any, **how: Any) -> Any:
    """An edit that zeroes a layer in every step, and saves a number."""
    with model.edit(**how) as (tracer, edit):
        found = [41].save()
        for _ in tracer.all():
            for part in model.model.layers[1].output:
                part[:] = 0
    return edit


def test_names_are_bound_as_locally(model: Any, ask: Ask) -> None:
    """Values come back under their names, prints and the text with them (E19)."""
    layer = model.model.layers[2]
    with model.trace(IDS, max_tokens=3, **GREEDY) as tracer:
        stream = layer.output[0].save()
        logits = model.logits.save()
        ids = [].save()
        for _ in tracer.iter[:2]:
            ids.append(model.samples.item())
    assert stream.shape == (3, 128)
    assert isinstance(logits, torch.Tensor)
    assert logits.requires_grad is False
    output = tracer.result.outputs[0]
    assert ids == output.token_ids[:2]
    assert int(logits.argmax()) == output.token_ids[0]
    assert output.text.split() == [f"t{i}" for i in output.token_ids]
    assert output.finish_reason == "length"


def test_invokes_merge_as_locally(model: Any, ask: Ask) -> None:
    """A name of several invokes is a list in order; a container above is filled (E21, O16)."""
    with model.trace(max_tokens=1, **GREEDY) as tracer:
        seen = [].save()
        for prompt in (IDS, [9, 8], [7]):
            with tracer.invoke(prompt):
                drawn = model.logits.argmax().item().save()
                seen.append(drawn)
    assert drawn == [output.outputs[0].token_ids[0] for output in tracer.result]
    assert seen == drawn
    assert len(set(drawn)) > 1


def test_several_sequences(model: Any, ask: Ask) -> None:
    """With `n` above 1 every sequence's values come home (E21, C55)."""
    with model.trace(IDS, n=3, max_tokens=1, temperature=1.0, seed=3) as tracer:
        drawn = model.samples.item().save()
    assert drawn == [each.token_ids[0] for each in tracer.result.outputs]


def test_prompts_of_all_kinds(model: Any, ask: Ask) -> None:
    """Text and chat messages are the server's to encode (O14)."""
    chat = [{"role": "user", "content": "t3 t4 t5"}]
    for prompt in ("t3 t4 t5", chat):
        with model.trace(prompt, max_tokens=1, **GREEDY) as tracer:
            rows = model.model.layers[0].output[0].shape[0].save()
        assert rows == 3
        assert tracer.result.prompt_token_ids == IDS


def test_a_block_that_fails(model: Any, ask: Ask) -> None:
    """Type, line, cause and what was saved come home; the server goes on (E20, O10)."""
    with pytest.raises(InterventionError, match="ZeroDivisionError") as raised:
        with model.trace(IDS, max_tokens=3):
            kept = [1].save()
            1 / 0  # here
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    assert f'File "{__file__}", line ' in str(raised.value)
    assert kept == [1]
    assert len(tokens(model)) == 3


def test_prints_and_warnings_come_home(model: Any, ask: Ask, capsys: Any) -> None:
    """What a block prints and warns about is printed and raised here (O11)."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with model.trace(IDS, max_tokens=1):
            import warnings as there

            print("from the server")
            there.warn("careful", RuntimeWarning, stacklevel=1)
            model.logits
    assert capsys.readouterr().out == "from the server\n"
    assert [str(each.message) for each in caught] == ["careful"]
    assert caught[0].filename == __file__


def test_a_block_that_loops_for_ever(model: Any, ask: Ask) -> None:
    """It is that request's error, with the server's limit in it (O20)."""
    with pytest.raises(InterventionError, match="block_timeout=2"):
        with model.trace(IDS, max_tokens=1):
            while True:
                pass
    assert len(tokens(model)) == 3


def test_an_edit_steers_its_owners_requests(model: Any, bob: Any, ask: Ask) -> None:
    """An edit acts on plain and traced requests of its key, and on no other's (E22)."""
    clean = tokens(model)
    edit = steer(model, name="calm")
    assert tokens(model) != clean
    assert tokens(bob) == clean
    assert tokens(model, edits=[]) == clean
    (output,) = model.generate(IDS, max_tokens=2, edits=["calm"], **GREEDY)
    assert output.saves == {"found": [41]}
    with model.trace(IDS, max_tokens=3, **GREEDY) as tracer:
        rows = sum(model.model.layers[1].output).abs().sum().item().save()
    assert rows == 0
    assert tracer.result.saves == {"found": [41]}
    edit.clear()
    edit.clear()
    assert edit.cleared
    assert tokens(model) == clean
    assert not hasattr(model.generate(IDS, max_tokens=1)[0], "saves")


def test_an_administrators_edit_acts_on_everyone(model: Any, root: Any, bob: Any, ask: Ask) -> None:
    """The one exception, and only the administrator clears it (E23)."""
    clean = tokens(bob)
    edit = steer(root)
    assert tokens(bob) == tokens(model) != clean
    refused = ask("DELETE", f"/v1/midstream/edits/{edit.id}", BOB)
    assert refused.status_code == 404
    assert tokens(bob) != clean
    edit.clear()
    assert tokens(bob) == clean


def test_an_edit_in_a_with_statement(model: Any, ask: Ask) -> None:
    """It is installed when the body ends, and listed for its owner alone."""
    with model.edit(name="look") as (_, edit):
        first = model.logits.argmax().item().save()
    assert ask("GET", "/v1/midstream/edits").json()["edits"][0]["name"] == "look"
    assert ask("GET", "/v1/midstream/edits", BOB).json() == {"edits": []}
    (output,) = model.generate(IDS, max_tokens=1, **GREEDY)
    assert output.saves["first"] == output.outputs[0].token_ids[0]
    assert ask("DELETE", f"/v1/midstream/edits/{edit.id}", BOB).status_code == 404
    edit.clear()


class Unbuildable:
    def __reduce__(self) -> Any:
        return int, ("none",)


def test_an_edit_that_cannot_be_installed(model: Any, ask: Ask) -> None:
    """The engine's reason comes back with status 400, as a `ConnectionError` (G60)."""
    refused = ask("POST", "/v1/midstream/edits", json={"code": "x = ("})
    assert refused.status_code == 400
    assert "was never closed" in refused.json()["error"]["message"]
    value = Unbuildable()
    with pytest.raises(ConnectionError, match="400 TransportError: the variable `value`"):
        with model.edit():
            value.x
    assert ask("GET", "/v1/midstream/edits").json() == {"edits": []}


@pytest.mark.parametrize(
    ("prompt", "settings", "text"),
    [
        ([3] * 600, {}, "512"),
        ([3], {"temperatur": 1.0}, "Did you mean 'temperature'"),
        ([3], {"temperature": "hot"}, r"\$\.temperature"),
        ([3], {"max_tokens": 1, "max_new_tokens": 1}, "two names of one setting"),
        ([3], {"edits": ["none"]}, "no edit is called 'none'"),
        ([3], {"lora_request": "none"}, "No adapter is called 'none'"),
        ([3], {"extra_args": {"midstream": 1}}, "set by midstream alone"),
        ([3, 1 << 40], {}, "vocab"),
        ([-5], {}, "vocab"),
    ],
)
def test_what_the_server_refuses(
    model: Any, ask: Ask, prompt: list[int], settings: dict[str, Any], text: str
) -> None:
    """A wrong request is a `ServerError` with the server's text and status 400."""
    with pytest.raises(ServerError, match=text) as refused:
        with model.trace(prompt, **settings):
            logits = model.logits.save()
    assert refused.value.status == 400


def test_what_the_client_refuses(model: Any, server: Server) -> None:
    """What can be seen to be wrong is not sent (O22, G55)."""
    with pytest.raises(PromptError):
        model.trace("")
    with pytest.raises(NotImplementedError, match="serve="):
        model.trace(IDS, remote=True)
    with pytest.raises(NotImplementedError, match="one trace go to one server"):
        with model.trace() as tracer:
            tracer.invoke(IDS, serve=server.url)
    with pytest.raises(TypeError, match="name is text"):
        model.edit(name=3)
    with pytest.raises(UnsupportedError, match="no engine of its own"):
        model.put("x", torch.ones(2))
    for how in ({"dispatch": True}, {"dtype": "float32"}, {"rename": {"model": "m"}}):
        with pytest.raises(UnsupportedError, match="nothing to act on"):
            VLLM("tiny", serve=server.url, api_key=ALICE, **how)
    with pytest.raises(ValueError, match="http://"):
        VLLM("tiny", serve="localhost:8000")
    with pytest.raises(CaptureError, match="collect"):
        model.trace(IDS, run=False).collect()


def test_a_wrong_key(server: Server) -> None:
    """It is refused before anything is looked at (E18, G59)."""
    with pytest.raises(ConnectionError, match="401 AuthenticationError"):
        VLLM("tiny", serve=server.url, api_key="wrong")
    with pytest.raises(ConnectionError, match="401"):
        VLLM("tiny", serve=server.url)


def test_a_server_that_is_not_there() -> None:
    """It is a `ConnectionError` that names the address (G58, G61)."""
    with pytest.raises(ConnectionError, match=r"http://127\.0\.0\.1:9 cannot be reached"):
        VLLM("tiny", serve="http://127.0.0.1:9")


def test_another_version(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Client and server of different versions refuse each other, naming both (O23)."""
    here = wire.Versions()
    there = wire.Versions(midstream="0.0.1", python="3.9")
    monkeypatch.setattr(client, "Versions", lambda: there)
    with pytest.raises(DataVersionError) as refused:
        client.Server(server.url, ALICE).run([Request({"prompt": "t3"}, {})])
    assert f"midstream {here.midstream} on Python {here.python}" in str(refused.value)
    assert "midstream 0.0.1 on Python 3.9" in str(refused.value)


def test_a_server_of_another_version(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused before its tree is looked at, which may be written otherwise there (O23)."""
    monkeypatch.setattr(client, "About", int)  # a form that this client does not know
    with pytest.raises(ServerError, match="is no midstream server"):
        VLLM("tiny", serve=server.url, api_key=ALICE)
    there = wire.Versions(midstream="0.0.1", python="3.9")
    monkeypatch.setattr(client, "Versions", lambda: there)
    with pytest.raises(DataVersionError, match="0.0.1 on Python 3.9") as refused:
        VLLM("tiny", serve=server.url, api_key=ALICE)
    assert f"midstream {wire.Versions().midstream} on Python" in str(refused.value)


def test_a_trace_in_the_background(model: Any, ask: Ask) -> None:
    """`blocking=False` returns at once; `collect` waits, merges and raises as usual (E27)."""
    with model.trace(IDS, max_tokens=30, blocking=False, **GREEDY) as tracer:
        drawn = [].save()
        for _ in tracer.all():
            drawn.append(model.samples.item())
    assert tracer.result is None
    assert tracer.collect() is tracer
    assert tracer.saves["drawn"] == tracer.result.outputs[0].token_ids
    with pytest.raises(CaptureError, match="once"):
        tracer.collect()
    with model.trace(IDS, max_tokens=450, ignore_eos=True, blocking=False) as other:
        for _ in other.all():
            model.logits
    assert other.collect(timeout=0.0) is None
    other.cancel()


def test_on_an_event_loop(server: Server, ask: Ask) -> None:
    """Outputs come as they grow, values on the last; many at once; edits too (O18, E2)."""

    async def all_of_it() -> None:
        model = VLLM("tiny", serve=server.url, api_key=ALICE, mode="async")
        with model.trace(IDS, max_tokens=4, **GREEDY) as tracer:
            logits = model.logits.save()
        outputs = [output async for output in tracer.backend]
        assert [output.finished for output in outputs][-1]
        assert outputs[-1].saves["logits"].shape == (1, 128)
        assert len(outputs) > 1
        assert outputs[0].saves == {}

        with model.trace(IDS, max_tokens=5, stream_saves=True, **GREEDY) as tracer:
            drawn = [].save()
            for _ in tracer.all():
                drawn.append(model.samples.item())
        new = [output.new_saves.get("drawn", []) async for output in tracer.backend]
        assert [*chain(*new)] == tracer.saves["drawn"] == tracer.result.outputs[0].token_ids
        assert sum(map(bool, new)) > 1

        async def one(number: int) -> Any:
            with model.trace(IDS, max_tokens=2, **GREEDY) as tracer:
                mine = [number].save()
                model.logits
            return (await tracer.backend).saves["mine"]

        assert await asyncio.gather(*map(one, range(8))) == [[i] for i in range(8)]
        async with model.edit(name="calm") as (_, edit):
            seen = [5].save()
        (output,) = await model.generate(IDS, max_tokens=1)
        assert output.saves == {"seen": [5]}
        await edit.aclear()
        with model.trace(IDS, max_tokens=1) as tracer:
            1 / 0
        with pytest.raises(InterventionError, match="ZeroDivisionError"):
            await tracer.backend
        await model.aclose()

    asyncio.run(all_of_it())


def test_leaving_an_asynchronous_trace(server: Server, ask: Ask) -> None:
    """Cancelling the task, and leaving the loop, end the request on the server (E7)."""

    async def leave() -> None:
        model = VLLM("tiny", serve=server.url, api_key=ALICE, mode="async")
        for _ in range(2):
            with model.trace(IDS, max_tokens=450, ignore_eos=True) as tracer:
                for _ in tracer.all():
                    model.model.layers[0].output
            async for _ in tracer.backend:
                break
            await tracer.backend.aclose()
        await model.aclose()

    asyncio.run(leave())
    deadline = time.monotonic() + 30
    while ask("GET", "/midstream/state", ROOT).json()["traces"]:
        assert time.monotonic() < deadline
        time.sleep(0.1)


WITHOUT = """
import builtins, sys

real = builtins.__import__

def refuse(name, *more, **others):
    if name.partition(".")[0] in ("vllm", "triton"):
        raise ModuleNotFoundError(name)
    return real(name, *more, **others)

builtins.__import__ = refuse

from midstream import VLLM

model = VLLM("tiny", serve=sys.argv[1], api_key=sys.argv[2])
with model.trace([3, 4, 5], max_tokens=2, temperature=0.0, logprobs=1) as tracer:
    logits = model.logits.save()
print(type(model.model.layers[1].mlp._module).__name__, len(model.model.layers))
print(tuple(logits.shape), len(tracer.result.outputs[0].logprobs))
print(sorted(name for name in sys.modules if name.partition(".")[0] == "vllm"))
"""


def test_a_client_without_vllm(server: Server, tmp_path: Any) -> None:
    """The tree is the server's; nothing of vLLM is imported (E19)."""
    script = tmp_path / "client.py"
    script.write_text(WITHOUT)
    ran = subprocess.run(
        [sys.executable, str(script), server.url, ALICE],
        capture_output=True, text=True, timeout=120, env=environment({}), check=False,
    )  # fmt: skip
    assert ran.stdout.splitlines() == ["LlamaMLP 4", "(1, 128) 2", "[]"], ran.stderr


def test_the_local_tree_with_a_server(server: Server, ask: Ask) -> None:
    """An undispatched model with vLLM's own tree names a server per call, and builds no engine."""
    from tests.support.checkpoints import checkpoint

    model = VLLM(str(checkpoint("T-LLAMA", with_tokenizer=True)), dtype="float32")
    with model.trace("t3 t4 t5", serve=server.url, api_key=ALICE, max_tokens=1, **GREEDY):
        stream = model.model.layers[1].output[0].save()
    assert stream.shape == (3, 128)
    (output,) = model.generate(IDS, serve=server.url, api_key=ALICE, max_tokens=1)
    assert len(output.outputs[0].token_ids) == 1
    edit = model.edit(serve=server.url, api_key=ALICE, name="x", block=lambda model, tracer: None)
    assert edit.id is not None
    edit.clear()
    assert not model.dispatched
    with pytest.raises(TypeError, match="serve='http"):
        model.trace(IDS, api_key=ALICE)
