"""PyTorch's thread-wide modes, exchanged when control passes between engine and block.

PyTorch keeps gradient mode, inference mode, autocast, the default dtype and device, and the mode
stacks for the thread, not for a greenlet. A block that waits inside `with torch.enable_grad():`
would leave the engine's forward with gradients on, and the engine's modes would reach the block.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.overrides import _pop_mode as _pop_function_mode
from torch.overrides import _push_mode as _push_function_mode
from torch.utils._python_dispatch import _pop_mode as _pop_dispatch_mode
from torch.utils._python_dispatch import _push_mode as _push_dispatch_mode

# what `torch.inference_mode` and `torch.set_grad_enabled` call, without their Python wrappers:
# every visit of every block passes here
_InferenceMode: Any = torch._C._InferenceMode
_set_grad = torch._C._set_grad_enabled

_CUDA = torch.backends.cuda.is_built()


def _flags() -> tuple[Any, ...]:
    """Everything a block may leave changed, cheap enough for every visit."""
    return (
        torch.is_inference_mode_enabled(),
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cuda"),
        torch.get_default_dtype(),
        torch._C._len_torch_function_stack(),
        torch._C._len_torch_dispatch_stack(),
        torch.cuda.current_stream() if _CUDA and torch.cuda.is_initialized() else None,
    )


class BlockModes:
    """The modes one block left behind at its last switch, to be there again at the next.

    Use as a context manager around every switch into the block: inside, the thread is in the
    block's modes (at first: no gradients, no inference mode); outside, in the engine's.
    """

    def __init__(self) -> None:
        self._left: tuple[Any, ...] | None = None
        self._function_modes: list[Any] = []
        self._dispatch_modes: list[Any] = []
        self._guards: list[AbstractContextManager[Any]] = []

    def __enter__(self) -> None:
        self._guard = _InferenceMode(False)
        self._guard.__enter__()
        _set_grad(False)
        self._entry = _flags()
        if self._left is not None:
            self._restore_block()

    def __exit__(self, *exc: object) -> None:
        left = _flags()
        if left == self._entry:
            self._left = None
        else:
            self._restore_engine(left)
        self._guard.__exit__(None, None, None)

    def _restore_block(self) -> None:
        """Put the thread back into what the block had when it was last left."""
        left = self._left
        assert left is not None
        while self._guards:
            self._guards.pop().__exit__(None, None, None)
        for mode in self._dispatch_modes:
            _push_dispatch_mode(mode)
        for mode in self._function_modes:
            _push_function_mode(mode)
        _apply(left)

    def _restore_engine(self, left: tuple[Any, ...]) -> None:
        """Take the block's modes off the thread, keeping them for its next turn."""
        self._left, entry = left, self._entry
        self._function_modes = [_pop_function_mode() for _ in range(max(0, left[7] - entry[7]))][
            ::-1
        ]
        self._dispatch_modes = [_pop_dispatch_mode() for _ in range(max(0, left[8] - entry[8]))][
            ::-1
        ]
        if left[0] != entry[0]:
            # inference mode has no setter: a guard on top undoes it, leaving the guard redoes it
            guard = torch.inference_mode(entry[0])
            guard.__enter__()
            self._guards.append(guard)
        _apply(entry)


def _apply(flags: tuple[Any, ...]) -> None:
    """Set those modes that have a setter."""
    torch.set_grad_enabled(flags[1])
    torch.set_autocast_enabled("cpu", flags[2])
    torch.set_autocast_dtype("cpu", flags[3])
    torch.set_autocast_enabled("cuda", flags[4])
    torch.set_autocast_dtype("cuda", flags[5])
    torch.set_default_dtype(flags[6])
    if flags[9] is not None:
        torch.cuda.set_stream(flags[9])
