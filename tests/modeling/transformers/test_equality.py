"""Blocks do what plain PyTorch hooks and autograd do, bit for bit, on decoders of six kinds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from midstream import TransformersModel
from tests.support.checkpoints import A
from tests.support.hooking import first, hooked, reading

OTHER = [25, 26, 27, 28, 29]
"""As long as A."""

TOKEN = 7


class Sites(NamedTuple):
    """Where the parts of a decoder are."""

    layers: str
    attention: str
    mlp: str


SITES = {
    "T-GPT2": Sites("transformer.h", "attn", "mlp"),
    "T-LLAMA": Sites("model.layers", "self_attn", "mlp"),
    "T-GEMMA2": Sites("model.layers", "self_attn", "mlp"),
    "T-NEOX": Sites("gpt_neox.layers", "attention", "mlp"),
    "T-BLOOM": Sites("transformer.h", "self_attention", "mlp"),
    "T-MIXTRAL": Sites("model.layers", "self_attn", "mlp"),
}


class Decoder(NamedTuple):
    """A model with the paths of its parts."""

    model: TransformersModel
    sites: Sites

    @property
    def module(self) -> Any:
        return self.model.module

    def path(self, layer: int, part: str = "") -> str:
        """Of a layer, or of its "attention" or "mlp"."""
        at = f"{self.sites.layers}.{layer}"
        return f"{at}.{getattr(self.sites, part)}" if part else at

    def node(self, layer: int, part: str = "") -> Any:
        return self.model.get(self.path(layer, part))

    def logits(self, *rows: list[int]) -> torch.Tensor:
        """Of plain PyTorch, of all positions."""
        found: torch.Tensor = self.module(torch.tensor(rows)).logits
        return found

    def ids(self, row: list[int], count: int) -> torch.Tensor:
        """Of plain transformers, greedy."""
        found: torch.Tensor = self.module.generate(
            torch.tensor([row]), attention_mask=torch.ones(1, len(row)), max_new_tokens=count
        )
        return found


@pytest.fixture(params=SITES)
def decoder(request: pytest.FixtureRequest, traced: Callable[[str], TransformersModel]) -> Decoder:
    """Each of the decoders."""
    return Decoder(traced(request.param), SITES[request.param])


def test_reads(decoder: Decoder) -> None:
    """What layers, attention and MLP return is what hooks see, and all else is as without (H20)."""
    paths = [decoder.path(layer, part) for layer in (0, 1) for part in ("attention", "mlp", "")]
    with reading(decoder.module, *paths) as seen:
        logits = decoder.logits(A)
    with decoder.model.trace(A) as tracer:
        values = [first(decoder.model.get(path).output) for path in paths].save()
        last = decoder.model.logits.save()
    right = [first(seen[path][0]) for path in paths]
    assert all(map(torch.equal, values, right))
    assert not any(torch.allclose(a, b) for a, b in zip(right, right[3:], strict=False))
    assert not torch.allclose(right[0], right[2])
    assert torch.equal(last, logits[:, -1])
    assert torch.equal(tracer.result.logits, logits)


def flipped(output: Any) -> Any:
    """The output with its hidden states in reverse, as a new value; a norm does not undo that."""
    if isinstance(output, tuple):
        return (output[0].flip(-1), *output[1:])
    return output.flip(-1)


@pytest.mark.parametrize("part", ["", "attention", "mlp"])
@pytest.mark.parametrize("assigned", [False, True])
def test_writes(decoder: Decoder, part: str, assigned: bool) -> None:
    """An edit, in place or assigned, is the same change in a hook (H20)."""
    node, path = decoder.node(1, part), decoder.path(1, part)
    with hooked(decoder.module, {path: flipped}):
        right = decoder.logits(A)
    with decoder.model.trace(A) as tracer:
        if assigned:
            node.output = flipped(node.output)
        else:
            first(node.output)[:] = first(node.output).flip(-1)
    assert not torch.allclose(right[:, -1], decoder.logits(A)[:, -1], atol=1e-2)
    assert torch.equal(tracer.result.logits, right)


def plain_gradients(decoder: Decoder) -> list[torch.Tensor]:
    """Of one logit with respect to two layers' streams."""
    with reading(decoder.module, decoder.path(0), decoder.path(1)) as seen:
        loss = decoder.logits(A)[0, -1, TOKEN]
    return list(torch.autograd.grad(loss, [first(each[0]) for each in seen.values()]))


