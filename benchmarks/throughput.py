"""What many requests with blocks cost beside the same requests without: parts of overhead.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.table import interleaved_us, markdown
from midstream import VLLM


def sections(model: VLLM, name: str, *, requests: int, turns: int) -> list[str]:
    """The tables of one model: `requests` one-token invokes, and loops of 64 steps."""
    header = ["", "s", "ratio", "each, µs"]
    return [
        markdown(
            f"{name}: {requests} one-token invokes in one trace",
            header,
            invoke_rows(model, requests, turns),
        ),
        markdown(
            f"{name}: 64 concurrent requests, 64 steps each",
            header,
            loop_rows(model, 64, 64, turns),
        ),
    ]


def invoke_rows(model: VLLM, count: int, turns: int) -> list[list[str]]:
    """One-token invokes, over plain generation of the same prompts."""
    layers = model.model.layers
    layer, middle = layers[len(layers) // 2], len(layers) // 2
    given = prompts(count)

    def empty() -> None:
        with model.trace(temperature=0.0, max_tokens=1) as tracer:
            for prompt in given:
                with tracer.invoke(prompt):
                    pass

    def read() -> None:
        with model.trace(temperature=0.0, max_tokens=1) as tracer:
            for prompt in given:
                with tracer.invoke(prompt):
                    hidden = layer.output[0].save()

    def mentioned() -> None:
        with model.trace(temperature=0.0, max_tokens=1) as tracer:
            for prompt in given:
                with tracer.invoke(prompt):
                    hidden = model.model.layers[middle].output[0].save()

    works = {
        "plain generate": plain(model, given, max_tokens=1),
        "empty blocks": empty,
        "one layer read": read,
        "one layer read, found from `model` in the block": mentioned,
    }
    return rows(works, count, turns)


def loop_rows(model: VLLM, count: int, steps: int, turns: int) -> list[list[str]]:
    """Requests that read one layer in each of their steps, over plain generation."""
    middle = len(model.model.layers) // 2
    given = prompts(count)

    def read() -> None:
        with model.trace(temperature=0.0, max_tokens=steps, ignore_eos=True) as tracer:
            for prompt in given:
                with tracer.invoke(prompt):
                    rows = [].save()
                    for _ in tracer.iter[:]:
                        rows.append(model.model.layers[middle].output[0])

    works = {
        "plain generate": plain(model, given, max_tokens=steps, ignore_eos=True),
        "one layer read in each step": read,
    }
    return rows(works, count * steps, turns)


def prompts(count: int) -> list[list[int]]:
    """Different prompts of five tokens, so that none is read from another's cache."""
    return [[11 + index % 50, 12, 13, 14, 15 + index // 50] for index in range(count)]


def plain(model: VLLM, given: list[list[int]], **settings: Any) -> Callable[[], None]:
    """VLLM's own generation of all prompts."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, **settings)
    inputs = [{"prompt_token_ids": prompt} for prompt in given]

    def generate() -> None:
        model.vllm_entrypoint.generate(inputs, params, use_tqdm=False)

    return generate


def rows(works: dict[str, Callable[[], None]], count: int, turns: int) -> list[list[str]]:
    """Rows of a table: seconds, ratio to the first work, and what one of `count` costs more."""
    medians = interleaved_us(list(works.values()), repeats=turns, warm=1)
    base = medians[0]
    return [
        [name, f"{us / 1e6:.2f}", f"{us / base:.3f}", f"{(us - base) / count:+.0f}" if i else ""]
        for i, (name, us) in enumerate(zip(works, medians, strict=True))
    ]
