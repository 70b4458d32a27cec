"""What counts as one prompt: every form of it is the same prompt, and several are refused."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from midstream import VLLM
from midstream.errors import PromptError, UnsupportedError
from midstream.modeling.vllm.prompts import single
from tests.conftest import TINY
from tests.modeling.vllm.conftest import Neighbour, live, plain_tokens
from tests.support.checkpoints import LONG, A, B, checkpoint
from tests.support.compare import assert_close
from tests.support.oracle import Oracle

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 1}
TEXT = "t11 t12 t13 t14 t15"


def _rows(model: Any, tracer: Any) -> dict[str, Any]:
    return {"ids": model.model.embed_tokens.input, "stream": sum(model.model.layers[2].output)}


# --- one prompt ----------------------------------------------------------------------------------

FORMS: dict[str, Any] = {
    "text": lambda tokenizer: TEXT,
    "ids": lambda tokenizer: A,
    "tuple": lambda tokenizer: tuple(A),
    "range": lambda tokenizer: range(11, 16),
    "tensor": lambda tokenizer: torch.tensor(A),
    "one row": lambda tokenizer: [A],
    "tensor of one row": lambda tokenizer: torch.tensor([A]),
    "array": lambda tokenizer: np.array(A),
    "numpy ids": lambda tokenizer: list(np.array(A)),
    "tokenizer": lambda tokenizer: tokenizer(TEXT),
    "tokenizer, torch": lambda tokenizer: tokenizer(TEXT, return_tensors="pt"),
    "tokenizer, numpy": lambda tokenizer: tokenizer(TEXT, return_tensors="np"),
    "tokenizer, padded": lambda tokenizer: tokenizer(TEXT, padding="max_length", max_length=9),
    "padded on the left": lambda tokenizer: {
        "input_ids": torch.tensor([[0, 0, *A]]),
        "attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1, 1]]),
    },
    "input ids": lambda tokenizer: {"input_ids": A},
    "vLLM text": lambda tokenizer: {"prompt": TEXT},
    "vLLM ids": lambda tokenizer: {"prompt_token_ids": A},
    "vLLM ids with a salt": lambda tokenizer: {"prompt_token_ids": A, "cache_salt": "mine"},
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_the_same_prompt(form: str, llama: Any, hf: Oracle) -> None:
    """Text, ids, a tokenizer's output and vLLM's dictionaries give the same rows, bit for bit.

    (C27, C28, case 26, case 29).
    """
    prompt = FORMS[form](llama.tokenizer)
    before = repr(prompt)
    tracer = llama.trace(prompt, block=_rows, **GREEDY)
    assert tracer.saves["ids"].tolist() == A
    assert torch.equal(
        tracer.saves["stream"], llama.trace(A, block=_rows, **GREEDY).saves["stream"]
    )
    assert_close(tracer.saves["stream"], hf.reads(A)["residual.2"], hf.reads(A)["residual.1"])
    assert tracer.result.prompt_token_ids == A
    assert repr(prompt) == before


def test_chat_messages_go_through_the_template(demo_engine: Any) -> None:
    """Messages are the ids that the tokenizer's chat template makes of them (O14, C29)."""
    messages = [
        {"role": "system", "content": "Answer briefly."},
        {"role": "user", "content": "The capital of France?"},
    ]
    right = demo_engine.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    tracer = demo_engine.trace(
        messages, block=lambda model, tracer: model.model.embed_tokens.input, **GREEDY
    )
    assert tracer.saves["return"].tolist() == right
    assert len(right) > 10


def test_text_is_tokenized_as_the_tokenizer_does_it(demo_engine: Any) -> None:
    """The rows of a text are the tokens that `model.tokenizer` gives, byte fallbacks included.

    (C30).
    """
    text = "Zażółć 🜁 the  capital\n"
    tracer = demo_engine.trace(
        text, block=lambda model, tracer: model.model.embed_tokens.input, **GREEDY
    )
    assert tracer.saves["return"].tolist() == demo_engine.tokenizer(text)["input_ids"]


# --- not one prompt ------------------------------------------------------------------------------

SEVERAL: dict[str, Any] = {
    "texts": ["t11", "t12"],
    "one text in a list": ["t11"],
    "rows": [A, B],
    "array of rows": np.array([A, A]),
    "tokenizer output of rows": {"input_ids": [A, A]},
    "floats": [1.0, 2.0],
    "booleans": [True, False],
    "ids and a text": [11, "t12"],
}
EMPTY: dict[str, Any] = {
    "text": "",
    "ids": [],
    "row": {"input_ids": [[]]},
    "all masked": {"input_ids": [[1, 2]], "attention_mask": [[0, 0]]},
}


@pytest.mark.parametrize("case", SEVERAL)
def test_several_prompts_show_the_loop_to_write(case: str, llama: Any) -> None:
    """A list of prompts is refused before anything runs, with the loop to write instead.

    (O14, C28, G22).
    """
    with pytest.raises(PromptError, match=r"(?s)one prompt.*for prompt in prompts:") as failure:
        llama.trace(SEVERAL[case], block=_rows)
    assert isinstance(failure.value, ValueError)


def test_two_positional_prompts_show_the_loop_to_write(llama: Any) -> None:
    """So are two prompts side by side (C28, G23)."""
    with pytest.raises(PromptError, match=r"(?s)Got 2 prompts\..*for prompt in prompts:"):
        llama.trace("t11", "t12")


