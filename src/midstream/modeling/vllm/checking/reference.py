"""HuggingFace's answers: plain hooks on its module, with none of midstream's own machinery."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from midstream.modeling.vllm.checking.blocks import LOGITS, first, steered
from midstream.modeling.vllm.checking.places import ROUTER, STREAM, Place

Edit = Callable[[Tensor], Tensor]


class Reference:
    """HuggingFace's model of a checkpoint, run on one prompt.

    Args:
        module: the model.
        ids: token ids of the prompt.
    """

    def __init__(self, module: nn.Module, ids: Sequence[int]):
        self._module = module
        device = next(module.parameters()).device
        self._ids = torch.tensor([list(ids)], device=device)

    @torch.no_grad()
    def reads(self, places: Sequence[Place]) -> dict[str, Tensor]:
        """The rows of each place, ``[tokens, width]``, and ``[1, vocab]`` logits, on the CPU."""
        found: dict[str, Tensor] = {}
        with ExitStack() as hooks:
            for place in places:
                hooks.callback(self._record(place, found).remove)
            found[LOGITS] = self._logits()
        return found

    def zeroed(self, place: Place) -> Tensor:
        """Logits of a forward in which a sublayer contributes nothing."""
        return self._edited(place, torch.zeros_like)

    def steered(self, place: Place) -> Tensor:
        """Logits of a forward in which something is added to a layer's stream."""
        return self._edited(place, lambda rows: rows + steered(rows))

    @torch.no_grad()
    def ablated(self, place: Place, expert: int) -> Tensor:
        """Logits of a forward in which a router never chooses an expert."""
        with _without_expert(self._module.get_submodule(place.local), expert):
            return self._logits()

    @torch.no_grad()
    def _edited(self, place: Place, edit: Edit) -> Tensor:
        module = self._module.get_submodule(place.local)

        def after(_: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            added = _residual(module, args, kwargs)
            changed = edit(first(output) - added) + added
            return (changed, *output[1:]) if isinstance(output, tuple) else changed

        with _hooked(module, after):
            return self._logits()

    def _record(self, place: Place, found: dict[str, Tensor]) -> Any:
        module = self._module.get_submodule(place.local)

        def after(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if place.kind == ROUTER:
                value = _router_logits(module, first(args))
            else:
                value = first(output)
                if place.kind != STREAM:
                    value = value - _residual(module, args, kwargs)
            found[place.name] = rows_of(value)

        return module.register_forward_hook(after, with_kwargs=True)

    def _logits(self) -> Tensor:
        return rows_of(self._module(input_ids=self._ids, use_cache=False).logits)[-1:]


def rows_of(value: Tensor) -> Tensor:
    """Rows without a batch axis, ``[tokens, width]``, on the CPU."""
    return value.detach().reshape(-1, value.shape[-1]).cpu()


def _residual(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """The stream that a sublayer adds to what it returns, as BLOOM's do; else 0."""
    names = inspect.signature(module.forward).parameters
    if "residual" not in names:
        return 0
    found = inspect.signature(module.forward).bind(*args, **kwargs).arguments.get("residual")
    return 0 if found is None else found


def _router_logits(module: Any, rows: Tensor) -> Tensor:
    """A router's logits, whatever it makes of them before it returns."""
    rows = rows.reshape(-1, rows.shape[-1]).to(module.weight.dtype)
    return nn.functional.linear(rows, module.weight, getattr(module, "bias", None))


@contextmanager
def _hooked(module: nn.Module, after: Callable[..., Any]) -> Iterator[None]:
    handle = module.register_forward_hook(after, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


class _Without(TorchFunctionMode):
    """Has one column of what a weight computes be minus infinity."""

    def __init__(self, weight: Tensor, expert: int):
        super().__init__()
        self._weight, self._expert = weight, expert

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is nn.functional.linear and self._is_of_weight(args[1]):
            result[..., self._expert] = -torch.inf
        return result

    def _is_of_weight(self, given: Tensor) -> bool:
        return given.data_ptr() == self._weight.data_ptr() or (
            given.shape == self._weight.shape and bool(torch.equal(given, self._weight.to(given)))
        )


def _without_expert(router: Any, expert: int) -> AbstractContextManager[Any]:
    return _Without(router.weight, expert)
