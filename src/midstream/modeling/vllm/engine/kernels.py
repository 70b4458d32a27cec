"""vLLM's hand-written kernels, switched in for a step that runs without its compiled graph.

Under torch.compile vLLM turns its own kernels off and lets the compiler fuse plain operations.
An eager step would run those one by one, at twice the time. The choice here is the one vLLM makes
for an eager engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import torch


class EagerKernels:
    """The operations of one model that an eager vLLM engine would run with its own kernels.

    Args:
        root: the loaded model.
        config: vLLM's configuration of the engine.
    """

    def __init__(self, root: torch.nn.Module, config: Any):
        from vllm.config import CompilationMode
        from vllm.platforms import current_platform

        compiled = config.compilation_config.mode != CompilationMode.NONE
        self._modules: list[Any] = []
        self._methods: list[Any] = []
        self._on = False
        self._priority: Any = None
        if compiled and current_platform.is_cuda() and not _batch_invariant():
            self._modules = _switchable(root, config.compilation_config.custom_ops)
            self._methods = [module.forward_cuda for module in self._modules]
            eager = SimpleNamespace(backend="eager", mode=CompilationMode.NONE)
            self._priority = current_platform.get_default_ir_op_priority(
                SimpleNamespace(compilation_config=eager)
            )

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Run a step with them."""
        if self._priority is None or self._on:
            yield
            return
        before = [module._forward_method for module in self._modules]
        with ExitStack() as stack:
            stack.enter_context(self._priority.set_priority())
            self._on = True
            # into the instances' dictionaries: a module's own attribute setter takes microseconds
            for module, method in zip(self._modules, self._methods, strict=True):
                module.__dict__["_forward_method"] = method
            try:
                yield
            finally:
                self._on = False
                for module, method in zip(self._modules, before, strict=True):
                    module.__dict__["_forward_method"] = method


def _batch_invariant() -> bool:
    from vllm import envs

    return bool(envs.VLLM_BATCH_INVARIANT)


def _switchable(root: torch.nn.Module, custom_ops: list[str]) -> list[Any]:
    """Operations with a CUDA kernel that the user has not turned off by name."""
    from vllm.model_executor.custom_op import CustomOp

    return [
        module
        for module in root.modules()
        if isinstance(module, CustomOp)
        and type(module).forward_cuda is not CustomOp.forward_cuda
        and f"-{getattr(type(module), 'name', '')}" not in custom_ops
    ]
