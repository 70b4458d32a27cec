"""A keyword of engines is an error on HuggingFace that says what to write there."""

from __future__ import annotations

import pytest

from midstream import TransformersModel
from midstream.errors import UnsupportedError
from midstream.modeling.spellings import ENGINE_ONLY, LOCAL_ONLY
from midstream.modeling.transformers.words import PORTABLE, VLLM_ONLY, of_generate
from tests.support.checkpoints import checkpoint


@pytest.mark.parametrize("name", ENGINE_ONLY)
def test_an_argument_of_engines(name: str) -> None:
    """An engine's argument is refused before weights load, and the error says what to do."""
    with pytest.raises(UnsupportedError) as caught:
        TransformersModel(checkpoint("T-LLAMA"), **{name: 1})
    assert str(caught.value) == f"{name}= exists on vLLM only. Here, {ENGINE_ONLY[name]}."


def test_an_argument_of_engines_beside_a_configuration() -> None:
    """It is refused also where a configuration is passed, whose fields no keyword sets."""
    config = TransformersModel(checkpoint("T-LLAMA")).config
    with pytest.raises(UnsupportedError, match="^max_model_len= exists on vLLM only"):
        TransformersModel(checkpoint("T-LLAMA"), config=config, max_model_len=8)


def test_a_field_of_the_configuration_is_none_of_them() -> None:
    """What the configuration has as a field of its own goes there, by whatever name."""
    model = TransformersModel(checkpoint("T-LLAMA"), max_position_embeddings=77)
    assert model.config.max_position_embeddings == 77


def test_words_of_one_backend_are_none_of_both() -> None:
    """No word is told to exist on HuggingFace only that means the same on vLLM."""
    assert not set(LOCAL_ONLY) & (set(PORTABLE) | set(VLLM_ONLY) | set(ENGINE_ONLY))
    assert {"do_sample", "num_beams", "stop_strings", "eos_token_id"} <= of_generate()
