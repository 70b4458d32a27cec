"""`model.generate`, plain and as a `with` statement."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch

from midstream.errors import CaptureError, InterventionError, PromptError, UnsupportedError
from tests.support.checkpoints import LONG, A, B, C
from tests.support.oracle import Oracle, assert_close

GREEDY = {"temperature": 0.0, "ignore_eos": True}

pytestmark = pytest.mark.usefixtures("nothing_left")


def tokens(outputs: Any) -> list[list[int]]:
    """The generated ids of each output."""
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def right(hf: Oracle) -> list[list[int]]:
    """Four tokens of A, B and C each."""
    return [hf.generate(prompt, 4).tokens for prompt in (A, B, C)]


def test_plain_generate_is_vllms(llama: Any, right: list[list[int]]) -> None:
    """Without `with`, a list of prompts gives vLLM's outputs in their order (C75, C77)."""
    outputs = llama.generate([A, B, C], max_tokens=4, **GREEDY)
    assert tokens(outputs) == right
    assert len({tuple(found) for found in right}) == 3
    assert [output.prompt_token_ids for output in outputs] == [A, B, C]
    assert [type(output).__name__ for output in outputs] == ["RequestOutput"] * 3
    assert all(output.finished and not hasattr(output, "saves") for output in outputs)


@pytest.mark.parametrize(
    "given",
    [
        pytest.param((A, B), id="positional"),
        pytest.param(([A, B],), id="list"),
        pytest.param(([torch.tensor(A), np.array(B)],), id="tensors"),
        pytest.param(([{"prompt_token_ids": A}, {"input_ids": [B]}],), id="mappings"),
    ],
)
def test_several_prompts_in_every_form(llama: Any, given: Any, right: list[list[int]]) -> None:
    """Several prompts come as arguments or as a list, each in any form a trace takes (C77)."""
    assert tokens(llama.generate(*given, max_tokens=4, **GREEDY)) == right[:2]


def test_one_prompt_gives_a_list_of_one(llama: Any, right: list[list[int]]) -> None:
    """Token ids, text and chat messages are one prompt each."""
    assert tokens(llama.generate(A, max_tokens=4, **GREEDY)) == right[:1]
    assert tokens(llama.generate(np.array(A), max_tokens=4, **GREEDY)) == right[:1]
    text = llama.tokenizer.decode(A)
    ids = llama.tokenizer(text)["input_ids"]
    (output,) = llama.generate(text, max_tokens=1, **GREEDY)
    assert output.prompt_token_ids == ids
    llama.tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    try:
        (output,) = llama.generate([{"role": "user", "content": text}], max_tokens=1)
        assert output.prompt_token_ids == ids
        pair = [[{"role": "user", "content": text}]] * 2
        assert len(llama.generate(pair, max_tokens=1)) == 2
    finally:
        llama.tokenizer.chat_template = None


def test_default_is_vllms_sixteen_tokens(llama: Any) -> None:
    """What settings leave out has vLLM's default, the same as in a trace (C31)."""
    (output,) = llama.generate(A, **GREEDY)
    assert len(output.outputs[0].token_ids) == 16
    with llama.trace(A, **GREEDY) as tracer:
        pass
    assert tokens([tracer.result]) == tokens([output])


def test_settings_are_those_of_a_trace(llama: Any, right: list[list[int]]) -> None:
    """`max_new_tokens` is `max_tokens`, and an unknown setting is a TypeError.

    (O15, C33, C34, G28).
    """
    assert tokens(llama.generate(A, max_new_tokens=4, **GREEDY)) == right[:1]
    with pytest.raises(TypeError, match="'temprature'.*'temperature'"):
        llama.generate(A, temprature=0.0)
    with pytest.raises(TypeError, match="two names"):
        llama.generate(A, max_tokens=1, max_new_tokens=1)
    (output,) = llama.generate(A, n=2, seed=1, max_tokens=3, ignore_eos=True)
    assert [len(each.token_ids) for each in output.outputs] == [3, 3]


def test_no_prompt_is_refused(llama: Any) -> None:
    """Nothing, an empty list, and what is no prompt are errors before anything runs."""
    with pytest.raises(PromptError, match="needs a prompt"):
        llama.generate(max_tokens=1)
    with pytest.raises(PromptError, match="Empty prompt"):
        llama.generate([])
    with pytest.raises(PromptError, match="got int"):
        llama.generate(3)


def test_plain_prompts_may_be_split_and_cached(llama: Any, hf: Oracle) -> None:
    """A prompt without a block is chunked, and reads what an equal one left in the cache (O4)."""
    prompt = [6, *LONG]
    right = hf.generate(prompt, 3).tokens
    (first,), (second,) = (llama.generate(prompt, max_tokens=3, **GREEDY) for _ in range(2))
    assert tokens([first, second]) == [right, right]
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 288)


def test_with_generate_is_a_trace(llama: Any, hf: Oracle, right: list[list[int]]) -> None:
    """In the header of a `with` statement the call is `trace` (C75)."""
    with llama.generate(A, max_new_tokens=4, **GREEDY) as tracer:
        stream = sum(llama.model.layers[2].output).save()
    reads = hf.reads(A)
    assert_close(stream, reads["residual.2"], reads["residual.1"])
    assert tokens([tracer.result]) == right[:1]
    settings = {"max_tokens": 1, **GREEDY}
    with torch.no_grad(), llama.generate(**settings) as tracer:
        with tracer.invoke(B):
            rows = len(llama.model.layers[0].output[0])
            rows.save()
    assert rows == len(B)


def test_with_generate_takes_one_prompt(llama: Any) -> None:
    """With a block, several prompts are the error that a trace gives."""
    with pytest.raises(PromptError, match="Got 2 prompts"):
        with llama.generate(A, B):
            pass


def test_generate_with_a_function_is_a_trace(llama: Any) -> None:
    """`block=` gives the tracer, as in a trace."""
    tracer = llama.generate(A, max_tokens=1, block=lambda model, _: {"rows": model.logits.shape})
    assert tuple(tracer.saves["rows"]) == (1, 128)


def test_plain_outputs_say_why_they_are_no_trace(llama: Any) -> None:
    """A `with` statement on the outputs of a plain call tells what to write."""
    outputs = llama.generate(A, max_tokens=1)
    with pytest.raises(CaptureError, match="where the body stands"):
        with outputs:
            pass


def test_generate_in_a_block_is_refused(llama: Any) -> None:
    """A block runs beside one request and can generate nothing of its own."""
    with pytest.raises(InterventionError, match="UnsupportedError.*inside a block") as caught:
        with llama.trace(A, max_tokens=1):
            llama.generate(B)
    assert isinstance(caught.value.__cause__, UnsupportedError)


def test_plain_generate_costs_what_vllms_does(llama: Any) -> None:
    """Many prompts take about as long as through vLLM's own `generate`."""
    from vllm import SamplingParams

    prompts = [[5 + i % 90, 7, 9, 5 + i // 90] for i in range(128)]
    params = SamplingParams(temperature=0.0, max_tokens=1)
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    ours: list[float] = []
    vllms: list[float] = []
    for _ in range(3):
        start = time.perf_counter()
        outputs = llama.generate(prompts, temperature=0.0, max_tokens=1)
        ours.append(time.perf_counter() - start)
        start = time.perf_counter()
        plain = llama.vllm_entrypoint.generate(given, params, use_tqdm=False)
        vllms.append(time.perf_counter() - start)
        assert tokens(outputs) == tokens(plain)
    assert min(ours) < 1.5 * min(vllms)
