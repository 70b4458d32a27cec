"""The traces of the GPU benchmark: what a user would write, one function each.

A block is what is measured, so that the loops stand here as they are, without helpers.
"""

from __future__ import annotations

import inspect
import itertools
import linecache
import re
from collections.abc import Callable, Sequence
from typing import Any

Prompt = list[int]
_COPIES = itertools.count()


def read_one(model: Any, layer: Any, prompts: Sequence[Prompt], settings: dict[str, Any]) -> Any:
    """Every request reads one layer in each step, and returns it."""
    with model.trace(**settings) as tracer:
        for prompt in prompts:
            with tracer.invoke(prompt):
                rows = [].save()
                for _ in tracer.iter[:]:
                    rows.append(layer.output[0])
    return rows


def read_all(model: Any, prompts: Sequence[Prompt], settings: dict[str, Any]) -> Any:
    """Every request reads all layers in each step, and returns them."""
    with model.trace(**settings) as tracer:
        for prompt in prompts:
            with tracer.invoke(prompt):
                rows = [].save()
                for _ in tracer.iter[:]:
                    rows.append([layer.output[0] for layer in model.model.layers])
    return rows


def record_all(model: Any, prompts: Sequence[Prompt], settings: dict[str, Any]) -> Any:
    """Every request records all layers in a cache; both tensors of a layer's pair travel."""
    with model.trace(**settings) as tracer:
        for prompt in prompts:
            with tracer.invoke(prompt):
                cache = tracer.cache(modules=model.model.layers)
    return cache


def steer(
    model: Any,
    layer: Any,
    prompts: Sequence[Prompt],
    vectors: Sequence[Any],
    settings: dict[str, Any],
) -> None:
    """Every request adds a vector of its own to one layer in each step."""
    with model.trace(**settings) as tracer:
        for prompt, vector in zip(prompts, vectors, strict=True):
            with tracer.invoke(prompt):
                own = vector.to(model.model.norm.weight.device)
                for _ in tracer.iter[:]:
                    stream = layer.output[0]
                    stream += own


def lens(model: Any, layer: Any, prompts: Sequence[Prompt], settings: dict[str, Any]) -> Any:
    """Every request asks in each step what the model would say after one layer."""
    with model.trace(**settings) as tracer:
        for prompt in prompts:
            with tracer.invoke(prompt):
                guesses = [].save()
                for _ in tracer.iter[:]:
                    stream = model.model.norm(sum(layer.output)[-1:])
                    guesses.append(model.logits_processor(model.lm_head, stream).argmax(-1))
    return guesses


def follow(
    model: Any, early: Any, late: Any, prompts: Sequence[Prompt], settings: dict[str, Any]
) -> tuple[Any, Any]:
    """Every request reads the layer that the parity of its last token chooses."""
    with model.trace(**settings) as tracer:
        for number, prompt in enumerate(prompts):
            with tracer.invoke(prompt, seed=number):
                rows, drawn = [].save(), [].save()
                chosen = early
                for _ in tracer.iter[:]:
                    rows.append(chosen.output[0])
                    drawn.append(int(model.samples))
                    chosen = late if drawn[-1] % 2 else early
    return rows, drawn


def read_pair(
    model: Any, early: Any, late: Any, prompt: Prompt, settings: dict[str, Any]
) -> tuple[Any, Any]:
    """Two layers of a prompt."""
    with model.trace(prompt, **settings):
        first = early.output[0].save()
        second = late.output[0].save()
    return first, second


def read_prompt(
    model: Any, layer: Any, prompt: Prompt, settings: dict[str, Any]
) -> tuple[Any, Any]:
    """One layer and the logits of a prompt."""
    with model.trace(prompt, **settings):
        hidden = layer.output[0].save()
        logits = model.logits.save()
    return hidden, logits


def read_prompts(
    model: Any, layer: Any, prompts: Sequence[Prompt], settings: dict[str, Any]
) -> Any:
    """One layer of many prompts."""
    with model.trace(**settings) as tracer:
        for prompt in prompts:
            with tracer.invoke(prompt):
                hidden = layer.output[0].save()
    return hidden


def read_stacks(model: Any, prompts: Sequence[Prompt], settings: dict[str, Any]) -> Any:
    """All layers of long prompts."""
    with model.trace(**settings) as tracer:
        for prompt in prompts:
            with tracer.invoke(prompt):
                hidden = [layer.output[0] for layer in model.model.layers].save()
    return hidden


def capture_reads(
    model: Any, layer: Any, prompts: Sequence[Prompt], settings: Sequence[dict[str, Any]]
) -> Any:
    """The trace of ``read_one``, captured and not run; settings are each request's own."""
    with model.trace(run=False) as tracer:
        for prompt, own in zip(prompts, settings, strict=True):
            with tracer.invoke(prompt, **own):
                rows = [].save()
                for _ in tracer.iter[:]:
                    rows.append(layer.output[0])
    return tracer


def fresh(function: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of a function above whose block no engine has seen: names in it differ.

    What an engine learned of a block must not serve the row of its first run.
    """
    number = next(_COPIES)
    source = re.sub(r"\b(tracer|hidden)\b", rf"\1_{number}", inspect.getsource(function))
    name = f"<{function.__name__} {number}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    space = dict(globals())
    exec(compile(source, name, "exec", dont_inherit=True), space)
    return space[function.__name__]
