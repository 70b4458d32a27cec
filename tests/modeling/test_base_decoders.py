"""HuggingFace decoders as plain modules: `Model(module)` meets them as hooks and autograd do."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch

from midstream import Model
from tests.support.checkpoints import A, C
from tests.support.local_modules import (
    assert_untouched,
    causal,
    changed,
    equal,
    far,
    hooked,
)


class Places(NamedTuple):
    """Paths of one architecture, ``{}`` being a layer's number.

    Attributes:
        operation: in the layer's MLP or attention, a call with its module.
    """

    layer: str
    attention: str
    mlp: str
    norm: str
    module: str
    operation: str


_LLAMA = Places("model.layers.{}", "self_attn", "mlp", "model.norm", "mlp", "self_down_proj_0")
DECODERS = {
    "T-LLAMA": _LLAMA,
    "T-GEMMA2": _LLAMA,
    "T-MIXTRAL": _LLAMA._replace(module="self_attn", operation="self_o_proj_0"),
    "T-GPT2": Places("transformer.h.{}", "attn", "mlp", "transformer.ln_f", "mlp", "self_c_proj_0"),
    "T-NEOX": Places(
        "gpt_neox.layers.{}",
        "attention",
        "mlp",
        "gpt_neox.final_layer_norm",
        "mlp",
        "self_dense_4h_to_h_0",
    ),
    "T-BLOOM": Places(
        "transformer.h.{}", "self_attention", "mlp", "transformer.ln_f", "mlp", "self_gelu_impl_0"
    ),
}
IDS, OTHER = torch.tensor([A]), torch.tensor([C[:5]])


@pytest.fixture(params=DECODERS)
def name(request: pytest.FixtureRequest) -> str:
    """Each of the decoders."""
    return str(request.param)


def _model(name: str) -> tuple[Any, Model, Places]:
    module = causal(name)
    return module, Model(module), DECODERS[name]


def _logits(module: Any, ids: torch.Tensor) -> torch.Tensor:
    return module(ids, use_cache=False).logits


def _first(value: Any) -> torch.Tensor:
    return value[0] if isinstance(value, tuple) else value


def test_every_layer_is_read(name: str) -> None:
    """Inputs and outputs of layers, attention, MLP and last norm are as hooks see them (H20)."""
    module, model, places = _model(name)
    paths = [
        f"{places.layer}.{part}".format(layer).rstrip(".")
        for layer in range(2)
        for part in ("", places.attention, places.mlp)
    ]
    with torch.no_grad():
        seen, result = hooked(module, IDS, use_cache=False)
        for path in [*paths, places.norm, "lm_head"]:
            with model.trace(IDS, use_cache=False) as tracer:
                inputs = model.get(path).inputs.save()
                if inputs[0] or inputs[1]:
                    first = model.get(path).input.save()
                output = model.get(path).output.save()
            args, kwargs = seen[path].args, seen[path].kwargs
            assert equal(inputs, (args, kwargs)), path
            assert equal(first, args[0] if args else next(iter(kwargs.values()))), path
            assert equal(output, seen[path].output), path
            assert type(tracer.result) is type(result)
            assert torch.equal(tracer.result.logits, result.logits)
    outputs = [_first(seen[path].output) for path in paths]
    assert all(far(a, b) for a, b in pairwise(outputs))
    assert_untouched(module)


def test_layers_are_written(name: str) -> None:
    """An edit in place and a replacement at a layer have the effect of a hook's (H20, O6)."""
    module, model, places = _model(name)
    path = places.layer.format(0)

    def edit(value: torch.Tensor) -> torch.Tensor:
        value = value.clone()
        value[:, -1] *= 2.0
        return value

    with torch.no_grad():
        expected = changed(module, path, edit, lambda: _logits(module, IDS))
        with model.trace(IDS, use_cache=False):
            out = model.get(path).output
            (out[0] if isinstance(out, tuple) else out)[:, -1] *= 2.0
            in_place = model.output.logits.save()
        with model.trace(IDS, use_cache=False):
            out = model.get(path).output
            if isinstance(out, tuple):
                new = (out[0].clone(), *out[1:])
                new[0][:, -1] *= 2.0
            else:
                new = out.clone()
                new[:, -1] *= 2.0
            model.get(path).output = new
            replaced = model.output.logits.save()
        assert far(expected, _logits(module, IDS))
        assert torch.equal(in_place, expected)
        assert torch.equal(replaced, expected)


def test_a_layer_is_skipped(name: str) -> None:
    """A layer that is skipped for its own input is a layer that does nothing (H20, O7)."""
    module, model, places = _model(name)
    with torch.no_grad():
        seen, _ = hooked(module, IDS, use_cache=False)
        path = places.layer.format(1)
        given = seen[path].args[0]
        tail = module.get_submodule(places.norm)(given)
        head = module.get_output_embeddings()(tail)
        if name == "T-GEMMA2":
            cap = module.config.final_logit_softcapping
            head = torch.tanh(head / cap) * cap
        for _ in range(2):
            with model.trace(IDS, use_cache=False):
                hidden = model.get(path).input
                pair = (hidden, *seen[path].output[1:])
                is_tuple = isinstance(seen[path].output, tuple)
                model.get(path).skip(pair if is_tuple else hidden)
                logits = model.output.logits.save()
            assert torch.equal(logits, head)
        assert far(head, _logits(module, IDS))


