"""The same work on a local model by hand, with PyTorch's hooks, and as blocks of a library."""

from __future__ import annotations

import copy
import importlib.util
import itertools
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Values = list[Tensor]
"""What a work has read, for the comparison with the others."""


@dataclass(frozen=True)
class Case:
    """What is worked on.

    Attributes:
        module: a GPT-2 of transformers.
        ids: tokens of one prompt, ``[1, T]``.
        batch: of several, ``[B, T]``.
        tokens: how many `generate` makes.
    """

    module: Any
    ids: Tensor
    batch: Tensor
    tokens: int

    @property
    def middle(self) -> int:
        """Number of the layer that is read."""
        return len(self.module.transformer.h) // 2


def case(layers: int, tokens: int, prompts: int, **sizes: int) -> Case:
    """GPT-2 with random weights, on a GPU if there is one."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = GPT2Config(n_layer=layers, bos_token_id=0, eos_token_id=0, **sizes)
    module = GPT2LMHeadModel(config).to(device).eval()
    module.generation_config.eos_token_id = None  # all make the same number of tokens
    module.generation_config.pad_token_id = 0
    batch = torch.randint(module.config.vocab_size, (prompts, 16), device=device)
    return Case(module, batch[:1], batch, tokens)


def with_same_weights(module: nn.Module) -> Any:
    """Another module with the same parameters and buffers, the very tensors.

    Each way works on modules of its own: nnsight puts a forward of its own into every module that
    it is given, for good, and whoever else calls that module runs it too.
    """
    held = itertools.chain(module.parameters(), module.buffers())
    return copy.deepcopy(module, {id(tensor): tensor for tensor in held})


@contextmanager
def hook(module: nn.Module, function: Callable[[Any], Any]) -> Any:
    """A forward hook for as long as the `with` lasts, called with the output."""
    handle = module.register_forward_hook(lambda _module, _args, output: function(output))
    try:
        yield
    finally:
        handle.remove()


class Hooks:
    """The works by hand."""

    def __init__(self, given: Case):
        self.module, self.case = given.module, given
        self.layers = list(given.module.transformer.h)
        self.layer = self.layers[given.middle]

    def empty(self) -> Values:
        """Nothing but the forward."""
        self.module(self.case.ids)
        return []

    def one_read(self) -> Values:
        """One layer's output."""
        return self._read(self.case.ids)

    def twelve_reads(self) -> Values:
        """Every layer's output."""
        found: Values = []
        handles = [
            layer.register_forward_hook(lambda _module, _args, output: found.append(output))
            for layer in self.layers
        ]
        try:
            self.module(self.case.ids)
        finally:
            for handle in handles:
                handle.remove()
        return found

    def edit(self) -> Values:
        """One layer's output changed in place; the logits."""

        def double(output: Tensor) -> None:
            output[:] *= 2

        with hook(self.layer, double):
            return [self.module(self.case.ids).logits]

    def batch(self) -> Values:
        """One layer's output of all prompts."""
        return self._read(self.case.batch)

    def invokes(self) -> Values:
        """The same, one prompt's rows at a time."""
        return list(self._read(self.case.batch)[0].split(1))

    def gradient(self) -> Values:
        """The gradient of one layer's output."""
        self.module.zero_grad(set_to_none=True)
        found: Values = []

        def keep(output: Tensor) -> None:
            output.retain_grad()
            found.append(output)

        with hook(self.layer, keep):
            self.module(self.case.ids).logits.sum().backward()
        return [output.grad for output in found if output.grad is not None]

    def iterate(self) -> Values:
        """One layer's output in each step of `generate`."""
        found: Values = []
        with hook(self.layer, found.append):
            self.module.generate(
                self.case.ids,
                attention_mask=torch.ones_like(self.case.ids),
                max_new_tokens=self.case.tokens,
            )
        return found

    def _read(self, ids: Tensor) -> Values:
        found: Values = []
        with hook(self.layer, found.append):
            self.module(ids)
        return found


class Blocks:
    """The works as blocks; midstream and nnsight read them alike.

    They save lists: in one process with midstream, a tensor's own `save` is midstream's.

    Args:
        model: the library's model around the module.
    """

    def __init__(self, given: Case, model: Any):
        self.case, self.model = given, model
        self.layers = list(model.transformer.h)
        self.layer = self.layers[given.middle]

    def empty(self) -> Values:
        """A block with nothing in it."""
        with self.model.trace(self.case.ids):
            pass
        return []

    def one_read(self) -> Values:
        """One layer's output."""
        layer = self.layer
        with self.model.trace(self.case.ids):
            found = [].save()  # type: ignore[attr-defined]
            found.append(layer.output)
        return found

    def twelve_reads(self) -> Values:
        """Every layer's output."""
        layers = self.layers
        with self.model.trace(self.case.ids):
            found = [].save()  # type: ignore[attr-defined]
            for layer in layers:
                found.append(layer.output)
        return found

    def edit(self) -> Values:
        """One layer's output changed in place; the logits."""
        layer, head = self.layer, self.model.lm_head
        with self.model.trace(self.case.ids):
            found = [].save()  # type: ignore[attr-defined]
            layer.output[:] *= 2
            found.append(head.output)
        return found

    def batch(self) -> Values:
        """One layer's output of all prompts."""
        layer = self.layer
        with self.model.trace(self.case.batch):
            found = [].save()  # type: ignore[attr-defined]
            found.append(layer.output)
        return found

    def invokes(self) -> Values:
        """The same, one prompt in each invoke."""
        layer, batch = self.layer, self.case.batch
        with self.model.trace() as tracer:
            found = [].save()  # type: ignore[attr-defined]
            for row in range(len(batch)):
                with tracer.invoke(batch[row : row + 1]):
                    found.append(layer.output)
        return found

    def gradient(self) -> Values:
        """The gradient of one layer's output."""
        layer, head = self.layer, self.model.lm_head
        self.case.module.zero_grad(set_to_none=True)
        with self.model.trace(self.case.ids):
            found = [].save()  # type: ignore[attr-defined]
            h = layer.output
            loss = head.output.sum()
            with loss.backward():
                found.append(h.grad)
        return found

    def iterate(self) -> Values:
        """One layer's output in each step of `generate`."""
        layer, tokens = self.layer, self.case.tokens
        with self.model.generate(self.case.ids, max_new_tokens=tokens) as tracer:
            found = [].save()  # type: ignore[attr-defined]
            for _ in tracer.iter[:tokens]:
                found.append(layer.output)
        return found


def nnsight_version() -> str | None:
    """Version of nnsight, if it is installed."""
    if importlib.util.find_spec("nnsight") is None:
        return None
    from importlib import metadata

    return metadata.version("nnsight")


def midstream_model(module: Any) -> Any:
    """A transformers module as midstream has it."""
    from midstream import TransformersModel

    return TransformersModel(module)


def nnsight_model(module: Any) -> Any:
    """A transformers module as nnsight has it, which wants a tokenizer even where none is used."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="a", pad_token="a")
    nnsight = importlib.import_module("nnsight")
    return nnsight.TransformersModel(module, tokenizer=tokenizer, task="text-generation")
