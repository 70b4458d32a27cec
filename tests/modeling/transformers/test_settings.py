"""Sampling words are keywords of `generate`, and what nobody knows is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from midstream.errors import UnsupportedError
from midstream.modeling.transformers.settings import check_forward, generation, seeded, split
from midstream.modeling.transformers.signature import Signature, signature_of
from midstream.modeling.transformers.words import PORTABLE, VLLM_ONLY, of_generate
from tests.support.checkpoints import A
from tests.support.local_checkpoints import word_tokenizer

Get = Callable[[str], Any]
EOS = 1


@pytest.fixture(scope="module")
def signature(local: Get) -> Signature:
    """What T-LLAMA's forward takes."""
    return signature_of(local("T-LLAMA").load())


def keywords(**settings: Any) -> dict[str, Any]:
    """Keywords of `generate` for a model that ends at token 1."""
    from transformers import GenerationConfig

    return generation(settings, generation_config=GenerationConfig(eos_token_id=EOS)).keywords


def generated(module: Any, settings: dict[str, Any], tokenizer: Any = None) -> list[int]:
    """New tokens of a prompt."""
    found = generation(settings, generation_config=module.generation_config, tokenizer=tokenizer)
    ids = torch.tensor([A])
    with seeded(found.seed):
        output = module.generate(ids, attention_mask=torch.ones_like(ids), **found.keywords)
    return output[0, len(A) :].tolist()


# --- the same words on both backends -------------------------------------------------------------

WORDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nothing": ({}, {}),
    "length": ({"max_tokens": 3}, {"max_new_tokens": 3}),
    "length by its own name": ({"max_new_tokens": 3}, {"max_new_tokens": 3}),
    "both names": ({"max_tokens": 3, "max_new_tokens": 3}, {"max_new_tokens": 3}),
    "greedy": ({"temperature": 0}, {"do_sample": False}),
    "sampling": ({"temperature": 0.7}, {"temperature": 0.7, "do_sample": True}),
    "as told": (
        {"temperature": 0.7, "do_sample": False},
        {"temperature": 0.7, "do_sample": False},
    ),
    "all tokens": ({"top_k": -1}, {"top_k": 0}),
    "best tokens": ({"top_k": 5, "top_p": 0.9}, {"top_k": 5, "top_p": 0.9}),
    "at least": ({"min_tokens": 2}, {"min_new_tokens": 2}),
    "sequences": ({"n": 2}, {"num_return_sequences": 2}),
    "stop": ({"stop": ["t8"]}, {"stop_strings": ["t8"]}),
    "stop ids": ({"stop_token_ids": [8, 9]}, {"eos_token_id": [EOS, 8, 9]}),
    "no end": ({"ignore_eos": True}, {"eos_token_id": None}),
    "another end": ({"ignore_eos": True, "stop_token_ids": [8]}, {"eos_token_id": [8]}),
    "own end": ({"eos_token_id": 7, "stop_token_ids": [8]}, {"eos_token_id": [7, 8]}),
    "vLLM's defaults": ({"max_tokens": None, "stop": None, "seed": None}, {}),
    "its own": ({"num_beams": 3, "use_cache": False}, {"num_beams": 3, "use_cache": False}),
    "no value of its own": ({"eos_token_id": None}, {"eos_token_id": None}),
}


@pytest.mark.parametrize("words", WORDS)
def test_words_are_keywords_of_generate(words: str) -> None:
    """Words of vLLM and transformers' own give `generate`'s keywords (O15, case 28)."""
    given, right = WORDS[words]
    assert keywords(**given) == right


def test_either_name_of_the_length_gives_that_many_tokens(local: Get) -> None:
    """`max_tokens` and `max_new_tokens` are one setting (O15, case 28)."""
    module = local("T-LLAMA").load()
    right = module.generate(torch.tensor([A]), max_new_tokens=4)[0, len(A) :].tolist()
    assert generated(module, {"max_tokens": 4}) == right
    assert generated(module, {"max_new_tokens": 4}) == right
    assert len(right) == 4