def test_one_input_is_patched_into_another(name: str) -> None:
    """Two invokes share a forward: each reads its rows, one takes the other's (H15, H17, H20)."""
    module, model, places = _model(name)
    path = places.layer.format(0)
    with torch.no_grad():
        seen, _ = hooked(module, torch.cat([IDS, OTHER]), use_cache=False)
        both = _first(seen[path].output)

        def patch(value: torch.Tensor) -> torch.Tensor:
            value = value.clone()
            value[1, 2] = value[0, 2]
            return value

        expected = changed(module, path, patch, lambda: _logits(module, torch.cat([IDS, OTHER])))
        with model.trace() as tracer:
            barrier = tracer.barrier(2)
            with tracer.invoke(IDS, use_cache=False):
                out = model.get(path).output
                source = (out[0] if isinstance(out, tuple) else out).save()
                barrier()
                plain = model.output.logits.save()
            with tracer.invoke(OTHER, use_cache=False):
                out = model.get(path).output
                mine = out[0] if isinstance(out, tuple) else out
                kept = mine.clone().save()
                barrier()
                mine[:, 2] = source[:, 2]
                logits = model.output.logits.save()
        assert torch.equal(source, both[:1])
        assert torch.equal(kept, both[1:])
        assert torch.equal(plain, expected[:1])
        assert torch.equal(logits, expected[1:])
        assert far(expected[1:], _logits(module, torch.cat([IDS, OTHER]))[1:])


def test_an_operation_is_read_and_written(name: str) -> None:
    """A call inside a forward is an operation that is read, and edited in place (H20)."""
    module, model, places = _model(name)
    path = f"{places.layer.format(0)}.{places.module}"
    operation = places.operation
    with torch.no_grad():
        seen, _ = hooked(module, IDS, use_cache=False)
        inner = operation.removeprefix("self_").rpartition("_")[0]
        with model.trace(IDS, use_cache=False):
            value = getattr(model.get(path).source, operation).output.save()
        assert torch.equal(value, seen[f"{path}.{inner}"].output)
        expected = changed(
            module, f"{path}.{inner}", lambda value: value * 0, lambda: _logits(module, IDS)
        )
        with model.trace(IDS, use_cache=False):
            getattr(model.get(path).source, operation).output[:] = 0
            logits = model.output.logits.save()
        assert torch.equal(logits, expected)
        assert far(logits, _logits(module, IDS))


def test_everything_is_cached(name: str) -> None:
    """A cache of all modules holds what hooks see of each (H20)."""
    module, model, _ = _model(name)
    with torch.no_grad():
        seen, _ = hooked(module, IDS, use_cache=False)
        with model.trace(IDS, use_cache=False) as tracer:
            cache = tracer.cache(include_inputs=True)
    once = [path for path, entry in cache.items() if not isinstance(entry.output, list)]
    assert len(once) > 10
    for path in once:
        if seen[path].output is not None:
            assert equal(cache[path].output, seen[path].output), path


def test_gradients_at_what_was_read(name: str) -> None:
    """`torch.autograd.grad` at a value, in the block and after it, is plain autograd's (H20)."""
    module, model, places = _model(name)
    paths = [places.layer.format(0), f"{places.layer.format(1)}.{places.mlp}", places.norm]
    held: dict[str, torch.Tensor] = {}
    handles = [
        module.get_submodule(path).register_forward_hook(
            lambda _module, _args, output, path=path: held.__setitem__(path, _first(output))
        )
        for path in paths
    ]
    logits = _logits(module, IDS)
    for handle in handles:
        handle.remove()
    expected = torch.autograd.grad(logits[0, -1].pow(2).sum(), [held[path] for path in paths])
    with model.trace(IDS, use_cache=False):
        values = []
        for path in paths:
            out = model.get(path).output
            values.append(out[0] if isinstance(out, tuple) else out)
        loss = model.output.logits[0, -1].pow(2).sum().save()
        inside = torch.autograd.grad(loss, values, retain_graph=True)
        values.save()
        inside.save()
    after = torch.autograd.grad(loss, values)
    for got, again, right in zip(inside, after, expected, strict=True):
        assert torch.equal(got, right)
        assert torch.equal(again, right)
        assert right.abs().max() > 0


def test_parts_of_the_stream_add_up(name: str) -> None:
    """Sublayers add up to the stream; BLOOM's already hold what was there before (case 71)."""
    _, model, places = _model(name)
    layer = model.get(places.layer.format(1))
    children = {"attention": places.attention, "mlp": places.mlp}
    if name == "T-GEMMA2":  # what is added is behind a further norm
        children = {"attention": "post_attention_layernorm", "mlp": "post_feedforward_layernorm"}
    with torch.no_grad(), model.trace(IDS, use_cache=False):
        parts = {}
        before = layer.input.save()
        parts["attention"] = layer.get(f"{children['attention']}.output")
        parts["mlp"] = layer.get(f"{children['mlp']}.output")
        after = layer.output.save()
        parts.save()
    attention, mlp, after = map(_first, (parts["attention"], parts["mlp"], after))
    holds = name == "T-BLOOM"
    total = mlp if holds else before + attention + mlp
    wrong = before + attention + mlp if holds else mlp
    torch.testing.assert_close(after, total)
    assert far(wrong, total)
