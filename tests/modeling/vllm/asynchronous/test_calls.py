"""What waits for an asynchronous engine beside traces: plain generation, edits, stored objects."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from midstream import VLLM
from midstream.errors import (
    InterventionError,
    MidstreamWarning,
    PromptError,
    TransportError,
    UnsupportedError,
)
from tests.modeling.vllm.asynchronous.conftest import Run, idle
from tests.support.checkpoints import A, B, C, checkpoint
from tests.support.oracle import Oracle, assert_close, zero_mlp

GREEDY = {"temperature": 0.0, "ignore_eos": True}


def test_plain_generation_beside_traces(model: Any, run: Run, hf: Oracle) -> None:
    """`await model.generate(...)` runs its prompts together, beside traces, untouched by them.

    (C75, E10).
    """

    async def main() -> None:
        with model.trace(A, max_tokens=6, **GREEDY) as tracer:
            model.model.layers[0].mlp.output[:] = 0
            logits = model.logits.save()
        plain = await model.generate([A, B, C], max_tokens=6, **GREEDY)
        output = await tracer.backend
        assert [out.outputs[0].token_ids for out in plain] == [
            hf.generate(prompt, 6).tokens for prompt in (A, B, C)
        ]
        assert not any(hasattr(out, "saves") for out in plain)
        changed = hf.generate(A, 6, changes=[zero_mlp(0)], when="prefill").tokens
        assert output.outputs[0].token_ids == changed
        assert changed != plain[0].outputs[0].token_ids

    run(main())


def test_foreign_requests(model: Any, run: Run, hf: Oracle) -> None:
    """Requests that are given to vLLM's engine itself run beside traces (E10, A5)."""
    from vllm import SamplingParams

    async def foreign() -> list[int]:
        params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
        outputs = model.vllm_entrypoint.generate({"prompt_token_ids": B}, params, "foreign")
        last = [output async for output in outputs][-1]
        return list(last.outputs[0].token_ids)

    async def main() -> None:
        with model.trace(A, max_tokens=5, **GREEDY) as tracer:
            logits = model.logits.save()
        tokens, output = await asyncio.gather(foreign(), waited(tracer))
        assert tokens == hf.generate(B, 5).tokens
        assert output.outputs[0].token_ids == hf.generate(A, 5).tokens

    run(main())


async def waited(tracer: Any) -> Any:
    """What a trace ends with."""
    return await tracer.backend


def test_generate_as_a_with_statement(model: Any, run: Run, hf: Oracle) -> None:
    """`with model.generate(...)` and `async with` are traces; arguments are checked at the call."""

    async def main() -> None:
        with model.generate(A, max_tokens=1, **GREEDY) as tracer:
            logits = model.logits.save()
        output = await tracer.backend
        assert_close(output.saves["logits"], hf.reads(A)["logits"], hf.reads(B)["logits"])
        async with model.generate(A, max_tokens=1, **GREEDY):
            bound = model.logits.save()
        assert torch.equal(bound, output.saves["logits"])
        with pytest.raises(PromptError):
            model.generate()
        with pytest.raises(TypeError, match="max_tokens"):
            model.generate(A, max_token=1)
        with pytest.raises(UnsupportedError, match="stream_saves"):
            model.generate(A, stream_saves=True)

    run(main())


