"""A keyword of HuggingFace is an error on vLLM that says what to write there."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from midstream.modeling.spellings import ENGINE_ONLY, LOCAL_ONLY
from tests.support.checkpoints import checkpoint


@pytest.mark.parametrize("name", LOCAL_ONLY)
def test_a_setting_of_huggingface(llama: Any, name: str) -> None:
    """A keyword of HuggingFace's traces is refused before anything runs (O15)."""
    with pytest.raises(TypeError, match=f"^'{name}' is not a sampling setting") as caught:
        llama.trace([1, 2], **{name: 1})
    assert str(caught.value).endswith(f"HuggingFace only. Here, {LOCAL_ONLY[name]}.")


@pytest.mark.parametrize("name", ["device_map", "peft", "torch_dtype", "attn_implementation"])
def test_an_argument_of_loading(name: str) -> None:
    """A keyword of HuggingFace's loading is refused before an engine is built (O15)."""
    from midstream import VLLM

    with pytest.raises(TypeError, match=f"^'{name}' is not an argument of vLLM's") as caught:
        VLLM(str(checkpoint("T-LLAMA")), **{name: "auto"})
    assert str(caught.value).endswith(f"HuggingFace only. Here, {LOCAL_ONLY[name]}.")


def test_what_is_named_instead_exists(llama: Any) -> None:
    """Words of one backend alone are not the other's too, and what is named instead is (O15)."""
    from vllm import EngineArgs, SamplingParams

    settings = set(inspect.signature(SamplingParams).parameters)
    engine = set(inspect.signature(EngineArgs).parameters)
    ours = {"batch_invariant", "block_timeout", "max_save_bytes", "max_snapshot_bytes"}
    assert not set(LOCAL_ONLY) & (settings | engine)
    assert set(ENGINE_ONLY) - ours - {"mode", "taps"} <= engine
    assert {"attention_backend", "enable_lora", "quantization"} <= engine
    assert {"n", "stop", "min_tokens", "stop_token_ids", "logit_bias", "bad_words"} <= settings


@pytest.mark.parametrize("name", ["pipe", "processor", "load_adapter", "module"])
def test_an_attribute_of_a_local_model(llama: Any, name: str) -> None:
    """What only a HuggingFace model has is named as such, with the way to one (O15)."""
    from midstream import TransformersModel

    assert hasattr(TransformersModel, name)
    with pytest.raises(AttributeError, match=rf"{name}.*`model.transformers\(\)` gives one"):
        getattr(llama, name)