@pytest.mark.parametrize("case", EMPTY)
def test_empty_prompt(case: str, llama: Any) -> None:
    """A prompt without a token is refused as that (C28, G24)."""
    with pytest.raises(PromptError, match="Empty prompt"):
        llama.trace(EMPTY[case], block=_rows)


@pytest.mark.parametrize("prompt", [5, b"t11", {1, 2}, {"text": "t11"}], ids=repr)
def test_something_else_is_no_prompt(prompt: Any, llama: Any) -> None:
    """The error names what a prompt may be, and what it got."""
    got = "text" if isinstance(prompt, dict) else type(prompt).__name__
    with pytest.raises(PromptError, match=rf"(?s)input_ids|token ids.*{got}"):
        llama.trace(prompt, block=_rows)


def test_mask_of_another_length(llama: Any) -> None:
    """A mask that does not fit its ids is refused with both lengths."""
    with pytest.raises(PromptError, match="attention_mask has 4 entries for 5 input_ids"):
        llama.trace({"input_ids": [A], "attention_mask": [[1] * 4]}, block=_rows)


def test_images_are_refused(llama: Any) -> None:
    """A multimodal prompt names what takes one (O14)."""
    with pytest.raises(UnsupportedError, match="TransformersModel") as failure:
        llama.trace({"prompt": TEXT, "multi_modal_data": {"image": object()}}, block=_rows)
    assert isinstance(failure.value, NotImplementedError)


def test_refused_prompt_of_a_with_statement(llama: Any) -> None:
    """In the `with` form the refusal comes from the header, and the body never runs."""
    reached = False
    with pytest.raises(PromptError), llama.trace([A, B]):
        reached = True.save()
    assert reached is False


def test_vllms_own_refusals_reach_the_caller(llama: Any) -> None:
    """An id outside the vocabulary, or a prompt beyond the context, is vLLM's own error (G30)."""
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError, match="out of vocabulary"):
        llama.trace([5, 500], block=_rows)
    with pytest.raises(VLLMValidationError, match="maximum context length is 512"):
        llama.trace([5] * 600, block=_rows)
    assert live(llama) == [0]


# --- prompts and steps ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def narrow() -> Iterator[Any]:
    """An engine whose steps have at most 64 tokens."""
    path = str(checkpoint("T-LLAMA", with_tokenizer=True))
    with VLLM(path, dispatch=True, max_num_batched_tokens=64, **TINY) as model:
        yield model


@pytest.mark.parametrize("count", [63, 64])
def test_prompt_that_fits_a_step(narrow: Any, hf: Oracle, count: int) -> None:
    """A prompt up to the size of a step has all its rows (case 19)."""
    got = narrow.trace(LONG[:count], block=_rows, **GREEDY).saves
    right = hf.reads(LONG[:count])
    assert got["ids"].tolist() == LONG[:count]
    assert_close(got["stream"], right["residual.2"], right["residual.1"])


def test_prompt_longer_than_a_step(narrow: Any) -> None:
    """One token more is refused before it is submitted, with both numbers and the argument.

    (O4, G50, case 17, case 19).
    """
    text = " ".join(f"t{i}" for i in LONG[:65])
    for prompt in (LONG[:65], text, {"prompt": text}):
        with pytest.raises(PromptError, match=r"65 tokens.* at most 64.*max_num_batched_tokens=65"):
            narrow.trace(prompt, block=_rows, **GREEDY)
    assert not narrow.vllm_entrypoint.llm_engine.has_unfinished_requests()


def test_length_of_a_text_is_counted_in_tokens(
    demo_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text may have more tokens than characters."""
    text = "🜁🜂🜃🜄"
    count = len(demo_engine.tokenizer(text)["input_ids"])
    assert count > 10 > len(text)
    monkeypatch.setattr(type(demo_engine._engine), "budget", 10)
    with pytest.raises(PromptError, match=f"has {count} tokens"):
        demo_engine.trace(text, block=_rows, **GREEDY)


def test_prompt_that_a_step_has_no_room_for(narrow: Any, hf: Oracle) -> None:
    """Beside a prompt that is run in parts, a traced one still is run whole.

    (O4, A25, C99, case 17).
    """
    other = Neighbour(narrow, LONG[:100], max_tokens=12)
    narrow.vllm_entrypoint.llm_engine.step()
    assert other.widths == [64]  # what is left of it leaves room for a part of the next prompt
    got = narrow.trace(LONG[:40], block=_rows, **GREEDY).saves
    right = hf.reads(LONG[:40])
    assert got["ids"].tolist() == LONG[:40]
    assert_close(got["stream"], right["residual.2"], right["residual.1"])
    assert max(other.widths) <= 64 < 100
    assert other.tokens() == plain_tokens(narrow, LONG[:100], max_tokens=12)
    assert live(narrow) == [0]


def test_messages_that_the_template_refuses(demo_engine: Any) -> None:
    """A template's own refusal is the prompt's error, with its text."""
    tokenizer = copy.copy(demo_engine.tokenizer)
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    chat = [{"role": "user", "content": "x"}]
    with pytest.raises(PromptError, match="refuses these messages: roles must alternate"):
        single(chat, tokenizer)