def test_gradients(decoder: Decoder) -> None:
    """Gradients in a backward statement, and of plain autograd after it, are PyTorch's (H22)."""
    right = plain_gradients(decoder)
    assert not torch.equal(*right)
    with decoder.model.trace(A):
        streams = [first(decoder.node(layer).output) for layer in (0, 1)].save()
        loss = decoder.model.logits[0, TOKEN].save()
        with loss.backward(retain_graph=True):
            late = streams[1].grad.save()
            early = streams[0].grad.save()
    assert torch.equal(early, right[0])
    assert torch.equal(late, right[1])
    assert all(map(torch.equal, torch.autograd.grad(loss, streams), right))


def test_gradients_behind_an_edit(decoder: Decoder) -> None:
    """An edit of the forward and one of a gradient both are in the gradients before them (H22)."""

    def halved(output: Any) -> Any:
        first(output).register_hook(lambda gradient: gradient * 0.5)
        return flipped(output)

    with (
        hooked(decoder.module, {decoder.path(1): halved}),
        reading(decoder.module, decoder.path(0)) as seen,
    ):
        loss = decoder.logits(A)[0, -1, TOKEN]
    (right,) = torch.autograd.grad(loss, first(seen[decoder.path(0)][0]))
    with decoder.model.trace(A):
        early = first(decoder.node(0).output)
        late = first(decoder.node(1).output)
        decoder.node(1).output = flipped(decoder.node(1).output)
        answer = decoder.model.logits[0, TOKEN]
        with answer.backward():
            late.grad[:] *= 0.5
            gradient = early.grad.save()
    assert not torch.allclose(right, plain_gradients(decoder)[0])
    assert torch.equal(gradient, right)


def test_patches_between_invokes(decoder: Decoder) -> None:
    """One prompt's last stream, put into another's, is a hook that copies rows (H14, H20)."""

    def copied(output: Any) -> None:
        first(output)[1, -1] = first(output)[0, -1]

    with torch.no_grad(), hooked(decoder.module, {decoder.path(0): copied}):
        right = decoder.logits(A, OTHER)
    with torch.no_grad(), decoder.model.trace() as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke(A):
            stream = first(decoder.node(0).output)[:, -1]
            barrier()
        with tracer.invoke(OTHER):
            own = first(decoder.node(0).output)
            barrier()
            own[:, -1] = stream
    assert not torch.allclose(right[1, -1], decoder.logits(OTHER)[0, -1], atol=1e-2)
    assert torch.equal(tracer.result.logits, right)


def test_skips(decoder: Decoder) -> None:
    """A skipped layer is one whose input a hook gives on (H20)."""
    layer = decoder.module.get_submodule(decoder.path(1))

    def passed_on(module: Any, args: Any, kwargs: Any, output: Any) -> Any:
        entered = args[0] if args else kwargs["hidden_states"]
        return (entered, *output[1:]) if isinstance(output, tuple) else entered

    handle = layer.register_forward_hook(passed_on, with_kwargs=True)
    right = decoder.logits(A)
    handle.remove()
    with decoder.model.trace(A) as tracer:
        before = decoder.node(0).output
        decoder.node(1).skip(before)
    assert not torch.allclose(right[:, -1], decoder.logits(A)[:, -1], atol=1e-2)
    assert torch.equal(tracer.result.logits, right)


def test_generation_that_is_read(decoder: Decoder) -> None:
    """Reading a layer at each step leaves the greedy tokens as they are (H9, H10, H11, H12)."""
    path = decoder.path(1)
    with torch.no_grad(), reading(decoder.module, path) as seen:
        right = decoder.ids(A, 4)
    with decoder.model.generate(A, max_new_tokens=4) as tracer:
        streams, tokens = [].save(), [].save()
        for _ in tracer.iter[:]:
            streams.append(first(decoder.node(1).output))
            tokens.append(decoder.model.samples.item())
    assert torch.equal(tracer.result, right)
    assert tokens == right[0, len(A) :].tolist()
    assert len(streams) == 4
    assert all(map(torch.equal, streams, (first(each) for each in seen[path])))


def test_generation_that_is_steered(decoder: Decoder) -> None:
    """A vector that is added at each step is a hook that adds it (H20)."""
    size = decoder.module.get_input_embeddings().weight.shape[1]
    vector = torch.randn(size, generator=torch.Generator().manual_seed(3)) * 10

    def steered(output: Any) -> None:
        first(output).add_(vector)

    with hooked(decoder.module, {decoder.path(1): steered}):
        right = decoder.ids(A, 4)
    with decoder.model.generate(A, max_new_tokens=4) as tracer:
        for _ in tracer.iter[:]:
            first(decoder.node(1).output)[:] += vector
    assert right.tolist() != decoder.ids(A, 4).tolist()
    assert torch.equal(tracer.result, right)
