"""Small modules of every kind, and what plain PyTorch hooks show of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from midstream.interleaving.structure import flatten
from tests.support.checkpoints import CHECKPOINTS, FURTHER, NORM_GAIN, SEED, WEIGHT_STD

__all__ = [
    "MLP",
    "Keyed",
    "Looped",
    "Residual",
    "Routed",
    "Twice",
    "WithBuffers",
    "assert_untouched",
    "causal",
    "changed",
    "drawn",
    "equal",
    "hooked",
    "rows",
]


class MLP(nn.Module):
    """Linear, ReLU, dropout, linear, ReLU, linear: ``[rows, 4]`` to ``[rows, 3]``."""

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.act, self.act2, self.drop = nn.ReLU(), nn.ReLU(), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """``[rows, 4]`` to ``[rows, 3]``."""
        hidden = self.drop(self.act(self.first(x)))
        return self.last(self.act2(self.second(hidden)))


class Residual(nn.Module):
    """Writes in place: a ReLU, and a residual that is added to. Width 4."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.mid, self.down = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """``[rows, 4]`` to ``[rows, 4]``."""
        hidden = self.act(self.up(x))
        out = self.mid(hidden)
        out += hidden
        return self.down(out)


class Twice(nn.Module):
    """Calls one module two times. Width 4."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.act = nn.Linear(4, 4), nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        """``[rows, 4]`` to ``[rows, 4]``."""
        return self.shared(self.act(self.shared(x)))


class Routed(nn.Module):
    """Calls its parts in an order that its inputs say. Width 4."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, *, order: str = "ab") -> Tensor:
        """``[rows, 4]`` to ``[rows, 4]``."""
        for name in order:
            x = getattr(self, name)(x)
        return x


