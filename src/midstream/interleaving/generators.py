"""The process's random generators, exchanged when control passes between engine and block.

A block draws from generators of its own, seeded alike on every rank, and the engine's go on
where they stood. The exchange runs at every visit, so it has to cost about a microsecond:
numpy's bit generator is swapped as an object, PyTorch's state is five kilobytes, and Python's
`random` keeps its state in a C structure that is copied as bytes where its layout is the one
this file knows (checked once), through the slow public calls otherwise.
"""

from __future__ import annotations

import ctypes
import functools
import random
import sys
from typing import Any

import numpy as np
import torch

_numpy: Any = np.random  # its stubs lack these two functions
_STATE_BYTES = 4 + 624 * 4  # int index; uint32 state[624]
_inst: random.Random = random._inst  # the module's functions use it
_address = id(_inst) + object.__basicsize__


def _layout_is_known() -> bool:
    """Whether the bytes after the object header are the generator's index and state."""
    if sys.implementation.name != "cpython" or type(_inst) is not random.Random:
        return False
    if random.Random.__basicsize__ < object.__basicsize__ + _STATE_BYTES:
        return False
    words = np.frombuffer(ctypes.string_at(_address, _STATE_BYTES), dtype=np.uint32)
    *state, index = _inst.getstate()[1]
    return bool(words[0] == index and words[1:].tolist() == state)


_FAST = _layout_is_known()


def _python_state() -> Any:
    return _state_of(_inst)


def _state_of(generator: random.Random) -> Any:
    if _FAST:
        address = id(generator) + object.__basicsize__
        return ctypes.string_at(address, _STATE_BYTES), generator.gauss_next  # type: ignore[attr-defined]
    return generator.getstate()


def _set_python_state(state: Any) -> None:
    if _FAST:
        ctypes.memmove(_address, state[0], _STATE_BYTES)
        _inst.gauss_next = state[1]  # type: ignore[attr-defined]
    else:
        _inst.setstate(state)


def _cuda_generators() -> list[torch.Generator]:
    return list(torch.cuda.default_generators) if torch.cuda.is_initialized() else []


class _NumpyGenerator:
    """One of numpy's bit generators; making one takes twenty times as long as seeding it anew."""

    def __init__(self) -> None:
        self.bits = np.random.MT19937(0)
        self.state = np.random.RandomState(self.bits)


_POOL: list[_NumpyGenerator] = []


@functools.lru_cache(maxsize=64)
def _fresh(seed: int, devices: int) -> tuple[Any, torch.Tensor, tuple[torch.Tensor, ...]]:
    """States of Python's and PyTorch's generators for a seed; setting one copies it."""
    cuda = [torch.Generator(one.device) for one in _cuda_generators()[:devices]]
    return (
        _state_of(random.Random(seed)),
        torch.Generator().manual_seed(seed).get_state(),
        tuple(generator.manual_seed(seed).get_state() for generator in cuda),
    )


def _trade(generator: torch.Generator, state: torch.Tensor) -> torch.Tensor:
    """Set a generator's state; give the one it had."""
    before = generator.get_state()
    generator.set_state(state)
    return before


class Generators:
    """States of the default generators of `random`, numpy and PyTorch (CPU and CUDA).

    ``exchange()`` trades them for the process's: what was here becomes the process's, and what was
    the process's is kept here.

    Args:
        seed: for new generators, the same on every rank and in every process.
    """

    __slots__ = ("_cpu", "_cuda", "_legacy", "_numpy", "_python")

    def __init__(self, seed: int) -> None:
        self._legacy = _POOL.pop() if _POOL else _NumpyGenerator()
        self._legacy.state.seed(seed)
        self._numpy: Any = self._legacy.bits
        self._python, self._cpu, self._cuda = _fresh(seed, len(_cuda_generators()))

    def release(self) -> None:
        """Give numpy's generator to the next block; this object is not used again."""
        if self._numpy is self._legacy.bits:  # else the block has put another in its place
            _POOL.append(self._legacy)

    def exchange(self) -> None:
        """Trade places with the process's generators."""
        before = _python_state()
        _set_python_state(self._python)
        self._python = before
        bits = _numpy.get_bit_generator()
        _numpy.set_bit_generator(self._numpy)
        self._numpy = bits
        cpu = torch.default_generator.get_state()
        torch.default_generator.set_state(self._cpu)
        self._cpu = cpu
        if self._cuda:
            self._cuda = tuple(map(_trade, _cuda_generators(), self._cuda))

    def hand_to(self, other: Generators) -> None:
        """With these in the process: install the other's, which then keep the process's.

        Half the work of two exchanges.
        """
        self._python, other._python = other._python, self._python
        self._numpy, other._numpy = other._numpy, self._numpy
        self._cpu, other._cpu = other._cpu, self._cpu
        self._cuda, other._cuda = other._cuda, self._cuda
        self.exchange()


class Exchange:
    """Whose generators the process has: the engine's, or one block's.

    The engine draws nothing inside a model's forward, so there the last block's stay until another
    block runs or the forward ends.
    """

    def __init__(self) -> None:
        self._owner: Generators | None = None
        self._retired = False

    def give(self, owner: Generators | None) -> None:
        """Install a block's generators, or with None the engine's own."""
        before = self._owner
        if owner is before:
            return
        if before is not None and owner is not None:
            before.hand_to(owner)
        elif before is not None:
            before.exchange()
        elif owner is not None:
            owner.exchange()
        if before is not None and self._retired:
            before.release()
        self._owner, self._retired = owner, False

    def retire(self) -> None:
        """The generators that are here belong to a block that has ended: next time, let them go."""
        self._retired = True