def test_greedy_unless_told(local: Get) -> None:
    """Without a temperature decoding is greedy, and with one tokens are drawn (H12)."""
    module = local("T-LLAMA").load()
    greedy = module.generate(torch.tensor([A]), max_new_tokens=8, do_sample=False)
    right = greedy[0, len(A) :].tolist()
    assert generated(module, {"max_tokens": 8}) == right
    assert generated(module, {"max_tokens": 8, "temperature": 0}) == right
    drawn = [generated(module, {"max_tokens": 8, "temperature": 3.0, "seed": s}) for s in range(3)]
    assert all(each != right for each in drawn)
    assert drawn[0] != drawn[1]


def test_a_seed_gives_the_same_tokens_and_moves_no_others() -> None:
    """Draws from a seed repeat, and the generators go on where they stood (H12)."""
    state = torch.random.get_rng_state()
    drawn = []
    for _ in range(2):
        torch.rand(3)
        before = torch.random.get_rng_state()
        with seeded(11):
            drawn.append(torch.rand(4))
        assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(drawn[0], drawn[1])
    with seeded(None):
        torch.rand(1)
    assert not torch.equal(torch.random.get_rng_state(), before)
    torch.random.set_rng_state(state)


def test_what_ends_a_sequence(local: Get) -> None:
    """Stop ids, stop strings, and an end that is ignored act as on vLLM (O15)."""
    module, tokenizer = local("T-LLAMA").load(), word_tokenizer()
    tokenizer.add_tokens(["abcdef"])  # transformers looks at how words follow this one
    free = generated(module, {"max_tokens": 8})
    assert len(set(free[:3])) == 3
    assert generated(module, {"max_tokens": 8, "stop_token_ids": [free[2]]}) == free[:3]
    text = tokenizer.decode([free[1]])
    assert generated(module, {"max_tokens": 8, "stop": text}, tokenizer) == free[:2]
    module.generation_config.eos_token_id, before = free[1], module.generation_config.eos_token_id
    try:
        assert generated(module, {"max_tokens": 8}) == free[:2]
        assert generated(module, {"max_tokens": 8, "ignore_eos": True}) == free
    finally:
        module.generation_config.eos_token_id = before


# --- what is refused -----------------------------------------------------------------------------


def test_two_lengths_are_refused() -> None:
    """Two names of one setting with different values are refused (O15, case 28)."""
    with pytest.raises(TypeError, match="max_tokens=3 and max_new_tokens=4 are two names of one"):
        keywords(max_tokens=3, max_new_tokens=4)
    with pytest.raises(TypeError, match="n=2 and num_return_sequences=3"):
        keywords(n=2, num_return_sequences=3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1}, "temperature=-1: expected 0, which is greedy, or more"),
        ({"temperature": 0, "do_sample": True}, "temperature=0 is greedy, and do_sample=True"),
    ],
)
def test_a_temperature_that_means_nothing_is_refused(
    settings: dict[str, Any], message: str
) -> None:
    """A temperature below 0, and one of 0 while sampling, are refused (O15)."""
    with pytest.raises(ValueError, match=message):
        keywords(**settings)


@pytest.mark.parametrize("generate", [True, False])
@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("max_token", "max_tokens"),
        ("temprature", "temperature"),
        ("num_beam", "num_beams"),
        ("attention_masks", "attention_mask"),
        ("output_hidden_state", "output_hidden_states"),
    ],
)
def test_an_unknown_keyword_names_the_nearest(
    name: str, near: str, generate: bool, signature: Signature
) -> None:
    """A keyword that nobody knows is a `TypeError` with the nearest one (O15, case 63)."""
    with pytest.raises(TypeError, match=f"'{name}' is neither.* Did you mean '{near}'"):
        split({name: 1}, signature, generate=generate)


