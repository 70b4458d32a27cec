"""`model.generate`: prompts through the engine without a block, or a trace by another name."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from midstream.errors import CaptureError, PromptError
from midstream.modeling.capturing import opens_with
from midstream.modeling.vllm.data import Request
from midstream.modeling.vllm.edits import EditRegistry
from midstream.modeling.vllm.failures import tell
from midstream.modeling.vllm.ledger import Outcome
from midstream.modeling.vllm.outputs import attach_edits, edit_records, warn_of_failures

if TYPE_CHECKING:
    from midstream.modeling.vllm.tracer import Tracer


class Outputs(list[Any]):
    """VLLM's outputs of a plain `generate`, in the order of the prompts."""

    def __enter__(self) -> NoReturn:
        raise CaptureError(
            "`model.generate(...)` has run its prompts without a block, as it does outside the "
            "header of a `with` statement. Write `with model.generate(...) as tracer:` where the "
            "body stands, or use `model.trace(...)`, which a helper may return."
        )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Never reached; a `with` statement looks for it before it enters."""


class Generating:
    """What a `VLLM` generates without a block."""

    _edits: EditRegistry
    trace: Callable[..., Tracer]
    _prompt: Callable[..., dict[str, Any]]
    mode: Literal["sync", "async"]
    _submit: Callable[[Sequence[Request]], list[Outcome]]
    _check_settings: Callable[..., None]
    _server: Callable[[str | None, str | None], Any]
    _run_plain: Callable[[Sequence[Request]], Awaitable[Sequence[Outcome]]]

    def generate(
        self,
        *prompts: Any,
        block: Callable[..., Any] | None = None,
        serve: str | None = None,
        api_key: str | None = None,
        **settings: Any,
    ) -> Any:
        """Run prompts as plain vLLM does; in the header of a `with` statement, ``trace``.

        Without `with` the prompts are submitted together and none has a block. With it (``with
        model.generate(prompt) as tracer:``), or with ``block=``, the call is ``trace(...)``.

        Args:
            prompts: prompts as in ``trace``, or lists of them.
            block: as in ``trace``.
            serve, api_key: as in ``trace``.
            settings: as in ``trace``; they apply to every prompt. What they leave out has vLLM's
                default: 16 tokens, drawn at temperature 1.0.

        Returns:
            vLLM's `RequestOutput` of each prompt, in their order (with mode="async" a coroutine
            that gives them when it is awaited); or the tracer. Outputs of
            requests that installed edits ran beside have ``saves``, the edits' values by name, and
            ``edit_error``, an `InterventionError` or None.

        Raises:
            PromptError: no prompt, or something that is none.
            TypeError: an unknown setting.
            ValueError: no installed edit has one of the names.
        """
        if block is not None or opens_with(sys._getframe(1)):
            return self.trace(*prompts, block=block, serve=serve, api_key=api_key, **settings)
        self._check_settings(settings)
        server = self._server(serve, api_key)
        if server is None:
            self._edits.chosen(settings.get("edits"))
        found = [self._prompt(each, ()) for each in _several(prompts)]
        requests = [Request(each, dict(settings), b"") for each in found]
        if self.mode == "async":
            return self._generate(self._run_plain if server is None else server.run, requests)
        return _outputs((self._submit if server is None else server.run)(requests))

    async def _generate(self, run: Any, requests: Sequence[Request]) -> Outputs:
        return _outputs(await run(requests))


def _outputs(outcomes: Sequence[Outcome]) -> Outputs:
    attach_edits(outcomes)
    tell(edit_records(outcomes))
    warn_of_failures(outcomes, stacklevel=4)
    return Outputs(outcome.output for outcome in outcomes)


def _several(given: tuple[Any, ...]) -> list[Any]:
    """Take lists of prompts apart."""
    if not given:
        raise PromptError("generate() needs a prompt, or a list of prompts.")
    if len(given) > 1:
        return list(given)
    only = given[0].tolist() if hasattr(given[0], "tolist") else given[0]
    return list(only) if _is_list_of_prompts(only) else [only]


def _is_list_of_prompts(value: Any) -> bool:
    """Whether a value is several prompts; token ids and chat messages are one."""
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        return False
    return any(
        isinstance(item, str | Sequence)
        or getattr(item, "ndim", 0)
        or (isinstance(item, Mapping) and "role" not in item)
        for item in value
    )
