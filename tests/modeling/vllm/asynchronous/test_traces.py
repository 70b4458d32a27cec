"""Traces on an event loop: their outputs as they come, and what they bring home."""

from __future__ import annotations

import asyncio
import gc
from itertools import pairwise
from typing import Any

import pytest
import torch

from midstream.errors import (
    CaptureError,
    InterventionError,
    LimitExceededError,
    MidstreamWarning,
    PromptError,
    UnsupportedError,
)
from tests.modeling.vllm.asynchronous.conftest import Run
from tests.support.checkpoints import LONG, A, B, C
from tests.support.oracle import Oracle, assert_close, zero_mlp

GREEDY = {"temperature": 0.0, "ignore_eos": True}


def test_leaving_the_with_submits(model: Any, run: Run, hf: Oracle) -> None:
    """The request is on its way when the `with` ends, and its finished output has the saves.

    (O18, E1, E2, A3).
    """

    async def main() -> None:
        with model.trace(A, max_tokens=1, **GREEDY) as tracer:
            stream = sum(model.model.layers[2].output).save()
        assert type(model.vllm_entrypoint).__name__ == "AsyncLLM"
        assert "stream" not in locals()  # nothing has come yet that could be bound
        while not tracer.saves:  # without anyone who asks
            await asyncio.sleep(0.01)
        output = await tracer.backend
        reads = hf.reads(A)
        assert_close(output.saves["stream"], reads["residual.2"], reads["residual.1"])
        assert torch.equal(tracer.saves["stream"], output.saves["stream"])
        assert tracer.result is output

    run(main())


def test_names_are_bound_by_async_with_only(model: Any, run: Run, hf: Oracle) -> None:
    """`async with` waits and binds the names; a plain `with` binds none (E4)."""

    async def main() -> None:
        right = hf.reads(A)["logits"]
        with model.trace(A, max_tokens=1, **GREEDY) as tracer:
            unbound = model.logits.save()
        await tracer.backend
        assert "unbound" not in locals()
        async with model.trace(A, max_tokens=1, **GREEDY) as tracer:
            bound = model.logits.save()
        assert_close(bound, right, hf.reads(B)["logits"])
        assert await tracer.backend is None  # it has been read

    run(main())


def test_outputs_come_as_the_text_grows(model: Any, run: Run, hf: Oracle) -> None:
    """Each output continues the text before; only the finished one has saves (E1, E2)."""

    async def main() -> None:
        with model.trace(B, max_tokens=8, **GREEDY) as tracer:
            logits = model.logits.save()
        outputs = [output async for output in tracer.backend]
        texts = [output.outputs[0].text for output in outputs]
        assert len(outputs) > 2
        assert all(after.startswith(before) for before, after in pairwise(texts))
        assert len(set(texts)) == len(texts)
        assert outputs[-1].outputs[0].token_ids == hf.generate(B, 8).tokens
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        assert [list(output.saves) for output in outputs[:-1]] == [[]] * (len(outputs) - 1)
        assert_close(outputs[-1].saves["logits"], hf.reads(B)["logits"], hf.reads(A)["logits"])

    run(main())


def test_a_trace_is_read_once(model: Any, run: Run) -> None:
    """A second `await` gives None and a second loop nothing; the values stay (E3, E5, G53)."""

    async def main() -> None:
        with model.trace(B, max_tokens=2, **GREEDY) as tracer:
            logits = model.logits.save()
        output = await tracer.backend
        assert output.finished
        assert await tracer.backend is None
        assert [one async for one in tracer.backend] == []
        assert tracer.result is output
        assert list(tracer.saves) == ["logits"]

    run(main())


def test_two_traces_of_which_one_fails(model: Any, run: Run, hf: Oracle) -> None:
    """Each of two concurrent requests runs its own code on its rows; one's error is its own.

    (case 2, E6, E9, C96).
    """

    async def one(prompt: list[int], *, fails: bool) -> Any:
        with model.trace(prompt, max_tokens=2, **GREEDY) as tracer:
            stream = sum(model.model.layers[2].output).save()
            if fails:
                raise ValueError("x")
        return await tracer.backend

    async def main() -> None:
        good, bad = await asyncio.gather(
            one(A, fails=False), one(B, fails=True), return_exceptions=True
        )
        reads = hf.reads(A)
        assert good.saves["stream"].shape == (5, 128)
        assert_close(good.saves["stream"], reads["residual.2"], reads["residual.1"])
        assert good.outputs[0].token_ids == hf.generate(A, 2).tokens
        assert isinstance(bad, InterventionError)
        assert str(bad).startswith("ValueError: x")
        assert f'File "{__file__}"' in str(bad)
        assert isinstance(bad.__cause__, ValueError)

    run(main())


