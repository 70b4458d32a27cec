"""What a block can ask its tracer for, beside steps: a cache, and the request's result."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from midstream.errors import UnsupportedError
from midstream.interleaving.caches import Cache
from midstream.interleaving.node import Tree
from midstream.interleaving.recording import open_cache, wanted
from midstream.interleaving.run import current_run
from midstream.modeling.vllm.results import Result
from midstream.modeling.vllm.unsupported import BARRIER, EDIT_RESULT
from midstream.tracing.saves import save


class Controls:
    """Base of `tracer` inside a block.

    Args:
        tree: the modules of the model.
    """

    _tree: Tree

    def __init__(self, tree: Tree):
        object.__setattr__(self, "_tree", tree)

    def cache(
        self,
        modules: Any = None,
        device: torch.device | str | None = "cpu",
        dtype: torch.dtype | None = None,
        detach: bool = True,
        include_output: bool = True,
        include_inputs: bool = False,
        non_blocking: bool = False,
    ) -> Cache:
        """Record modules from here to the end of the request, also after the block has ended.

        Args:
            modules: modules or their paths, one or several; all if left out.
            device: where values are kept while the request runs; None leaves them where they are.
                They come home on the CPU.
            dtype: what floating-point values are converted to.
            detach: has no effect: nothing in the engine records gradients.
            include_output: record what the modules return, after all edits.
            include_inputs: record what they are called with, after all edits.
            non_blocking: copy to the CPU beside the forward, into page-locked memory.

        Returns:
            The cache, which is saved under the name it is bound to.

        Raises:
            ValueError: the block has read or written something already, or there is no such module.
        """
        fields = wanted(
            device,
            include_output=include_output,
            include_inputs=include_inputs,
            dtype=dtype,
            non_blocking=non_blocking,
        )
        return save(open_cache(current_run("`tracer.cache()`"), self._tree, modules, fields))

    @property
    def result(self) -> Result:
        """The finished request: text, token ids, log probabilities, and why it ended.

        The block waits here until the request has ended, so it can read nothing of the model
        afterwards.

        Raises:
            MidstreamError: the request was aborted.
            UnsupportedError: in an installed edit.
        """
        run = current_run("`tracer.result`")
        if not run.gets_result:
            raise UnsupportedError(EDIT_RESULT)
        return run.result()  # type: ignore[no-any-return]

    def barrier(self, *args: Any) -> NoReturn:
        """Refuse, and say what to write instead.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(BARRIER)