class Product(nn.Module):
    """A product and a sum of what it is called with."""

    def forward(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        """``[..., width]``, ``[width]``, ``[width]``."""
        return x * scale + shift


class WithBuffers(nn.Module):
    """Calls a part with a buffer and a parameter of its own; the head's weight is the embedding's.

    ``[rows, tokens]`` ids below 10 to ``[rows, tokens, 10]``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(10, 4), nn.Embedding(6, 4)
        self.product, self.head = Product(), nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight
        self.shift = nn.Parameter(torch.randn(4))
        self.register_buffer("scale", torch.randn(4))
        self.register_buffer("order", torch.arange(6))

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of the tokens."""
        hidden = self.embed(ids) + self.positions(self.order[: ids.shape[1]])
        return self.head(self.product(hidden, self.scale, self.shift))


@dataclass
class Record:
    """What a part returns, as a dataclass."""

    hidden: Tensor
    note: str = "plain"


@dataclass
class Output(ModelOutput):
    """The same as HuggingFace's kind of output."""

    hidden: Tensor | None = None
    extra: Tensor | None = None


_WRAPPED: dict[str, Callable[[Tensor], Any]] = {
    "dict": lambda hidden: {"hidden": hidden},
    "nested": lambda hidden: [{"hidden": hidden}, None, 3],
    "dataclass": Record,
    "output": lambda hidden: Output(hidden=hidden),
}


class _Wrapping(nn.Module):
    def __init__(self, kind: str):
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return self.wrap(self.linear(x))

    def wrap(self, hidden: Tensor) -> Any:
        return _WRAPPED[self.kind](hidden)

    def unwrap(self, value: Any) -> Tensor:
        value = value[0] if self.kind == "nested" else value
        return value["hidden"] if isinstance(value, dict) else value.hidden


class Keyed(nn.Module):
    """A part that returns its tensor in a container, and one behind it.

    Args:
        kind: "dict", "nested", "dataclass" or "output".
    """

    def __init__(self, kind: str):
        super().__init__()
        self.part, self.last = _Wrapping(kind), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        """``[rows, 4]`` to ``[rows, 2]``."""
        return self.last(self.part.unwrap(self.part(x)))


class Looped(nn.Module):
    """A step of a recurrence. Width 4."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """``[rows, 4]`` to ``[rows, 4]``."""
        return torch.tanh(self.cell(x))


def drawn(kind: Callable[..., nn.Module], *args: Any, seed: int = 0) -> Any:
    """A module with weights of its own seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return kind(*args)


def rows(count: int, seed: int = 1, width: int = 4) -> Tensor:
    """Random input rows ``[count, width]``."""
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


@cache
def causal(name: str) -> Any:
    """A tiny HuggingFace decoder by the checkpoint's name, in fp32 and evaluation mode.

    It is not to be written to: tests share it.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = dict({**CHECKPOINTS, **FURTHER, **_FURTHER_DECODERS}[name])
    config = AutoConfig.for_model(fields.pop("model_type"), **{**fields, "num_hidden_layers": 2})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for path, weight in sorted(model.named_parameters()):
            if weight.ndim == 1 and not path.endswith("bias"):
                weight.uniform_(*NORM_GAIN, generator=generator)
            else:
                weight.normal_(std=WEIGHT_STD, generator=generator)
    return model


_SMALL = {"vocab_size": 101, "hidden_size": 64, "num_attention_heads": 2}
_FURTHER_DECODERS = {
    "T-NEOX": {
        **_SMALL,
        "model_type": "gpt_neox",
        "intermediate_size": 128,
        "max_position_embeddings": 64,
        "use_parallel_residual": True,
    },
    "T-BLOOM": {**_SMALL, "model_type": "bloom"},
}


@dataclass
class Seen:
    """What one call of a module was called with and returned, as copies."""

    args: Any
    kwargs: Any
    output: Any


def hooked(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[dict[str, Seen], Any]:
    """What plain hooks see of every module's last call, by path, and what the call returns."""
    seen: dict[str, Seen] = {}

    def before(path: str) -> Callable[..., None]:
        return lambda _, args, kwargs: seen.update({path: Seen(_kept(args), _kept(kwargs), None)})

    def after(path: str) -> Callable[..., None]:
        return lambda _module, _args, output: setattr(seen[path], "output", _kept(output))

    with ExitStack() as stack:
        for path, part in module.named_modules():
            stack.enter_context(
                _removing(part.register_forward_pre_hook(before(path), with_kwargs=True))
            )
            stack.enter_context(_removing(part.register_forward_hook(after(path))))
        result = module(*args, **kwargs)
    return seen, result


@contextmanager
def _removing(handle: Any) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()


def _kept(value: Any) -> Any:
    leaves, build = flatten(value)
    return build([leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves])


def changed(
    module: nn.Module,
    path: str,
    change: Callable[[Tensor], Tensor],
    call: Callable[[], Any],
    side: str = "output",
) -> Any:
    """What a call gives when a plain hook has changed one module's output, or its first argument.

    Args:
        change: gives the new tensor. Of a tuple, the first item is changed.
        side: "output" or "input".
    """

    def first(value: Any) -> Any:
        return (change(value[0]), *value[1:]) if isinstance(value, tuple) else change(value)

    part = module.get_submodule(path)
    if side == "output":
        handle = part.register_forward_hook(lambda _module, _args, output: first(output))
    else:
        handle = part.register_forward_pre_hook(lambda _module, args: first(args))
    with _removing(handle):
        return call()


def equal(a: Any, b: Any) -> bool:
    """Whether two nested values have the same tensors, bit for bit, in the same places."""
    first, second = flatten(a)[0], flatten(b)[0]
    return len(first) == len(second) and all(map(_same, first, second))


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return False
    return type(a) is type(b)


def far(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors differ by far more than rounding."""
    return bool((a - b).abs().max() > 1e-3 * b.abs().max())


def assert_untouched(module: nn.Module) -> None:
    """No module has a forward of its own or a hook."""
    for path, part in module.named_modules():
        assert "forward" not in part.__dict__, path
        assert not part._forward_hooks, path
        assert not part._forward_pre_hooks, path
        assert not part._backward_hooks, path
