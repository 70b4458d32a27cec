"""The one file that looks into vLLM's asynchronous output side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Watched:
    """What goes through one output processor of vLLM's, looked at on its way.

    The methods are replaced on this instance; vLLM's own task calls them there.

    Args:
        processor: vLLM's `OutputProcessor`.
        begins: called for each sequence, before it is sent: its request's name as it was given, its
            id and its number in the request.
        take: called with the outputs of a step; gives those that vLLM is to process.
        fails: called with the error after which vLLM's task has ended.
    """

    def __init__(
        self,
        processor: Any,
        begins: Callable[[str, str, int], None],
        take: Callable[[list[Any]], list[Any]],
        fails: Callable[[BaseException], None],
    ):
        self._begins, self._take, self._fails = begins, take, fails
        processor.add_request = self._before_adding(processor.add_request)
        processor.process_outputs = self._before_processing(processor.process_outputs)
        processor.propagate_error = self._before_telling(processor.propagate_error)

    def _before_adding(self, add_request: Callable[..., Any]) -> Callable[..., Any]:
        def adding(
            request: Any, prompt: Any, parent: Any = None, index: int = 0, queue: Any = None
        ) -> Any:
            self._begins(request.external_req_id, request.request_id, index)
            return add_request(request, prompt, parent, index, queue)

        return adding

    def _before_processing(self, process_outputs: Callable[..., Any]) -> Callable[..., Any]:
        def processing(outputs: list[Any], *more: Any, **keywords: Any) -> Any:
            return process_outputs(self._take(outputs), *more, **keywords)

        return processing

    def _before_telling(self, propagate_error: Callable[..., Any]) -> Callable[..., Any]:
        def telling(error: Exception) -> Any:
            self._fails(error)
            return propagate_error(error)

        return telling
