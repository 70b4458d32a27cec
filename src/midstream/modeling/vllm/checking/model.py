"""`model.check()`: what it is asked for, run on an engine of either mode."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch

from midstream.errors import InterventionError, UnsupportedError
from midstream.modeling.navigating import Navigable
from midstream.modeling.vllm.checking.blocks import FORM, LOGITS
from midstream.modeling.vllm.checking.places import Decoder
from midstream.modeling.vllm.checking.plan import ON_GPU, TOLERANCES, Plan, Write
from midstream.modeling.vllm.checking.reference import Reference
from midstream.modeling.vllm.checking.report import Check
from midstream.modeling.vllm.edits import EditRegistry
from midstream.modeling.vllm.modes import async_only, sync_only

if TYPE_CHECKING:
    from midstream.modeling.transformers.model import TransformersModel
    from midstream.modeling.vllm.tracer import Tracer

PROMPT = "The capital of France is"
IDS = [3, 14, 15, 9, 26, 5, 35, 8]
"""The prompt where there is no tokenizer."""

_GREEDY = {"temperature": 0.0, "max_tokens": 1}

_ELSEWHERE = (
    "model.check() compares with HuggingFace's forward of the checkpoint, and this model is on a "
    "server (serve=). Run it where the checkpoint is, on a VLLM with an engine of its own."
)


class Checking(Navigable):
    """The check of a `VLLM` against HuggingFace."""

    mode: Literal["sync", "async"]
    tokenizer: Any
    trace: Callable[..., Tracer]
    transformers: Callable[..., TransformersModel]
    _edits: EditRegistry
    _home: tuple[str, str | None] | None
    _model_config: Any

    def check(
        self,
        prompt: Any = None,
        *,
        layers: Sequence[int] | None = None,
        tolerance: float | None = None,
        dtype: torch.dtype | None = torch.float32,
        device: str | torch.device = "cpu",
    ) -> Check:
        """Compare reads and writes on this engine with HuggingFace's forward of the checkpoint.

        Of each layer the residual stream, what attention and MLP put out and a router's logits are
        read; then the final norm and the logits. At one layer, the middle one of those that are
        read, the MLP's output is zeroed, the stream is steered, and the likeliest expert is
        ablated; the logits that follow are compared. Installed edits run, as beside every request.

        HuggingFace's model is loaded for it, ``transformers()`` of this model, and dropped again.

        Args:
            prompt: one prompt as ``trace`` takes it; a short text by default.
            layers: indices of layers, negative ones from the end; all by default.
            tolerance: relative error that a row of values may have; by default 1e-4 for an engine
                in float32 (3e-3 on a GPU), 2e-2 in float16, 1e-1 in bfloat16.
            dtype: of HuggingFace's model. In float32 it has the right values, and takes 4 bytes a
                parameter; None is the engine's.
            device: where HuggingFace's model runs.

        Returns:
            The outcome: true if all is equal; printed, it is a table.

        Raises:
            UnsupportedError: the model is asynchronous, or on a server; or its trees have no list
                of layers that belong together.
            IndexError: there is no such layer.
        """
        sync_only(self.mode, "model.check()", "await model.acheck()")
        plan, prompt, local = self._check_plan(prompt, layers, tolerance, dtype)
        plan.learn(self._ran(plan.probe, prompt).saves)
        tracer = self._ran(plan.read, prompt)
        written: list[tuple[Write, Any]] = []
        for write in plan.writes(tracer.saves):
            try:
                written.append((write, self._ran(write.block, prompt).saves[LOGITS]))
            except InterventionError as error:
                written.append((write, error))
        return self._beside_local(plan, tracer, written, local, device)

    async def acheck(
        self,
        prompt: Any = None,
        *,
        layers: Sequence[int] | None = None,
        tolerance: float | None = None,
        dtype: torch.dtype | None = torch.float32,
        device: str | torch.device = "cpu",
    ) -> Check:
        """As ``check``, of an asynchronous model; HuggingFace's forwards run on another thread.

        Raises:
            UnsupportedError: the model is not asynchronous.
        """
        async_only(self.mode, "await model.acheck()", "model.check()")
        plan, prompt, local = self._check_plan(prompt, layers, tolerance, dtype)
        plan.learn((await self._aran(plan.probe, prompt)).saves)
        tracer = await self._aran(plan.read, prompt)
        written: list[tuple[Write, Any]] = []
        for write in plan.writes(tracer.saves):
            try:
                written.append((write, (await self._aran(write.block, prompt)).saves[LOGITS]))
            except InterventionError as error:
                written.append((write, error))
        return await asyncio.to_thread(self._beside_local, plan, tracer, written, local, device)

    def _check_plan(
        self, prompt: Any, layers: Sequence[int] | None, tolerance: float | None, dtype: Any
    ) -> tuple[Plan, Any, TransformersModel]:
        if self._home is not None:
            raise UnsupportedError(_ELSEWHERE)
        loading = {} if dtype is None else {"dtype": dtype}
        local = self.transformers(attn_implementation="eager", **loading)
        count = self._model_config.hf_text_config.num_hidden_layers
        decoder = Decoder(self.tree.modules, local.tree.modules, count)
        if tolerance is None:
            tolerance = _tolerance(self._model_config.dtype)
        if prompt is None:
            prompt = IDS if self.tokenizer is None else PROMPT
        return Plan(decoder, layers, tolerance), prompt, local

    def _ran(self, block: Any, prompt: Any) -> Tracer:
        return self.trace(prompt, block=block, **_GREEDY)

    async def _aran(self, block: Any, prompt: Any) -> Tracer:
        tracer = self.trace(prompt, block=block, **_GREEDY)
        await tracer.backend
        return tracer

    def _beside_local(
        self, plan: Plan, tracer: Tracer, written: Any, local: TransformersModel, device: Any
    ) -> Check:
        local.dispatch()
        module = local.module.to(device).eval()
        reference = Reference(module, tracer.result.prompt_token_ids)
        rows = tuple(plan.rows(tracer.saves, written, reference))
        dtype = next(module.parameters()).dtype
        return Check(
            rows,
            f"{self._model_config.architecture} on vLLM in {_short(self._model_config.dtype)}",
            f"transformers' {type(module).__name__} in {_short(dtype)} on {device}",
            tracer.saves.get(FORM, ""),
            _notes(self._edits),
        )


def _tolerance(dtype: torch.dtype) -> float:
    from vllm.platforms import current_platform

    if dtype == torch.float32 and not current_platform.is_cpu():
        return ON_GPU
    return TOLERANCES[dtype]


def _notes(edits: EditRegistry) -> tuple[str, ...]:
    if not edits.installed:
        return ()
    names = ", ".join(repr(edit.name) if edit.name else "unnamed" for edit in edits.installed)
    return (f"Edits that are installed on this engine ran too: {names}.",)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