def test_many_traces_at_once(model: Any, run: Run, hf: Oracle) -> None:
    """Each of 24 concurrent traces, readers and editors, is as it would be alone (O18, E9)."""
    prompts = [[5 + i, *A[: 1 + i % 4]] for i in range(24)]

    async def one(index: int) -> Any:
        with model.trace(prompts[index], max_tokens=4, **GREEDY) as tracer:
            if index % 3 == 0:
                model.model.layers[0].mlp.output[:] = 0
            logits = model.logits.save()
        return await tracer.backend

    async def main() -> None:
        outputs = await asyncio.gather(*map(one, range(24)))
        for index, output in enumerate(outputs):
            changes = [zero_mlp(0)] if index % 3 == 0 else []
            right = hf.generate(prompts[index], 4, changes=changes, when="prefill")
            assert output.outputs[0].token_ids == right.tokens, index
            other = hf.generate(prompts[index], 1, changes=[] if changes else [zero_mlp(0)])
            assert_close(output.saves["logits"], right.logits[:1], other.logits)

    run(main())


def test_several_invokes(model: Any, run: Run, hf: Oracle) -> None:
    """Every invoke's finished output comes; what they fill together is merged on the last.

    (O18, O16, E8, G33).
    """

    async def main() -> None:
        with model.trace(max_tokens=3, **GREEDY) as tracer:
            rows = [].save()
            for prompt in (A, B, C):
                with tracer.invoke(prompt):
                    stream = sum(model.model.layers[1].output).save()
                    rows.append(len(stream))
        finished = [output async for output in tracer.backend if output.finished]
        by_prompt = {tuple(output.prompt_token_ids): output for output in finished}
        assert sorted(by_prompt) == sorted(map(tuple, (A, B, C)))
        for prompt in (A, B, C):
            stream = by_prompt[tuple(prompt)].saves["stream"]
            assert_close(
                stream, hf.reads(prompt, {1})["residual.1"], hf.reads(prompt)["residual.0"]
            )
        assert finished[-1].saves["rows"] == [5, 3, 9]
        assert tracer.saves["rows"] == [5, 3, 9]
        assert [len(stream) for stream in tracer.saves["stream"]] == [5, 3, 9]
        assert [out.prompt_token_ids for out in tracer.result] == [A, B, C]

    run(main())


def test_async_with_binds_several_invokes(model: Any, run: Run) -> None:
    """`async with` of a trace with invokes binds lists in their order (O16, E8)."""

    async def main() -> None:
        async with model.trace(max_tokens=1, **GREEDY) as tracer:
            for prompt in (C, A):
                with tracer.invoke(prompt):
                    width = model.model.layers[0].output[0].shape.save()
        assert [len(each) for each in width] == [2, 2]
        assert [tuple(each) for each in width] == [(9, 128), (5, 128)]

    run(main())


def test_invokes_that_fail(model: Any, run: Run) -> None:
    """All failures are raised at the end, after the outputs of those that did not (O10, E6)."""

    async def main() -> None:
        with model.trace(max_tokens=2, **GREEDY) as tracer:
            for index, prompt in enumerate((A, B, C)):
                with tracer.invoke(prompt):
                    kept = model.logits.argmax().save()
                    if index != 1:
                        raise LookupError(index)
        outputs: list[Any] = []
        with pytest.raises(InterventionError, match="2 blocks of this trace failed") as caught:
            async for output in tracer.backend:
                outputs.append(output)
        assert str(caught.value).startswith("LookupError: 0")
        assert "LookupError: 2" in str(caught.value)
        assert [out.prompt_token_ids for out in outputs if out.finished] == [B]
        assert len(tracer.saves["kept"]) == 3
        assert tracer.result[0].outputs[0].finish_reason == "error"

    run(main())


def test_a_failed_block_binds_what_it_saved(model: Any, run: Run) -> None:
    """`async with` binds what was saved before the error that it raises (O10)."""

    async def main() -> None:
        with pytest.raises(InterventionError, match="KeyError"):
            async with model.trace(A, max_tokens=1, **GREEDY):
                before = model.model.layers[0].output[0].shape.save()
                raise KeyError("late")
        assert tuple(before) == (5, 128)

    run(main())


def test_an_error_that_nobody_asks_for_is_reported(model: Any, run: Run) -> None:
    """The error of a trace that is thrown away goes to the loop's exception handler (case 2)."""
    reported: list[dict[str, Any]] = []

    async def thrown_away() -> None:
        with model.trace(A, max_tokens=1, **GREEDY) as tracer:
            raise ValueError("thrown away")
        while not tracer.backend.done:
            await asyncio.sleep(0.01)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: reported.append(context))
        await thrown_away()
        gc.collect()
        loop.set_exception_handler(None)

    run(main())
    (context,) = reported
    assert str(context["exception"]).startswith("ValueError: thrown away")


