"""Gradients in a block: a backward pass that stops where the block asks for one.

`with loss.backward():` runs autograd in a greenlet of its own, while the body stays in the block's.
Asking for `h.grad` registers a hook on the node of the graph where that gradient arrives, and
switches to the pass. The hook switches back with it. When the body asks for another, or ends,
control returns into the hook, which hands autograd the gradient as the body left it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from midstream.interleaving.origins import note_origin
from midstream.interleaving.passes import BackwardPass, current_pass
from midstream.tracing.backward import BACKWARD, GRAD

__all__ = ["BackwardPass", "backward", "helpers", "note_origin"]


def helpers() -> dict[str, Callable[..., Any]]:
    """What `tracing.Execution` is given so that backward statements of its block work."""
    return {BACKWARD: _begin, GRAD: _gradient_of}


def backward(loss: torch.Tensor, *args: Any, **kwargs: Any) -> BackwardPass:
    """As ``with loss.backward(...):`` of a captured block, for functions, which are not rewritten.

    ::

        with backward(loss, retain_graph=True) as gradients:
            g = gradients.of(h).grad
            gradients.of(h0).grad = torch.zeros_like(h0)

    Args:
        loss: as for ``loss.backward``, with its arguments.
        args, kwargs: those arguments.
    """
    return BackwardPass(loss, *args, **kwargs)


def _begin(subject: Any, /, *args: Any, **kwargs: Any) -> Any:
    if isinstance(subject, torch.Tensor):
        return BackwardPass(subject, *args, **kwargs)
    return subject.backward(*args, **kwargs)  # another library's, with a context of its own


def _gradient_of(subject: Any, /) -> Any:
    """What has the `.grad` that the body of a backward statement means: outside one, the tensor."""
    running = current_pass() if isinstance(subject, torch.Tensor) else None
    return subject if running is None else running.of(subject)
