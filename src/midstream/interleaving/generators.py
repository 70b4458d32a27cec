"""The process's random generators, exchanged when control passes between engine and block.

A block draws from generators of its own, seeded alike on every rank, and the engine's go on
where they stood. The exchange runs at every visit, so it has to cost about a microsecond:
numpy's bit generator is swapped as an object, PyTorch's state is five kilobytes, and Python's
`random` keeps its state in a C structure that is copied as bytes where its layout is the one
this file knows (checked once), through the slow public calls otherwise.
"""

from __future__ import annotations

import ctypes
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
    if _FAST:
        return ctypes.string_at(_address, _STATE_BYTES), _inst.gauss_next  # type: ignore[attr-defined]
    return _inst.getstate()


def _set_python_state(state: Any) -> None:
    if _FAST:
        ctypes.memmove(_address, state[0], _STATE_BYTES)
        _inst.gauss_next = state[1]  # type: ignore[attr-defined]
    else:
        _inst.setstate(state)


def _cuda_generators() -> list[torch.Generator]:
    return list(torch.cuda.default_generators) if torch.cuda.is_initialized() else []


class Generators:
    """States of the default generators of `random`, numpy and PyTorch (CPU and CUDA).

    ``Generators.current()`` are the process's; ``Generators.seeded(seed)`` are new ones.
    ``install()`` makes them the process's and returns what was there before.
    """

    __slots__ = ("_cpu", "_cuda", "_numpy", "_python")

    def __init__(self, python: Any, numpy: Any, cpu: torch.Tensor, cuda: list[torch.Tensor]):
        self._python, self._numpy, self._cpu, self._cuda = python, numpy, cpu, cuda

    @classmethod
    def current(cls) -> Generators:
        """The process's generators as they stand."""
        return cls(
            _python_state(),
            _numpy.get_bit_generator(),
            torch.default_generator.get_state(),
            [generator.get_state() for generator in _cuda_generators()],
        )

    @classmethod
    def seeded(cls, seed: int) -> Generators:
        """New generators from a seed: the same draws on every rank and in every process."""
        before = cls.current()
        _numpy.set_bit_generator(np.random.MT19937(seed))
        random.seed(seed)
        torch.default_generator.manual_seed(seed)
        for generator in _cuda_generators():
            generator.manual_seed(seed)
        return before.install()

    def install(self) -> Generators:
        """Make these the process's generators; returns those that were."""
        before = Generators.current()
        _set_python_state(self._python)
        _numpy.set_bit_generator(self._numpy)
        torch.default_generator.set_state(self._cpu)
        for generator, state in zip(_cuda_generators(), self._cuda, strict=False):
            generator.set_state(state)
        return before
