"""Kinds that read, record and keep, and plain requests between them."""

from __future__ import annotations

from typing import Any

import torch

from midstream.modeling.vllm.data import Request
from tests.soak.kinds import Requests, made, traced, with_settings


@made(most=220)
def plain(model: Any, ids: list[int], settings: dict[str, Any]) -> Requests:
    """No block; longer than a step at times, so that its prompt is run in pieces."""
    return [Request({"prompt_token_ids": ids}, dict(settings), b"")]


@made(most=220)
def plain_scored(model: Any, ids: list[int], settings: dict[str, Any]) -> Requests:
    """No block, with log probabilities."""
    return [Request({"prompt_token_ids": ids}, {**settings, "logprobs": 2}, b"")]


@made()
def plain_penalised(model: Any, ids: list[int], settings: dict[str, Any]) -> Requests:
    """No block, with a penalty that looks at what was generated."""
    own = {"repetition_penalty": 1.3, "presence_penalty": 0.4}
    return [Request({"prompt_token_ids": ids}, {**settings, **own}, b"")]


@traced
def nothing(model: Any, tracer: Any) -> None:
    """A block without a statement that wants anything."""


@traced
def read_one_layer(model: Any, tracer: Any) -> Any:
    return model.model.layers[1].output


@traced
def read_all_layers(model: Any, tracer: Any) -> Any:
    return [sum(layer.output) for layer in model.model.layers]


@traced
def read_inside(model: Any, tracer: Any) -> Any:
    layer = model.model.layers[2]
    return {
        "attention": layer.self_attn.o_proj.input,
        "mlp": layer.mlp.inputs[0][0],
        "logits": model.logits,
        "token": model.samples,
    }


@traced
def read_kept_through_all_steps(model: Any, tracer: Any) -> Any:
    """A value kept without a clone while the engine reuses its buffers."""
    kept = model.model.layers[0].output
    for _ in tracer.all():
        model.samples
    return kept


@traced
def loop_of_reads(model: Any, tracer: Any) -> Any:
    found = []
    for _ in tracer.all():
        found.append((model.model.layers[3].output[0][-1:], int(model.samples)))
    return found


@traced
def loop_of_logits(model: Any, tracer: Any) -> Any:
    found = []
    for _ in tracer.all():
        found.append(model.logits)
    return found


@traced
def loop_over_some_steps(model: Any, tracer: Any) -> Any:
    found = []
    for step in tracer.iter[1:3]:
        found.append((step, sum(model.model.layers[1].output)))
    return found


@traced
def loop_over_a_late_step(model: Any, tracer: Any) -> Any:
    found = []
    for _ in tracer.iter[4]:
        found.append(model.model.norm.output[0])
    return found


@traced
def cache_of_outputs(model: Any, tracer: Any) -> Any:
    cache = tracer.cache(modules=[model.model.layers[1], model.model.layers[2].mlp])
    for _ in tracer.all():
        model.samples
    return {path: module.output for path, module in cache.items()}


@traced
def cache_beside_an_edit(model: Any, tracer: Any) -> Any:
    cache = tracer.cache(modules=[model.model.layers[2]], include_inputs=True)
    model.model.layers[1].mlp.output[:] = 0
    for _ in tracer.all():
        model.samples
    return cache["model.layers.2"].inputs


@traced
def module_called(model: Any, tracer: Any) -> Any:
    """A logit lens."""
    hidden, residual = model.model.layers[1].output
    normed = model.model.norm(hidden + residual)
    return model.logits_processor(model.lm_head, normed)


@traced
def operation_read(model: Any, tracer: Any) -> Any:
    return model.model.layers[1].self_attn.source.self_attn_0.output


@traced
def large_save(model: Any, tracer: Any) -> Any:
    """What goes home through shared memory."""
    hidden = model.model.layers[0].output[0]
    return hidden[:1].repeat(4000, 1)


@with_settings(n=2, temperature=1.0, seed=3)
def two_sequences(model: Any, tracer: Any) -> Any:
    found = []
    for _ in tracer.all():
        found.append(int(model.samples))
    return found


@made()
def three_invokes(model: Any, ids: list[int], settings: dict[str, Any]) -> Requests:
    """A trace of three requests: a reader, an editor, and one between that does nothing."""
    with model.trace(run=False, **settings) as tracer:
        with tracer.invoke(ids):
            stream = sum(model.model.layers[2].output).save()
        with tracer.invoke(ids[: len(ids) // 2 + 1]):
            pass
        with tracer.invoke(ids):
            model.model.layers[0].mlp.output[:] = torch.zeros(128)
            stream = sum(model.model.layers[2].output).save()
    return list(tracer._requests)