def test_several_sequences(model: Any, run: Run, hf: Oracle) -> None:
    """Each of a request's sequences has its block and its values; the last output has all."""

    async def main() -> None:
        with model.trace(A, n=2, max_tokens=4, temperature=1.0, seed=5) as tracer:
            tokens = [].save()
            for _ in tracer.all():
                tokens.append(int(model.samples[0]))
        outputs = [output async for output in tracer.backend]
        completions = outputs[-1].outputs
        assert [one.index for one in completions] == [0, 1]
        assert [one.saves["tokens"] for one in completions] == [
            one.token_ids for one in completions
        ]
        assert outputs[-1].saves["tokens"] == [one.token_ids for one in completions]
        assert completions[0].token_ids != completions[1].token_ids

    run(main())


def test_ends_of_requests(model: Any, run: Run) -> None:
    """Stop strings, `tracer.stop()` and lengths end requests as in a synchronous trace."""

    async def stopped_by_text() -> Any:
        with model.trace(A, max_tokens=20, stop=["t77"], **GREEDY) as tracer:
            model.logits[:] = -float("inf")
            model.logits[0, 77] = 0
            read = model.logits.shape.save()
        return await tracer.backend

    async def stopped_by_block() -> Any:
        with model.trace(A, max_tokens=20, **GREEDY) as tracer:
            seen = [].save()
            for step in tracer.iter[:]:
                seen.append(int(model.samples[0]))
                if step == 2:
                    tracer.stop()
        return await tracer.backend

    async def main() -> None:
        text, block = await asyncio.gather(stopped_by_text(), stopped_by_block())
        assert (text.outputs[0].finish_reason, text.outputs[0].stop_reason) == ("stop", "t77")
        assert "read" in text.saves
        assert block.outputs[0].stop_reason == "tracer.stop"
        assert block.saves["seen"] == block.outputs[0].token_ids
        assert len(block.saves["seen"]) == 3

    run(main())


def test_results_in_blocks(model: Any, run: Run) -> None:
    """A block that waits for `tracer.result` is given it, for each sequence, while others run."""

    async def one(steps: int) -> Any:
        with model.trace(A, n=2, max_tokens=steps, temperature=1.0, seed=steps) as tracer:
            text = [tracer.result.text, tracer.result.finish_reason].save()
        return await tracer.backend

    async def main() -> None:
        for output in await asyncio.gather(*map(one, (2, 5, 3, 4))):
            right = [[one.text, one.finish_reason] for one in output.outputs]
            assert output.saves["text"] == right

    run(main())


