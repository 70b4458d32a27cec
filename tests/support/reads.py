"""Recording a HuggingFace forward and naming its tensors as vLLM's locations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.architectures import Architecture, Call, Values, join

__all__ = ["end_values", "layer_values", "locations", "recorded"]


@contextmanager
def recorded(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Record the first input and the output of every module, without the batch axis."""
    seen: dict[str, Any] = {}

    def record(path: str, _: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        seen[join(path, "input")] = _rows(args[0] if args else kwargs.get("hidden_states"))
        seen[join(path, "output")] = _rows(output)

    with ExitStack() as hooks:
        for path, module in model.named_modules():
            hook = module.register_forward_hook(partial(record, path), with_kwargs=True)
            hooks.callback(hook.remove)
        yield seen


def layer_values(
    architecture: Architecture, seen: Mapping[str, Any], layer_count: int
) -> list[dict[str, Any]]:
    """Return the named tensors of each layer, what it gets from the one before included."""
    trunk = {"rotary": _of_role(architecture, seen, "rotary")}
    values: list[dict[str, Any]] = []
    for i in range(layer_count):
        layer: dict[str, Any] = {
            name: _first(seen[architecture.layer_path(i, source)])
            for name, source in architecture.sources.items()
        }
        layer |= architecture.derive(layer, trunk)
        before: Values = values[-1] if values else {}
        layer |= {"hidden": before.get("mlp_out"), "residual": before.get("stream_mid")}
        values.append({**layer, "positions": torch.arange(len(layer["stream_in"]))})
    return values


def end_values(
    architecture: Architecture, seen: Mapping[str, Any], last: Values, ids: Sequence[int]
) -> dict[str, Any]:
    """Return the named tensors around the layers; `last` are those of the last layer."""
    return {
        "ids": torch.tensor(list(ids)),
        "positions": last["positions"],
        "embeddings": _of_role(architecture, seen, "embedding"),
        "position_embeddings": _of_role(architecture, seen, "position_embedding"),
        "hidden": last["mlp_out"],
        "residual": last["stream_mid"],
        "stream_out": last["stream_out"],
        "normed": _of_role(architecture, seen, "norm"),
    }


def locations(path: str, call: Call, values: Values) -> dict[str, Any]:
    """Return the three locations of the module at `path`."""
    args, kwargs = call.arguments(values)
    first = args[0] if args else next(iter(kwargs.values()))
    found = {"inputs": (args, kwargs), "input": first, "output": call.result(values)}
    return {join(path, kind): value for kind, value in found.items()}


def _of_role(architecture: Architecture, seen: Mapping[str, Any], role: str) -> Any:
    """Return the output of the module with that role, None where the architecture has none."""
    return seen[architecture.roles[role] + ".output"] if role in architecture.roles else None


def _rows(value: Any) -> Any:
    """Take the batch axis off a tensor, or off the tensors of a tuple."""
    if isinstance(value, Tensor):
        return value[0]
    return tuple(_rows(x) for x in value) if isinstance(value, tuple) else None


def _first(value: Any) -> Tensor:
    """Return the tensor of a module's output, the first where it returns a tuple."""
    found: Tensor = value[0] if isinstance(value, tuple) else value
    return found
