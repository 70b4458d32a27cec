"""What a trace itself costs: works on a module so small that its own forward hardly counts."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.local_works import Values, hook

INVOKES = 17
"""Invokes of the traces with several: the first, and 16 more."""


class Layer(nn.Module):
    """A small linear layer."""

    def __init__(self, width: int):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """One step."""
        return self.linear(x).relu()


class Toy(nn.Module):
    """Twelve small linear layers."""

    def __init__(self, width: int = 8, depth: int = 12):
        super().__init__()
        self.layers = nn.ModuleList([Layer(width) for _ in range(depth)])

    def forward(self, x: Tensor) -> Tensor:
        """All layers."""
        for layer in self.layers:
            x = layer(x)
        return x


class ToyHooks:
    """The works by hand."""

    def __init__(self, module: Toy):
        self.module, self.x = module, torch.ones(1, 8)
        self.layers: list[Any] = list(module.layers)

    def plain(self) -> Values:
        """Nothing but the forward."""
        self.module(self.x)
        return []

    empty = plain

    def one_read(self) -> Values:
        """One layer's output."""
        found: Values = []
        with hook(self.layers[6], found.append):
            self.module(self.x)
        return found

    def reads(self) -> Values:
        """32 values: all outputs of layers and of their linear modules, and 8 inputs."""
        found: Values = []

        def keep_input(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
            found.append(args[0])

        def keep(_module: nn.Module, _args: Any, output: Tensor) -> None:
            found.append(output)

        handles = [layer.register_forward_pre_hook(keep_input) for layer in self.layers[:8]]
        for layer in self.layers:
            handles += [part.register_forward_hook(keep) for part in (layer.linear, layer)]
        try:
            self.module(self.x)
        finally:
            for handle in handles:
                handle.remove()
        return found


class ToyBlocks:
    """The works as blocks; midstream and nnsight read them alike."""

    def __init__(self, module: Toy, library: str):
        self._module = module
        self._make = {"midstream": "Model", "nnsight": "NNsight"}[library]
        self._library = importlib.import_module(library)
        self.model, self.x = self._wrapped(), torch.ones(1, 8)
        self.layers: list[Any] = list(self.model.layers)

    def _wrapped(self) -> Any:
        return getattr(self._library, self._make)(self._module)

    def plain(self) -> Values:
        """Nothing but the forward."""
        self._module(self.x)
        return []

    def empty(self) -> Values:
        """A block with nothing in it."""
        with self.model.trace(self.x):
            pass
        return []

    def one_read(self) -> Values:
        """One layer's output."""
        layer = self.layers[6]
        with self.model.trace(self.x):
            found = [].save()  # type: ignore[attr-defined]
            found.append(layer.output)
        return found

    def reads(self) -> Values:
        """32 values, as by hand."""
        layers = self.layers
        with self.model.trace(self.x):
            found = [].save()  # type: ignore[attr-defined]
            for layer in layers[:8]:
                found.append(layer.input)
                found.append(layer.linear.output)
                found.append(layer.output)
            for layer in layers[8:]:
                found.append(layer.linear.output)
                found.append(layer.output)
        return found

    def first(self) -> Values:
        """A read in the first trace of a model made anew."""
        model = self._wrapped()
        layer = model.layers[6]
        with model.trace(self.x):
            found = [].save()  # type: ignore[attr-defined]
            found.append(layer.output)
        return found

    def one_invoke(self) -> Values:
        """One invoke, with a read in it."""
        layer, x = self.layers[6], self.x
        with self.model.trace() as tracer:
            found = [].save()  # type: ignore[attr-defined]
            with tracer.invoke(x):
                found.append(layer.output)
        return found

    def invokes(self) -> Values:
        """Several invokes with an input each, and a read in each."""
        layer, x = self.layers[6], self.x
        with self.model.trace() as tracer:
            found = [].save()  # type: ignore[attr-defined]
            for _ in range(INVOKES):
                with tracer.invoke(x):
                    found.append(layer.output)
        return found

    def views(self) -> Values:
        """One input, and several invokes that see the whole batch, with a read in each."""
        layer, x = self.layers[6], self.x
        with self.model.trace() as tracer:
            found = [].save()  # type: ignore[attr-defined]
            with tracer.invoke(x):
                found.append(layer.output)
            for _ in range(INVOKES - 1):
                with tracer.invoke():
                    found.append(layer.output)
        return found
