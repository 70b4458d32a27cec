"""Sampling settings, by vLLM's words or transformers' own, as keywords of `generate`."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from midstream.errors import UnsupportedError
from midstream.modeling.transformers.raw import RAW
from midstream.modeling.transformers.signature import Signature
from midstream.modeling.transformers.words import (
    ALIASES,
    PORTABLE,
    VLLM_ONLY,
    of_configuration,
    of_generate,
)


@dataclass(frozen=True)
class Generation:
    """Settings of one call of `generate`.

    Attributes:
        keywords: keyword arguments of `generate`, without inputs.
        seed: what `seeded` is to be given around the call; None: the generators as they are.
    """

    keywords: dict[str, Any]
    seed: int | None = None


def split(
    keywords: Mapping[str, Any], signature: Signature, *, generate: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(inputs, settings) of the keywords of `trace` or `generate`.

    Args:
        keywords: what was passed beside the positional input.
        signature: what the model's forward takes.
        generate: whether they are for `generate`, whose configuration has fields by names that
            forwards have too (`use_cache`, `output_attentions`, ...).

    Raises:
        TypeError: a keyword that nobody knows, naming the nearest one.
        UnsupportedError: a keyword of vLLM, with what to do here.
    """
    inputs, settings = {}, {}
    for name, value in keywords.items():
        if name in PORTABLE or (name in of_generate() and not _is_input(name, signature, generate)):
            settings[name] = value
        elif name in RAW or (name not in VLLM_ONLY and signature.takes(name)):
            inputs[name] = value
        elif name not in VLLM_ONLY:
            raise _unknown(name, signature)
        elif value is not None:
            raise UnsupportedError(f"{name}= exists on vLLM only. Here, {VLLM_ONLY[name]}.")
    return inputs, settings


def check_forward(settings: Mapping[str, Any]) -> None:
    """Check the settings of one forward, which draws no token: sampling words mean nothing to it.

    Raises:
        ValueError: more than one token, or sequence, is asked for.
        TypeError: a setting that only `generate` has.
    """
    for name, value in settings.items():
        if name not in PORTABLE:
            raise TypeError(
                f"'{name}' is a setting of `generate`: a trace is one forward and draws no token. "
                "Use `model.generate(...)`, or leave it out."
            )
        if name in ("max_tokens", "max_new_tokens", "min_tokens", "n") and (value or 1) > 1:
            raise ValueError(
                f"{name}={value}: a trace is one forward and draws no token. Use "
                f"`model.generate(..., {name}={value})`, or leave it out."
            )


def generation(
    settings: Mapping[str, Any], *, generation_config: Any = None, tokenizer: Any = None
) -> Generation:
    """Settings as keywords of `generate`.

    vLLM's words stand for transformers' (max_tokens, min_tokens, n, stop, stop_token_ids,
    ignore_eos, top_k=-1), and `generate`'s own go through as they are. A temperature above 0
    samples and 0 is greedy, unless `do_sample` says otherwise. What is left out has the default
    of the checkpoint's generation configuration: without any, greedy decoding, where vLLM draws
    at temperature 1.0; and when sampling, the 50 most likely tokens, where vLLM has all
    (``top_k=-1``).

    Args:
        settings: what `split` gave.
        generation_config: the model's, for its end-of-sequence tokens.
        tokenizer: for stop strings.

    Raises:
        TypeError: two names of one setting with different values.
        ValueError: a temperature below 0, or one of 0 while sampling.
    """
    found = {name: value for name, value in settings.items() if _is_said(name, value)}
    for word, own in ALIASES.items():
        if word in found:
            _rename(found, word, own)
    seed = found.pop("seed", None)
    _sample(found)
    if found.get("top_k") == -1:
        found["top_k"] = 0
    _stop(found, generation_config)
    if found.get("stop_strings") is not None and tokenizer is not None:
        found.setdefault("tokenizer", tokenizer)
    return Generation(found, seed)


@contextmanager
def seeded(seed: int | None, device: torch.device | None = None) -> Iterator[None]:
    """Draw from a seed in the body of a `with`; afterwards the generators are as before.

    A call with one seed gives the same tokens each time, whatever was drawn before it, and moves
    nobody else's random numbers. It does not give those of vLLM, whose sampler is another one.

    Args:
        seed: None leaves the generators alone.
        device: where the model draws, beside the CPU.
    """
    if seed is None:
        yield
        return
    kind = "cuda" if device is None or device.type == "cpu" else device.type
    devices = [] if device is None or device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type=kind):
        torch.manual_seed(seed)
        yield


def _is_input(name: str, signature: Signature, generate: bool) -> bool:
    """Whether a name that `generate` has too is meant for the forward."""
    if not signature.takes(name) or signature.more is None:
        return name in signature.names
    return not (generate and name in of_configuration())


def _unknown(name: str, signature: Signature) -> TypeError:
    known = [*PORTABLE, *RAW, *sorted(signature.names), *sorted(of_generate())]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f" Did you mean '{near[0]}'?" if near else ""
    return TypeError(
        f"'{name}' is neither a keyword of {signature.model}.forward nor a setting of "
        f"`generate`.{hint}"
    )


def _is_said(name: str, value: Any) -> bool:
    """None is the default of vLLM's words; transformers' own may mean something by it."""
    return value is not None or name not in PORTABLE


def _rename(settings: dict[str, Any], word: str, own: str) -> None:
    value = settings.pop(word)
    other = settings.get(own)
    if other is not None and other != value:
        raise TypeError(
            f"{word}={value!r} and {own}={other!r} are two names of one setting: pass one."
        )
    settings[own] = value


def _sample(settings: dict[str, Any]) -> None:
    temperature = settings.get("temperature")
    if temperature is None:
        return
    if temperature < 0:
        raise ValueError(f"temperature={temperature}: expected 0, which is greedy, or more.")
    if temperature > 0:
        settings.setdefault("do_sample", True)
        return
    if settings.get("do_sample"):
        raise ValueError("temperature=0 is greedy, and do_sample=True samples: pass one of them.")
    del settings["temperature"]
    settings["do_sample"] = False


def _stop(settings: dict[str, Any], generation_config: Any) -> None:
    """Say which tokens end a sequence, where that differs from the model's own."""
    more = settings.pop("stop_token_ids", None)
    ignored = settings.pop("ignore_eos", False)
    if not more and not ignored:
        return
    ends = settings.get("eos_token_id", getattr(generation_config, "eos_token_id", None))
    own = [] if ends is None or ignored else [ends] if isinstance(ends, int) else list(ends)
    settings["eos_token_id"] = [*dict.fromkeys([*own, *(more or [])])] or None