def test_edits(model: Any, run: Run, hf: Oracle) -> None:
    """An edit is installed by `async with`, runs for all, and is cleared by `aclear`.

    (C85, C86, E2).
    """

    async def main() -> None:
        async with model.edit(name="zero") as (tracer, edit):
            model.model.layers[0].mlp.output[:] = 0
            width = model.model.layers[1].output[0].shape[1].save()
        assert model.edits == (edit,)
        assert (edit.name, edit.cleared) == ("zero", False)
        changed = hf.generate(A, 4, changes=[zero_mlp(0)], when="prefill").tokens
        (plain,) = await model.generate(A, max_tokens=4, **GREEDY)
        assert plain.outputs[0].token_ids == changed
        assert (plain.saves, plain.edit_error) == ({"width": 128}, None)
        with model.trace(A, max_tokens=4, **GREEDY) as tracer:
            mine = model.logits.save()
        output = await tracer.backend
        assert sorted(output.saves) == ["mine", "width"]
        (without,) = await model.generate(A, max_tokens=4, edits=[], **GREEDY)
        assert without.outputs[0].token_ids == hf.generate(A, 4).tokens != changed
        await edit.aclear()
        await edit.aclear()
        assert edit.cleared
        assert await model.vllm_entrypoint.collective_rpc("midstream_edits") == [0]
        (after,) = await model.generate(A, max_tokens=4, **GREEDY)
        assert not hasattr(after, "saves")

    run(main())


def test_an_edit_is_kept_by_requests_that_run(model: Any, run: Run) -> None:
    """Clearing waits for nobody, and a request that was sent before keeps the edit (C85, C90)."""

    def steps(model: Any, tracer: Any) -> dict[str, Any]:
        return {"steps": sum(1 for _ in tracer.all() if model.logits is not None)}

    async def main() -> None:
        edit = await model.edit(block=steps)
        running = asyncio.create_task(model.generate([A] * 10, max_tokens=20, **GREEDY))
        while not model.vllm_entrypoint.output_processor.request_states:
            await asyncio.sleep(0)
        await model.aclear_edits()
        assert edit.cleared
        assert not running.done()
        (new,) = await model.generate(B, max_tokens=2, **GREEDY)
        assert not hasattr(new, "saves")
        for output in await running:
            assert (output.saves, output.edit_error) == ({"steps": 20}, None)
        await idle(model)
        assert await model.vllm_entrypoint.collective_rpc("midstream_edits") == [0]

    run(main())


def test_an_edit_that_fails(model: Any, run: Run, hf: Oracle) -> None:
    """A failed edit warns beside plain requests and is raised by a trace; others go on (C87)."""

    async def main() -> None:
        async with model.edit(name="bad") as (_, edit):
            raise LookupError("edit")
        with pytest.warns(MidstreamWarning, match="An installed edit failed in 1 of 1"):
            (plain,) = await model.generate(A, max_tokens=2, **GREEDY)
        assert plain.outputs[0].token_ids == hf.generate(A, 2).tokens
        assert isinstance(plain.edit_error.__cause__, LookupError)
        with pytest.raises(InterventionError, match="LookupError"):
            async with model.trace(A, max_tokens=1, **GREEDY):
                logits = model.logits.save()
        await edit.aclear()

    run(main())


def test_an_edit_that_cannot_be_installed(model: Any, run: Run) -> None:
    """What cannot travel is refused at the end of the `async with`, and nothing is installed."""

    async def main() -> None:
        lock = asyncio.Lock()
        unsent = (frame for frame in ())
        with pytest.raises(TransportError):
            async with model.edit() as (_, edit):
                held = unsent
        assert not model.edits
        assert edit.id is None

    run(main())


def test_a_cancelled_installation(model: Any, run: Run) -> None:
    """An edit whose installation is cancelled is not left in the engine, at whatever moment."""

    def nothing(model: Any, tracer: Any) -> None:
        """Save nothing."""

    async def main() -> None:
        async with model.trace(A, max_tokens=1, **GREEDY):
            logits = model.logits.save()
        cancelled = 0
        for wait in range(12):
            task = asyncio.create_task(model.edit(block=nothing))
            for _ in range(wait):
                await asyncio.sleep(0)
            if task.cancel():
                cancelled += 1
                with pytest.raises(asyncio.CancelledError):
                    await task
            else:
                await task.result().aclear()
        assert cancelled > 3
        await asyncio.sleep(0.2)
        assert not model.edits
        assert await model.vllm_entrypoint.collective_rpc("midstream_edits") == [0]

    run(main())


