"""Kinds that edit, replace, skip and stop."""

from __future__ import annotations

from typing import Any

import torch

from tests.soak.kinds import Requests, made, traced

VECTOR = torch.randn(128, generator=torch.Generator().manual_seed(1)) * 2


@traced
def steer_the_prompt(model: Any, tracer: Any) -> None:
    model.model.layers[1].output[0][:] += VECTOR


@traced
def steer_every_step(model: Any, tracer: Any) -> None:
    for _ in tracer.all():
        model.model.layers[1].output[0][:] += VECTOR


@traced
def steer_one_row(model: Any, tracer: Any) -> Any:
    model.model.layers[0].output[0][-1] += 3 * VECTOR
    return model.logits


@traced
def ablate(model: Any, tracer: Any) -> None:
    for _ in tracer.all():
        model.model.layers[2].mlp.output[:] = 0


@traced
def replace_a_layer(model: Any, tracer: Any) -> Any:
    hidden, residual = model.model.layers[1].output
    model.model.layers[1].output = (hidden.flip(0), torch.zeros_like(residual))
    return model.model.layers[2].output


@traced
def replace_an_input(model: Any, tracer: Any) -> None:
    for _ in tracer.all():
        mlp = model.model.layers[0].mlp
        mlp.input = mlp.input * 0.5


@traced
def patch_between_layers(model: Any, tracer: Any) -> Any:
    early = model.model.layers[0].mlp.output
    model.model.layers[3].mlp.output = early
    return early


@traced
def edit_embeddings(model: Any, tracer: Any) -> None:
    model.model.embed_tokens.output *= 1.5


@traced
def edit_logits(model: Any, tracer: Any) -> Any:
    for step in tracer.all():
        model.logits[:, 40:] = -1e4
        if step == 1:
            model.logits[:, 7] = 1e4


@traced
def choose_tokens(model: Any, tracer: Any) -> None:
    for step in tracer.all():
        model.samples[:] = 20 + step


@traced
def edit_with_a_cache(model: Any, tracer: Any) -> Any:
    cache = tracer.cache(modules=[model.model.layers[3]])
    for step in tracer.all():
        if step % 2:
            model.model.layers[2].output[1][:] *= 0.5
    return cache["model.layers.3"].output


@traced
def skip_a_layer(model: Any, tracer: Any) -> None:
    for _ in tracer.all():
        _, hidden, residual = model.model.layers[2].inputs[0]
        model.model.layers[2].skip((hidden, residual))


@traced
def skip_an_mlp(model: Any, tracer: Any) -> Any:
    mlp = model.model.layers[1].mlp
    mlp.skip(torch.zeros_like(mlp.input))
    return model.logits


@traced
def operation_written(model: Any, tracer: Any) -> None:
    for _ in tracer.all():
        model.model.layers[1].self_attn.source.self_attn_0.output *= 0.5


@traced
def stop_at_once(model: Any, tracer: Any) -> None:
    model.model.layers[1].output
    tracer.stop()


@traced
def stop_after_a_token(model: Any, tracer: Any) -> None:
    for step in tracer.all():
        model.samples
        if step == 1:
            tracer.stop()


@traced
def stop_by_a_stop_token(model: Any, tracer: Any) -> None:
    """The end of sequence, chosen by the block."""
    for step in tracer.all():
        if step == 2:
            model.logits[:, 1] = 1e5


@made()
def installed_edit(model: Any, ids: list[int], settings: dict[str, Any]) -> Requests:
    """A plain request that an installed edit runs beside; see ``running.Soak``."""
    from midstream.modeling.vllm.data import Request

    return [Request({"prompt_token_ids": ids}, {**settings, "edits": ["halve"]}, b"")]


@made()
def block_beside_an_installed_edit(
    model: Any, ids: list[int], settings: dict[str, Any]
) -> Requests:
    """A block that sees what an installed edit has made."""

    def block(model: Any, tracer: Any) -> Any:
        return model.model.layers[2].output

    tracer = model.trace(ids, block=block, run=False, **settings, edits=["halve"])
    return list(tracer._requests)
