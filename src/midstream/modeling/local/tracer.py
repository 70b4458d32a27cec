"""One trace in the caller's own process."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from midstream.errors import NotInTraceError, PromptError, UnsupportedError
from midstream.interleaving.barriers import Barrier
from midstream.interleaving.caches import Cache
from midstream.interleaving.gradients import BackwardPass, backward
from midstream.interleaving.recording import open_cache, wanted
from midstream.interleaving.run import current_run, running
from midstream.interleaving.steps import Steps
from midstream.modeling.capturing import Capturing
from midstream.modeling.failing import raise_failures
from midstream.modeling.local.batching import Inputs
from midstream.modeling.local.hosted import LocalBlock, failures
from midstream.modeling.local.names import shared
from midstream.modeling.merging import merge
from midstream.tracing import Block, Execution, bind, save

if TYPE_CHECKING:
    from midstream.modeling.base import Model

Way = str
"""What a trace calls: "trace" for one forward, "generate", "scan"."""


_STEPS = (
    "A step is one forward of the traced call: `trace` has one, and `generate` one for each of up "
    "to `max_new_tokens` tokens, which `ignore_eos=True` keeps from ending early."
)


class Tracer(Capturing):
    """What `model.trace(...)` gives: runs the body of its `with` beside a call of the model.

    With ``block=`` the function has run when the call returns.

    Attributes:
        saves: the saved values by name.
    """

    def __init__(self, model: Model, way: Way, inputs: Inputs | None, settings: Mapping[str, Any]):
        self._model, self._way, self._inputs = model, way, inputs
        self._settings = dict(settings)
        self._invokes: list[tuple[Inputs | None, Block]] = []
        self._collecting = self._used = False
        self._result: Any = None
        self.saves: dict[str, Any] = {}

    def __enter__(self) -> Tracer:
        if self._used:
            raise UnsupportedError(
                "This trace has its block already, and a trace runs once. Call `model.trace(...)` "
                "again, in the header of the next `with`."
            )
        self._begin(sys._getframe(1), f"model.{self._way}")
        return self

    def _captured(self, block: Block, frame: FrameType) -> None:
        try:
            self._take(block, frame)
        finally:
            bind(frame, self.saves)

    def _take(self, block: Block, frame: FrameType | None = None) -> None:
        """Run a captured block; without inputs of its own it gives the trace its invokes."""
        self._used = True
        outer: dict[str, Any] = {}
        if self._inputs is None:
            outer = self._collect(block)
        else:
            self._invokes.append((self._inputs, block))
        self._run(outer, frame)

    def _collect(self, block: Block) -> dict[str, Any]:
        """Execute the trace's own body, which opens its invokes; what it has saved itself."""
        execution = Execution(block, model=self._model, tracer=self)
        self._collecting = True
        try:
            execution.run()
        finally:
            self._collecting = False
        if not any(inputs is not None for inputs, _ in self._invokes):
            raise PromptError(
                "The trace has neither an input nor an invoke with one, so there is nothing to "
                "run. Give it an input, or open `with tracer.invoke(input):` in its body."
            )
        return execution.saves()

    def invoke(self, *args: Any, **keywords: Any) -> Invoke:
        """One input of a trace that was opened without one; all run in one batch.

        Args:
            args, keywords: as of the trace. Without any, the body sees the whole batch.

        Returns:
            A context manager whose body is the block beside that input's rows.

        Raises:
            UnsupportedError: the trace has an input of its own, or runs already.
        """
        if not self._collecting:
            raise UnsupportedError(
                "`tracer.invoke()` belongs into the body of a trace that was opened without an "
                "input: `with model.trace() as tracer:`."
            )
        given = self._model._inputs(self._way, args, keywords, self._settings)
        return Invoke(self, given)

    def _add(self, inputs: Inputs | None, block: Block) -> None:
        self._invokes.append((inputs, block))

    def _run(self, outer: Mapping[str, Any], frame: FrameType | None) -> None:
        """Run the call with the blocks beside it, and bring their values and errors together."""
        blocks = self._blocks(frame)
        inputs = [inputs for inputs, _ in self._invokes]
        self._invokes.clear()  # a block that names its tracer would be kept by it
        try:
            self._result = self._model._call(self._way, inputs, blocks, self._settings)
        finally:
            self.saves = {**merge([block.saves() for block in blocks], {}), **outer}
            if self._model._session is not None:
                self._model._session.note(blocks, frame)
            for block in blocks:
                block.let_go()
        try:
            for block in blocks:
                block.warn()
        finally:
            raise_failures(failures(blocks))

    def _blocks(self, frame: FrameType | None) -> list[LocalBlock]:
        blocks = [block for _, block in self._invokes]
        session = self._model._session
        earlier = session.names(frame) if session is not None else {}
        spaces = shared(blocks, earlier)
        return [
            LocalBlock(block, self._model, self, names)
            for block, names in zip(blocks, spaces, strict=True)
        ]

    # In a block.

    @property
    def iter(self) -> Steps:
        """The forwards of the call: ``for step in tracer.iter[:3]``, see ``Steps``."""
        return Steps(current_run("`tracer.iter`"), _STEPS)

    def all(self) -> Iterator[int]:
        """All forwards from the one the block is beside: ``for step in tracer.all()``."""
        return self.iter[:]

    def stop(self) -> None:
        """End the block here, and the call once no other block needs it. What was saved stays."""
        current_run("`tracer.stop()`").stop()

    def backward(self, loss: torch.Tensor, *args: Any, **keywords: Any) -> BackwardPass:
        """As ``with loss.backward(...):``, for blocks that are functions, see ``gradients``.

        Args:
            loss, args, keywords: as of ``loss.backward``.
        """
        return backward(loss, *args, **keywords)

    def barrier(self, count: int) -> Barrier:
        """A place where blocks of this trace wait for each other, to be called in each of them.

        Args:
            count: how many blocks.
        """
        return Barrier(count)

    @property
    def result(self) -> Any:
        """What the traced call returned. In a block, it waits for that.

        None before the trace has run, and if its blocks have ended the call.
        """
        run = running()
        return self._result if run is None else run.result()

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
        """Record modules from here to the end of the call, also after the block has ended.

        Args:
            modules: modules or their paths, one or several; all if left out.
            device: where values are kept; None leaves them where they are.
            dtype: what floating-point values are converted to.
            detach: take values out of the graph of gradients.
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
            detach=detach,
        )
        return save(open_cache(current_run("`tracer.cache()`"), self._model.tree, modules, fields))

    def __getattr__(self, name: str) -> Any:
        if name == "backend":
            raise NotInTraceError("`tracer.backend` belongs to asynchronous engines of vLLM.")
        raise AttributeError(f"the tracer has no attribute '{name}'")


class Invoke(Capturing):
    """What `tracer.invoke(...)` gives: its body is the block beside one input's rows."""

    def __init__(self, tracer: Tracer, inputs: Inputs | None):
        self._tracer, self._inputs = tracer, inputs

    def __enter__(self) -> Invoke:
        self._begin(sys._getframe(1), "tracer.invoke")
        return self

    def _captured(self, block: Block, frame: FrameType) -> None:
        self._tracer._add(self._inputs, block)