def test_prints_and_warnings_come_home(
    model: Any, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a block prints and warns about is printed and raised in the caller's process (O11)."""

    async def main() -> None:
        with pytest.warns(MidstreamWarning, match="asked for 9"):
            async with model.trace(A, max_tokens=2, **GREEDY) as tracer:
                print("from the block")
                for _ in tracer.iter[:9]:
                    kept = model.logits.argmax().save()
        assert int(kept) == tracer.result.outputs[0].token_ids[-1]

    run(main())
    assert capsys.readouterr().out == "from the block\n"


def test_limits(model: Any, run: Run, hf: Oracle) -> None:
    """A block that saves too much fails alone, and a prompt over the budget is refused (O20)."""

    async def main() -> None:
        with model.trace(A, max_tokens=4, **GREEDY) as neighbour:
            logits = model.logits.save()
        with model.trace(A, max_tokens=4, **GREEDY) as greedy:
            large = torch.zeros(1 << 20).save()
        with pytest.raises(InterventionError, match="max_save_bytes") as caught:
            await greedy.backend
        assert isinstance(caught.value.__cause__, LimitExceededError)
        output = await neighbour.backend
        assert output.outputs[0].token_ids == hf.generate(A, 4).tokens
        budget = model._async_engine.budget
        with pytest.raises(PromptError, match=f"at most {budget}"):
            with model.trace(LONG * (budget // len(LONG) + 1), max_tokens=1) as tracer:
                kept = model.logits.save()

    run(main())


def test_a_request_that_vllm_refuses(model: Any, run: Run) -> None:
    """VLLM's own refusal is raised where the trace is awaited, and its companions end (G30)."""
    from vllm.exceptions import VLLMValidationError

    async def main() -> None:
        with model.trace(max_tokens=4, **GREEDY) as tracer:
            with tracer.invoke(A):
                kept = model.logits.save()
            with tracer.invoke([5] * 600):  # longer than the model's length
                kept = model.logits.save()
        with pytest.raises(VLLMValidationError, match="512"):
            await tracer.backend

    run(main())


def test_functions_and_captured_traces(model: Any, run: Run, hf: Oracle) -> None:
    """`block=` and `model.run(data)` submit at once as well (E1, O23)."""

    def read(model: Any, tracer: Any) -> dict[str, Any]:
        return {"logits": model.logits}

    async def main() -> None:
        tracer = model.trace(A, max_tokens=1, block=read, **GREEDY)
        with model.trace(A, max_tokens=1, run=False, **GREEDY) as captured:
            logits = model.logits.save()
        again = model.run(captured.to_bytes())
        for output in (await tracer.backend, await again.backend):
            assert_close(output.saves["logits"], hf.reads(A)["logits"], hf.reads(B)["logits"])
        with pytest.raises(CaptureError, match="Nothing runs yet"):
            captured.backend

    run(main())


def test_new_saves_come_with_the_outputs(model: Any, run: Run, hf: Oracle) -> None:
    """With `stream_saves` each output has what was appended to saved lists since the one before.

    Together they are the lists of the finished output.
    """

    async def main() -> None:
        with model.trace(A, max_tokens=6, stream_saves=True, **GREEDY) as tracer:
            rows, started = [].save(), ["once"].save()
            unsaved = []
            last = 0
            for step in tracer.all():
                rows.append(model.logits[0])
                unsaved.append(step)
                last = model.logits.argmax().save()
            rows.append("after")
        outputs = [output async for output in tracer.backend]
        assert outputs[0].new_saves["started"] == ["once"]
        assert not any("started" in output.new_saves for output in outputs[1:])
        news = [output.new_saves.get("rows", []) for output in outputs]
        assert [len(found) for found in news] == [1] * 5 + [2]
        right = hf.generate(A, 6).logits
        assert_close(torch.stack([found[0] for found in news]), right, right.roll(1, 0))
        assert news[-1][1] == "after"
        whole = outputs[-1].saves["rows"]
        assert torch.equal(torch.stack(whole[:-1]), torch.stack([found[0] for found in news]))
        assert [sorted(output.saves) for output in outputs[:-1]] == [[]] * 5
        assert sorted(outputs[-1].saves) == ["last", "rows", "started"]

    run(main())


def test_new_saves_of_invokes_and_sequences(model: Any, run: Run) -> None:
    """New items stay with their request and sequence; a slow reader gets all of them at once."""

    async def main() -> None:
        with model.trace(max_tokens=4, stream_saves=True, temperature=1.0, seed=1) as tracer:
            everyone = ["before"].save()
            for prompt in (A, B):
                with tracer.invoke(prompt, n=2):
                    tokens = [].save()
                    for _ in tracer.all():
                        tokens.append(int(model.samples[0]))
                    everyone.append(len(prompt))
        found: dict[int, list[list[int]]] = {5: [[], []], 3: [[], []]}
        async for output in tracer.backend:
            await asyncio.sleep(0.15)
            for one in output.outputs:
                found[len(output.prompt_token_ids)][one.index] += one.new_saves.get("tokens", [])
                assert "before" not in one.new_saves.get("everyone", [])
        for out in tracer.result:
            assert found[len(out.prompt_token_ids)] == [one.token_ids for one in out.outputs]
        assert tracer.saves["everyone"] == ["before", 5, 5, 3, 3]

    run(main())


def test_new_saves_are_bounded(model: Any, run: Run) -> None:
    """A block that streams more at a step than it may save fails, naming the limit (O20)."""

    async def main() -> None:
        with model.trace(A, max_tokens=4, stream_saves=True, **GREEDY) as tracer:
            rows = [].save()
            for step in tracer.all():
                rows.append(torch.zeros(1 << 19) if step == 1 else step)
                model.logits
        with pytest.raises(InterventionError, match="max_save_bytes"):
            await tracer.backend

    run(main())


def test_streaming_belongs_to_asynchronous_traces(llama: Any) -> None:
    """A synchronous trace refuses `stream_saves`, `backend` and `async with`, with what to do."""
    with pytest.raises(UnsupportedError, match="stream_saves"):
        llama.trace(A, stream_saves=True)
    with llama.trace(A, max_tokens=1, **GREEDY) as tracer:
        kept = llama.logits.save()
    with pytest.raises(UnsupportedError, match=r"tracer\.result"):
        tracer.backend

    async def main() -> None:
        async with llama.trace(A, max_tokens=1):
            kept = llama.logits.save()

    with pytest.raises(UnsupportedError, match=r"`with model\.trace"):
        asyncio.run(main())
