"""Edits beside what OpenAI's routes generate, on the one way by which they reach the engine."""

from __future__ import annotations

import itertools
import os
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from midstream.modeling.vllm.ledger import load
from midstream.modeling.vllm.outputs import attach_edits
from midstream.modeling.vllm.wire import KEY, Payload
from midstream.serve.access import CALLER, Caller
from midstream.serve.calls import check_numbers
from midstream.serve.problems import Problem
from midstream.serve.served import Served


class Steering:
    """Stands before `generate` of one of vLLM's `AsyncLLM`, on that instance.

    Args:
        served: the engine, its edits.
    """

    def __init__(self, served: Served):
        self._served = served
        self._plain = served.engine.llm.generate
        self._names = itertools.count()
        served.engine.llm.generate = self.generate

    async def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **more: Any
    ) -> AsyncGenerator[Any, None]:
        """VLLM's outputs of a request, with its owner's edits beside it.

        Raises:
            VLLMValidationError: a client has set what only midstream may set.
            PromptError: edits act on it, and the prompt is longer than a step.
        """
        _refuse_our_key(sampling_params)
        _refuse_long_numbers(sampling_params)
        # a client may choose the name; what is ours must not be taken for it
        name = f"plain-{next(self._names)}-{request_id}"
        caller = CALLER.get()
        edits = self._edits(caller)
        outputs: AsyncGenerator[Any, None] = (
            self._edited(caller, edits, prompt, sampling_params, name, more)
            if caller is not None and edits
            else self._plain(prompt, sampling_params, name, **more)
        )
        async with aclosing(outputs):
            async for output in outputs:
                yield output

    def _edits(self, caller: Caller | None) -> list[int]:
        if caller is None:
            return []
        if caller.edits is None:
            return self._served.installed.chosen(caller.owner, None)
        return caller.edits

    async def _edited(
        self, caller: Caller, edits: list[int], prompt: Any, params: Any, name: str, more: Any
    ) -> AsyncGenerator[Any, None]:
        engine, payload = self._served.engine, Payload(edits=edits)
        prompt, params = _as_mapping(prompt), params.clone()
        self._served.check_length(prompt)
        load(params, prompt, payload, f"midstream-{os.urandom(8).hex()}")
        running = engine.expect(name, payload, params.n)
        place = len(caller.found)
        caller.found.append(None)
        try:
            async with aclosing(self._plain(prompt, params, name, **more)) as outputs:
                async for output in outputs:
                    if output.finished:
                        running.output = output
                        await engine.settle(running)
                        attach_edits([running])
                        caller.found[place] = output.saves, output.edit_error
                        self._note(caller, output.edit_error)
                    yield output
        finally:
            engine.forget(running)

    def _note(self, caller: Caller, error: BaseException | None) -> None:
        if error is not None:
            self._served.traces.note(caller.owner, str(error))


def _refuse_our_key(params: Any) -> None:
    from vllm.exceptions import VLLMValidationError

    if KEY in (getattr(params, "extra_args", None) or {}):
        raise VLLMValidationError(
            f"'{KEY}' is set by midstream's server alone.", parameter="vllm_xargs"
        )


def _refuse_long_numbers(params: Any) -> None:
    from vllm.exceptions import VLLMValidationError

    try:
        check_numbers({name: getattr(params, name) for name in params.__struct_fields__})
    except Problem as problem:
        raise VLLMValidationError(problem.text, parameter=problem.param) from problem


def _as_mapping(prompt: Any) -> dict[str, Any]:
    """The prompt as a dictionary of its own, which a salt can be put into."""
    from vllm.exceptions import VLLMValidationError

    if isinstance(prompt, str):
        return {"prompt": prompt}
    if isinstance(prompt, dict):
        return dict(prompt)
    if isinstance(prompt, list):
        return {"prompt_token_ids": prompt}
    raise VLLMValidationError(
        "Edits cannot act on this kind of request; clear them, or use another route."
    )