def test_nonsense_is_refused(signature: Signature) -> None:
    """`bogus=1` is a `TypeError`, for a trace and for a generation (case 63)."""
    for generate in (True, False):
        with pytest.raises(TypeError, match="'bogus' is neither a keyword of LlamaForCausalLM"):
            split({"bogus": 1}, signature, generate=generate)


def test_words_of_vllm_say_what_to_do_here(signature: Signature) -> None:
    """A word that only vLLM has is refused with what to write instead (O15)."""
    for name in VLLM_ONLY:
        with pytest.raises(UnsupportedError, match=f"^{name}= exists on vLLM only. Here, "):
            split({name: 1}, signature, generate=True)
        assert split({name: None}, signature, generate=True) == ({}, {})
    with pytest.raises(NotImplementedError, match="output_logits=True"):
        split({"logprobs": 2}, signature, generate=False)


def test_every_word_of_vllm_is_known() -> None:
    """Each of vLLM's sampling parameters has a meaning or an answer here (O15)."""
    SamplingParams = pytest.importorskip("vllm.sampling_params").SamplingParams  # noqa: N806
    fields = {name for name in SamplingParams.__struct_fields__ if not name.startswith("_")}
    assert len(fields) > 20
    assert fields - {*PORTABLE, *VLLM_ONLY} == set()


# --- which keyword is whose ----------------------------------------------------------------------


def test_keywords_are_inputs_or_settings(signature: Signature) -> None:
    """What the forward takes is an input, what `generate` takes is a setting (case 63)."""
    given = {
        "attention_mask": 1,
        "text": 2,
        "position_ids": 3,
        "max_tokens": 4,
        "num_beams": 5,
        "use_cache": True,
        "output_hidden_states": True,
        "streamer": 8,
    }
    inputs, settings = split(given, signature, generate=True)
    assert list(inputs) == ["attention_mask", "text", "position_ids"]
    assert {**inputs, **settings} == given
    flags = {"use_cache": True, "output_hidden_states": True, "max_tokens": 1}
    inputs, settings = split(flags, signature, generate=False)
    assert (list(inputs), list(settings)) == (["use_cache", "output_hidden_states"], ["max_tokens"])


def test_a_wrapper_takes_what_is_no_setting() -> None:
    """A forward of ``**kwargs`` alone takes any keyword but those of `generate` (case 83)."""

    class Wrapper(torch.nn.Module):
        def forward(self, **kwargs: Any) -> Any:
            return kwargs

    inputs, settings = split(
        {"input_ids": 1, "mine": 2, "temperature": 0}, signature_of(Wrapper()), generate=False
    )
    assert (inputs, settings) == ({"input_ids": 1, "mine": 2}, {"temperature": 0})


# --- one forward ---------------------------------------------------------------------------------


def test_sampling_words_mean_nothing_to_one_forward() -> None:
    """A trace takes the words of a generation of one token (H9)."""
    words = {"max_tokens": 1, "temperature": 0.0, "seed": 3, "top_p": 0.5, "stop": None, "n": 1}
    assert set(words) <= set(PORTABLE)
    check_forward(words)


@pytest.mark.parametrize("name", ["max_tokens", "max_new_tokens", "n"])
def test_one_forward_gives_no_tokens(name: str) -> None:
    """More than one token of a trace is refused and names `generate` (H9)."""
    with pytest.raises(ValueError, match=rf"{name}=3: .*model.generate\(..., {name}=3\)"):
        check_forward({name: 3})


def test_settings_of_generate_are_told_from_those_of_a_trace() -> None:
    """What only `generate` has is refused for a trace (H9)."""
    for name in ("num_beams", "streamer", "do_sample"):
        assert name in of_generate()
        with pytest.raises(TypeError, match=f"'{name}' is a setting of `generate`"):
            check_forward({name: 2})
