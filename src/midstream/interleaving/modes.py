"""PyTorch's thread-wide modes, exchanged when control passes between engine and block.

PyTorch keeps gradient mode, inference mode, autocast, the default dtype and device, and the mode
stacks for the thread, not for a greenlet. A block that waits inside `with torch.enable_grad():`
would leave the engine's forward with gradients on, and the engine's modes would reach the block.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.overrides import _pop_mode as _pop_function_mode
from torch.overrides import _push_mode as _push_function_mode
from torch.utils._python_dispatch import _pop_mode as _pop_dispatch_mode
from torch.utils._python_dispatch import _push_mode as _push_dispatch_mode

# What the public functions call, without their Python wrappers: every visit of every block passes
# here, with the processor's caches full of the model's work.
_InferenceMode: Any = torch._C._InferenceMode
_set_grad = torch._C._set_grad_enabled
_is_inference, _is_grad = torch.is_inference_mode_enabled, torch.is_grad_enabled
_is_autocast, _default_dtype = torch.is_autocast_enabled, torch.get_default_dtype
_functions: Any = torch._C._len_torch_function_stack
_dispatches: Any = torch._C._len_torch_dispatch_stack

_CUDA = torch.backends.cuda.is_built()


def _stream() -> Any:
    """The current CUDA stream as (id, device index, device type); None without CUDA."""
    if not (_CUDA and torch.cuda.is_initialized()):
        return None
    return torch._C._cuda_getCurrentStream(torch._C._cuda_getDevice())


_Flags = tuple[bool, bool, bool, bool, torch.dtype, int, int, Any]
"""Inference, gradients, autocast on CPU and CUDA, dtype, sizes of the mode stacks, stream."""


def _flags() -> _Flags:
    """Everything a block may leave changed: a plain tuple, since every visit makes two."""
    return (
        _is_inference(),
        _is_grad(),
        _is_autocast("cpu"),
        _is_autocast("cuda"),
        _default_dtype(),
        _functions(),
        _dispatches(),
        _stream() if _CUDA else None,
    )


def _autocast_dtypes() -> tuple[torch.dtype, torch.dtype]:
    return torch.get_autocast_dtype("cpu"), torch.get_autocast_dtype("cuda")


class BlockGuard:
    """The modes that a block has at first: no gradients, no inference mode."""

    def __enter__(self) -> None:
        self._guard = _InferenceMode(False)
        self._guard.__enter__()
        _set_grad(False)

    def __exit__(self, *exc: object) -> None:
        self._guard.__exit__(None, None, None)


class BlockModes:
    """The modes one block left behind at its last switch, to be there again at the next.

    Use as a context manager around every switch into the block: inside, the thread is in the
    block's modes (at first: no gradients, no inference mode); outside, in the engine's.

    Args:
        guarded: whether the block's modes are at first those of ``BlockGuard``; otherwise they are
            what they are where the block meets the forward.
    """

    def __init__(self, *, guarded: bool = True) -> None:
        self._left: _Flags | None = None
        self._dtypes = _autocast_dtypes()
        self._function_modes: list[Any] = []
        self._dispatch_modes: list[Any] = []
        self._guards: list[AbstractContextManager[Any]] = []
        self._guard = BlockGuard() if guarded else None

    def __enter__(self) -> None:
        if self._guard is not None:
            self._guard.__enter__()
        self._entry = _flags()
        if self._left is not None:
            self._restore_block()

    def __exit__(self, *exc: object) -> None:
        left = _flags()
        if left == self._entry:
            self._left = None
        else:
            self._restore_engine(left)
        if self._guard is not None:
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
        self._trade_dtypes()
        _apply(left)

    def _restore_engine(self, left: _Flags) -> None:
        """Take the block's modes off the thread, keeping them for its next turn."""
        self._left, entry = left, self._entry
        added = max(0, left[5] - entry[5])
        self._function_modes = [_pop_function_mode() for _ in range(added)][::-1]
        added = max(0, left[6] - entry[6])
        self._dispatch_modes = [_pop_dispatch_mode() for _ in range(added)][::-1]
        if left[0] != entry[0]:
            # inference mode has no setter: a guard on top undoes it, leaving the guard redoes it
            guard = torch.inference_mode(entry[0])
            guard.__enter__()
            self._guards.append(guard)
        self._trade_dtypes()
        _apply(entry)

    def _trade_dtypes(self) -> None:
        """Exchange autocast's dtypes, which count only where autocast is on."""
        mine, self._dtypes = self._dtypes, _autocast_dtypes()
        torch.set_autocast_dtype("cpu", mine[0])
        torch.set_autocast_dtype("cuda", mine[1])


def _apply(flags: _Flags) -> None:
    """Set those modes that have a setter."""
    _, grad, autocast_cpu, autocast_cuda, dtype, _, _, stream = flags
    torch.set_grad_enabled(grad)
    torch.set_autocast_enabled("cpu", autocast_cpu)
    torch.set_autocast_enabled("cuda", autocast_cuda)
    torch.set_default_dtype(dtype)
    _set_stream(stream)


def _set_stream(stream: Any) -> None:
    if stream is not None:
        identity, index, kind = stream
        torch._C._cuda_setStream(stream_id=identity, device_index=index, device_type=kind)


class KeptModes:
    """The thread's modes as they are, put back when control returns.

    Use as a context manager around a switch to code that leaves the thread in any modes it likes,
    and finds them again in the same way. Where `BlockModes` keeps those of one side, here each side
    keeps its own, exactly: what autograd's engine sets in C++ has no other setter.
    """

    def __enter__(self) -> None:
        self._functions, self._dispatches = _function_modes(), _dispatch_modes()
        self._rest = (_default_dtype(), _autocast_dtypes(), _stream())
        self._guard = _InferenceMode(False)  # leaving it restores gradients, inference, autocast
        self._guard.__enter__()

    def __exit__(self, *exc: object) -> None:
        self._guard.__exit__(None, None, None)
        _restack(_function_modes(), self._functions, _pop_function_mode, _push_function_mode)
        _restack(_dispatch_modes(), self._dispatches, _pop_dispatch_mode, _push_dispatch_mode)
        if (_default_dtype(), _autocast_dtypes(), _stream()) != self._rest:
            dtype, autocast, stream = self._rest
            torch.set_default_dtype(dtype)
            torch.set_autocast_dtype("cpu", autocast[0])
            torch.set_autocast_dtype("cuda", autocast[1])
            _set_stream(stream)


def _function_modes() -> list[Any]:
    return [torch._C._get_function_stack_at(index) for index in range(_functions())]


def _dispatch_modes() -> list[Any]:
    return [torch._C._get_dispatch_stack_at(index) for index in range(_dispatches())]


def _restack(
    now: list[Any], then: list[Any], pop: Callable[[], Any], push: Callable[[Any], None]
) -> None:
    """Turn one stack of modes into another, above what they have in common."""
    common = 0
    while common < min(len(now), len(then)) and now[common] is then[common]:
        common += 1
    for _ in now[common:]:
        pop()
    for mode in then[common:]:
        push(mode)