def test_stored_objects(model: Any, run: Run) -> None:
    """`aput` keeps an object in the engine for blocks, `aremove` takes it out."""

    async def main() -> None:
        handle = await model.aput("vector", torch.arange(4.0))
        with model.trace(A, max_tokens=1, **GREEDY) as tracer:
            total = (handle.sum() + model.stored["vector"][3]).save()
        output = await tracer.backend
        assert float(output.saves["total"]) == 9.0
        await model.aput("vector", torch.ones(2))
        async with model.trace(A, max_tokens=1, **GREEDY):
            size = len(handle).save()
        assert size == 2
        await handle.aremove()
        await handle.aremove()
        assert handle.removed
        assert await model.vllm_entrypoint.collective_rpc("midstream_stored") == [[]]
        with pytest.raises(TypeError, match="takes a tensor"):
            await model.aput("number", 3)

    run(main())


def test_statistics(model: Any, run: Run) -> None:
    """`astats` tells of steps and of blocks that are held, while requests run (E11)."""

    async def main() -> None:
        before = await model.astats()
        with model.trace(A, max_tokens=30, **GREEDY) as tracer:
            for _ in tracer.all():
                logits = model.model.layers[0].output[0].sum().save()
        while (await model.astats()).live_blocks != 1:
            await asyncio.sleep(0.01)
        await tracer.backend
        after = await model.astats()
        assert after.live_blocks == 0
        assert after.steps["eager"] == before.steps["eager"] + 30

    run(main())


SYNCHRONOUS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "stats": (lambda model: model.stats(), "await model.astats()"),
    "put": (lambda model: model.put("a", torch.ones(1)), "await model.aput(...)"),
    "close": (lambda model: model.close(), "await model.aclose()"),
    "clear_edits": (lambda model: model.clear_edits(), "await model.aclear_edits()"),
    "clear": (lambda model: model.edit().clear(), "await edit.aclear()"),
    "edit": (lambda model: model.edit().__enter__(), "async with model.edit(...)"),
    "session": (lambda model: model.session(), "async with model.trace(...)"),
}


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_calls_that_would_wait(model: Any, run: Run, name: str) -> None:
    """Calls that would keep the loop waiting are refused, naming what to write (C86, G56)."""
    call, instead = SYNCHRONOUS[name]

    async def main() -> None:
        with pytest.raises(NotImplementedError) as caught:
            call(model)
        assert isinstance(caught.value, UnsupportedError)
        assert instead in str(caught.value)

    run(main())


ASYNCHRONOUS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "astats": (lambda model: model.astats(), "model.stats()"),
    "aput": (lambda model: model.aput("a", torch.ones(1)), "model.put(...)"),
    "aclose": (lambda model: model.aclose(), "model.close()"),
    "aclear_edits": (lambda model: model.aclear_edits(), "model.clear_edits()"),
    "aclear": (lambda model: model.edit().aclear(), "edit.clear()"),
}


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_awaitable_forms_of_a_synchronous_model(llama: Any, name: str) -> None:
    """A model that serves no loop refuses the awaitable forms, naming its own."""
    call, instead = ASYNCHRONOUS[name]

    async def main() -> None:
        await call(llama)

    with pytest.raises(UnsupportedError) as caught:
        asyncio.run(main())
    assert f"Write `{instead}`" in str(caught.value)


@contextmanager
def refused(match: str) -> Iterator[None]:
    """Expect a refusal."""
    with pytest.raises(UnsupportedError, match=match):
        yield


