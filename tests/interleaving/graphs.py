"""Small graphs, and blocks captured beside them: gradients without a model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from midstream.interleaving.gradients import helpers
from midstream.interleaving.passes import _THREAD
from midstream.interleaving.run import Run
from midstream.tracing import Capture, Execution, bind


class Trace:
    """Captures the body, runs it as a block that is given gradients, and binds its saves.

    Attributes:
        run: the block's run, which may be waiting.
    """

    def __init__(self, *, finish: bool = True):
        self._finish = finish

    def __enter__(self) -> Trace:
        self._frame = sys._getframe(1)
        self._capture = Capture.begin(self._frame, "trace")
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> bool:
        block = self._capture.finish(kind, error)
        if block is None:
            return False
        frame = self._frame
        del self._frame
        execution = Execution(block, helpers=helpers())
        self.run = Run(execution.run)
        self.run.resume()
        if self._finish:
            assert self.run.done
        bind(frame, execution.saves())
        del frame
        if self.run.error is not None:
            raise self.run.error
        return True


def weights(count: int, seed: int = 0, width: int = 6) -> list[torch.Tensor]:
    """Random square matrices that require grad."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(width, width, generator=generator).requires_grad_(True) for _ in range(count)
    ]


def mlp(
    x: torch.Tensor,
    layers: list[torch.Tensor],
    edit: Callable[[int, torch.Tensor], torch.Tensor] = lambda _, hidden: hidden,
) -> list[torch.Tensor]:
    """The hidden states after each layer; `edit` may put another in a state's place."""
    hidden, states = x, []
    for index, layer in enumerate(layers):
        hidden = edit(index, torch.tanh(hidden @ layer))
        states.append(hidden)
    return states


def attention(x: torch.Tensor, qkvo: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The values inside a causal attention block over `x` (batch, tokens, width), by name."""
    q, k, v = (x @ weight for weight in qkvo[:3])
    scores = (q @ k.transpose(-1, -2)) / x.shape[-1] ** 0.5
    mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    pattern = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    mixed = pattern @ v
    out = mixed @ qkvo[3] + x
    return {
        **{"q": q, "k": k, "v": v, "scores": scores, "pattern": pattern, "mixed": mixed},
        "out": out,
    }


def rows(*shape: int, seed: int = 1) -> torch.Tensor:
    """Random input."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def same(got: Any, expected: Any) -> bool:
    """Equality of the bits of tensors, in order."""
    return len(got) == len(expected) and all(map(torch.equal, got, expected))


def mlp_with_loss() -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
    """The weights of an MLP, its hidden states, and a loss over the last."""
    layers = weights(4)
    states = mlp(rows(3, 6), layers)
    return layers, states, states[-1].square().sum()


def modes() -> tuple[Any, ...]:
    """What PyTorch keeps for the thread."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch._C._is_multithreading_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.get_default_dtype(),
        torch._C._len_torch_function_stack(),
        torch._C._len_torch_dispatch_stack(),
        torch._C._is_torch_function_mode_enabled(),
    )


@contextmanager
def at_rest() -> Iterator[None]:
    """Behind it no pass stands, autograd is at rest, and the thread's modes are as before."""
    before = modes()
    yield
    assert _THREAD.passes == []
    assert torch._C._current_graph_task_id() == -1
    assert modes() == before
