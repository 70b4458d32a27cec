"""What other tools' blocks can do and blocks on vLLM cannot: why not, and what to write instead."""

from __future__ import annotations

from types import TracebackType

from midstream.errors import UnsupportedError

BARRIER = (
    "`tracer.barrier()` is not supported on vLLM: each block runs beside a request of its own, and "
    "requests of one trace need not be in the same step. Save the value in one trace and use it in "
    "a second one: a block reads names from outside, tensors included."
)

SCAN = (
    "`model.scan()` is not supported on vLLM: its kernels need a batch and a cache, so there is no "
    "forward without values. Trace a short prompt with `max_tokens=1` and save the shapes: "
    "`shape = model.get('model.layers.0').output[0].shape.save()`."
)

EDIT_RESULT = (
    "`tracer.result` in an edit is not supported: an edit runs beside plain requests too, whose "
    "results nobody sends back into the engine. What the edit saves is in `saves` of the same "
    "output that has the text."
)

RESULT_SAVES = (
    "`saves` of a result that a block is given has the values of installed edits, and there are "
    "none: no edit ran beside this sequence. What the block itself saves is bound to its names "
    "after the `with` statement."
)

EDIT_INVOKE = (
    "`tracer.invoke()` in an edit is not supported{where}: an edit has no requests of its own, it "
    "runs beside the later ones that it applies to. Write what is to be done beside them into the "
    "body of the edit itself, and give the prompts to `model.trace` or `model.generate` afterwards."
)

ASYNC_SESSION = (
    "`model.session()` is not supported with mode='async': other tasks' requests run between its "
    "traces all the same. Traces run in the order that you await them in: write `async with "
    "model.trace(...)` one after the other, or `await tracer.backend` in between."
)

_ELSEWHERE = {
    "remote": (
        "`remote=` is not supported: there is no hosted service to send the block to. A server of "
        "your own, started with `midstream serve MODEL`, is named with `serve=`: "
        "`model.trace(prompt, serve='http://localhost:8000')`."
    ),
    "serve": (
        "`serve=` belongs to `model.trace(...)`, `model.generate(...)`, `model.edit(...)` or "
        "`VLLM(...)`: the requests of one trace go to one server."
    ),
    "api_key": "`api_key=` belongs where `serve=` does: to `model.trace(...)` or `VLLM(...)`.",
}
"""Keywords that name another place for a block to run."""

_GRADIENTS = (
    "Gradients through the model are not supported on vLLM: its kernels run in inference mode and "
    "record no graph. Trace the same block on midstream.TransformersModel, or measure the effect "
    "of small edits instead. (Gradients of tensors that the block makes itself, with "
    "`requires_grad=True` and under `torch.enable_grad()`, work.)"
)


def refuse_elsewhere(argument: str) -> None:
    """Refuse a keyword that names another place for a block to run.

    Raises:
        UnsupportedError: `argument` is one.
    """
    if argument in _ELSEWHERE:
        raise UnsupportedError(_ELSEWHERE[argument])


def gradients(error: BaseException) -> UnsupportedError | None:
    """The refusal that PyTorch's error stands for, with its traceback; None for any other error."""
    asked = "does not require grad" in str(error) and _in_autograd(error.__traceback__)
    return UnsupportedError(_GRADIENTS).with_traceback(error.__traceback__) if asked else None


def _in_autograd(traceback: TracebackType | None) -> bool:
    while traceback is not None:
        if traceback.tb_frame.f_globals.get("__name__", "").startswith("torch.autograd"):
            return True
        traceback = traceback.tb_next
    return False
