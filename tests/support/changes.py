"""Changes of a HuggingFace forward, each the counterpart of an edit that a traced block makes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

__all__ = [
    "Change",
    "add_vector",
    "edit_layer",
    "edit_logits",
    "edit_mlp_input",
    "edit_module",
    "replace_layer",
    "scale_layer",
    "zero_mlp",
]

LOGITS = "logits"


@dataclass(frozen=True)
class Change:
    """One edit at the input or output of a module.

    Attributes:
        module: a role of the architecture (``"layer"``, ``"mlp"``, ...), a HuggingFace module
            path, or ``"logits"``.
        edit: called with the rows, [tokens, width], and the position of the first of them;
            returns the new rows, same shape.
        layer: which layer, where `module` is a role that has layers.
        site: the side of the module that is edited.
    """

    module: str
    edit: Callable[[Tensor, int], Tensor]
    layer: int | None = None
    site: Literal["input", "output"] = "output"


def zero_mlp(layer: int) -> Change:
    """Set a layer's MLP output to zero."""
    return Change("mlp", lambda rows, start: torch.zeros_like(rows), layer)


def edit_layer(layer: int, fn: Callable[[Tensor], Tensor]) -> Change:
    """Apply `fn` to the residual stream leaving a layer, [tokens, hidden]."""
    return Change("layer", lambda rows, start: fn(rows), layer)


def scale_layer(layer: int, factor: float) -> Change:
    """Multiply the residual stream leaving a layer."""
    return edit_layer(layer, lambda rows: rows * factor)


def replace_layer(layer: int, tensor: Tensor) -> Change:
    """Replace the residual stream leaving a layer by `tensor`, [tokens, hidden]."""
    return edit_layer(layer, lambda rows: tensor.to(rows))


def add_vector(layer: int, vector: Tensor, positions: Sequence[int] | None = None) -> Change:
    """Add `vector`, [hidden], to the residual stream leaving a layer.

    `positions` are absolute, counted from the first prompt token; all rows of the step when left
    out. A step that does not hold a position leaves it alone.
    """

    def edit(rows: Tensor, start: int) -> Tensor:
        held = [p - start for p in positions or () if start <= p < start + len(rows)]
        rows[slice(None) if positions is None else held] += vector.to(rows)
        return rows

    return Change("layer", edit, layer)


def edit_mlp_input(layer: int, fn: Callable[[Tensor], Tensor]) -> Change:
    """Apply `fn` to what a layer's MLP receives (after the norm), [tokens, hidden]."""
    return Change("mlp", lambda rows, start: fn(rows), layer, "input")


def edit_logits(fn: Callable[[Tensor], Tensor]) -> Change:
    """Apply `fn` to the logits that are sampled from, [1, vocab]."""
    return Change(LOGITS, lambda rows, start: fn(rows))


def edit_module(
    path: str, fn: Callable[[Tensor], Tensor], site: Literal["input", "output"] = "output"
) -> Change:
    """Apply `fn` at any HuggingFace module, [tokens, width]."""
    return Change(path, lambda rows, start: fn(rows), site=site)


@contextmanager
def applied(modules: Sequence[tuple[nn.Module, Change]], start: int) -> Iterator[None]:
    """Keep the changes hooked; `start` is the position of the forward's first token."""
    with ExitStack() as hooks:
        for module, change in modules:
            hooks.callback(_hook(module, change, start).remove)
        yield


def edited(change: Change, rows: Tensor, start: int) -> Tensor:
    """Return the changed rows; the ones passed in keep their values.

    Raises:
        ValueError: the edit returned another shape.
    """
    new = change.edit(rows.clone(), start)
    if new.shape != rows.shape:
        raise ValueError(f"edit returned {tuple(new.shape)}, expected {tuple(rows.shape)}")
    return new


def _hook(module: nn.Module, change: Change, start: int) -> Any:
    def first_changed(values: tuple[Any, ...]) -> tuple[Any, ...]:
        return (edited(change, values[0][0], start)[None], *values[1:])

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return first_changed(args), kwargs
        (changed,) = first_changed((kwargs["hidden_states"],))
        return args, {**kwargs, "hidden_states": changed}

    def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if isinstance(output, tuple):
            return first_changed(output)
        return first_changed((output,))[0]

    if change.site == "input":
        return module.register_forward_pre_hook(before, with_kwargs=True)
    return module.register_forward_hook(after)