def test_a_loop_after_the_engines(model: Any, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the engine's loop has ended, the error says so (A23)."""

    async def main() -> None:
        ended = asyncio.new_event_loop()
        ended.close()
        async with model.trace(A, max_tokens=1, **GREEDY):
            logits = model.logits.save()
        with monkeypatch.context() as patch:
            patch.setattr(model._async_engine, "_loop", ended)
            with refused("comes after it"):
                await model.generate(A)

    run(main())


def test_another_event_loop(model: Any, run: Run, hf: Oracle) -> None:
    """On another loop, or on none, everything raises at once instead of hanging (O18, A23)."""

    async def main() -> Any:
        with model.trace(A, max_tokens=2, **GREEDY) as tracer:
            logits = model.logits.save()
        return tracer

    tracer = run(main())

    async def elsewhere() -> None:
        with refused("belongs to the event loop"):
            with model.trace(A, max_tokens=1, **GREEDY):
                logits = model.logits.save()
        with refused("belongs to the event loop"):
            await tracer.backend
        with refused("belongs to the event loop"):
            async for _ in tracer.backend:
                pass
        for call in (model.generate(A), model.astats(), model.aclose(), tracer.backend.aclose()):
            with refused("belongs to the event loop"):
                await call

    asyncio.run(asyncio.wait_for(elsewhere(), 20))
    with refused("asyncio.run"):
        with model.trace(A, max_tokens=1, **GREEDY):
            logits = model.logits.save()
    output = run(waited(tracer))  # which has lost nothing by it
    assert output.outputs[0].token_ids == hf.generate(A, 2).tokens


def test_calls_of_the_workers(model: Any, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """200 traces are one call of the workers at most, and leave nothing there (case 40)."""
    called: list[str] = []

    async def one(index: int) -> Any:
        with model.trace([5 + index % 90, 3], max_tokens=1, **GREEDY) as tracer:
            logits = model.logits.save()
        return await tracer.backend

    async def main() -> None:
        await one(0)
        call = model.vllm_entrypoint.collective_rpc

        async def noting(method: str, *more: Any, **keywords: Any) -> Any:
            called.append(method)
            return await call(method, *more, **keywords)

        monkeypatch.setattr(model.vllm_entrypoint, "collective_rpc", noting)
        outputs = await asyncio.gather(*map(one, range(200)))
        with model.trace(max_tokens=1, **GREEDY) as tracer:
            for index in range(8):
                with tracer.invoke([5 + index, 3]):
                    logits = model.logits.save()
        await tracer.backend
        assert called == ["midstream_bring"]  # what the eight have in common
        assert len({float(output.saves["logits"].sum()) for output in outputs}) == 90
        monkeypatch.undo()

    run(main())


def test_steering_is_the_same_everywhere(model: Any, run: Run, hf: Oracle, llama: Any) -> None:
    """A vector steers plain requests, traces and synchronous traces alike (case 39)."""
    vector = torch.linspace(-2, 2, 128)
    with llama.trace(A, max_tokens=4, **GREEDY) as tracer:
        for _ in tracer.all():
            llama.model.layers[1].output[0][:] += vector
    right = tracer.result.outputs[0].token_ids

    async def main() -> None:
        async with model.edit(name="steer") as (tracer, edit):
            for _ in tracer.all():
                model.model.layers[1].output[0][:] += vector
        (plain,) = await model.generate(A, max_tokens=4, **GREEDY)
        async with model.trace(A, max_tokens=4, **GREEDY) as tracer:
            logits = model.logits.save()
        await edit.aclear()
        with model.trace(A, max_tokens=4, **GREEDY) as own:
            for _ in own.all():
                model.model.layers[1].output[0][:] += vector
        found = [plain, tracer.result, await own.backend]
        assert [out.outputs[0].token_ids for out in found] == [right] * 3
        assert right != hf.generate(A, 4).tokens

    run(main())


def test_another_place_to_run(model: Any, run: Run) -> None:
    """`remote=` is refused on an event loop as well (O22, E12)."""

    async def main() -> None:
        with pytest.raises(UnsupportedError, match="serve="):
            model.trace(A, remote=True)

    run(main())


def test_arguments_of_the_asynchronous_engine_alone() -> None:
    """They are known with `mode="async"`, which is fixed at construction, and not without (A3)."""
    path = str(checkpoint("T-LLAMA", with_tokenizer=True))
    model = VLLM(path, mode="async", enable_log_requests=False)
    assert (model.mode, model.dispatched, model.vllm_entrypoint) == ("async", False, None)
    with pytest.raises(TypeError, match="enable_log_requests"):
        VLLM(path, enable_log_requests=False)
