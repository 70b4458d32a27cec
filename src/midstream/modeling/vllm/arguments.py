"""What users pass: checked early, refused with what to write instead."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from midstream.errors import UnsupportedError
from midstream.modeling.spellings import on_engine
from midstream.modeling.vllm.unsupported import refuse_elsewhere

GPU_WORKER = "midstream.modeling.vllm.engine.worker.BlockWorker"
CPU_WORKER = "midstream.modeling.vllm.engine.cpu_worker.CPUBlockWorker"
_SCHEDULER = "midstream.modeling.vllm.engine.scheduler.BlockScheduler"

_NOT_SAMPLING = ("lora_request", "edits", "stream_saves")
"""Settings of a request that vLLM's sampling parameters do not hold."""

_ROWS = (
    "A rank would have only some of a request's tokens, and no place where a block sees all of "
    "them. Leave it out; tensor_parallel_size divides a model over GPUs."
)
_ONE_ONLY = {
    "data_parallel_size": (
        "Each replica has requests of its own, and a trace's would be spread over engines that do "
        "not know of each other. Build one VLLM per replica, or divide one over more GPUs with "
        "tensor_parallel_size."
    ),
    "decode_context_parallel_size": _ROWS,
    "prefill_context_parallel_size": _ROWS,
}
_SIZES = ("tensor_parallel_size", "pipeline_parallel_size")
_ABSENT = {
    "speculative_config": "A step would run tokens that are thrown away; leave it out.",
    "enable_batch_sharded_sampling": "Each rank would see only some requests; leave it out.",
    "enable_sleep_mode": "A sleeping engine has no weights to run a block on; use `close()`.",
    "enable_dbo": "It splits a step's rows in two; leave it out.",
}

POOLING = (
    "Only models that generate text are supported; pooling models have no steps to trace. Leave "
    "`runner`, `convert` and `task` out, and choose a checkpoint that generates."
)


def refuse(arguments: Mapping[str, Any]) -> None:
    """Refuse engine arguments that blocks cannot work with.

    Raises:
        UnsupportedError: naming the argument, why, and what to write instead.
    """
    for name, instead in _ONE_ONLY.items():
        if (arguments.get(name) or 1) > 1:
            raise UnsupportedError(f"{name}={arguments[name]} is not supported. {instead}")
    if all((arguments.get(name) or 1) > 1 for name in _SIZES):
        raise UnsupportedError(
            "tensor_parallel_size and pipeline_parallel_size above 1 are not supported together. "
            "Divide the model in one of the two ways."
        )
    for name, instead in _ABSENT.items():
        if arguments.get(name):
            raise UnsupportedError(f"{name}={arguments[name]!r} is not supported. {instead}")
    if arguments.get("runner", "auto") not in ("auto", "generate") or arguments.get("task"):
        raise UnsupportedError(POOLING)


def ranks(arguments: Mapping[str, Any]) -> int:
    """How many workers an engine has."""
    sizes = (arguments.get(name) or 1 for name in _SIZES)
    return math.prod(int(size) for size in sizes)


def check_mode(mode: str) -> None:
    """Check the engine's mode.

    Raises:
        ValueError: an unknown mode.
    """
    if mode not in ("sync", "async"):
        raise ValueError(f"mode={mode!r}: expected 'sync' or 'async'.")


def check_known(
    arguments: Iterable[str], known: Iterable[str], what: str, ours: Iterable[str]
) -> None:
    """Refuse a keyword nobody knows.

    Args:
        arguments: what was given.
        known: what vLLM knows.
        what: what these are, for the message.
        ours: keywords beside them, for the message too.

    Raises:
        TypeError: naming it and the nearest one there is, or what stands for a HuggingFace word.
        UnsupportedError: it names another place for the block to run.
    """
    known = known if isinstance(known, frozenset) else frozenset(known)
    for name in arguments:
        if name not in known:
            refuse_elsewhere(name)
            raise TypeError(f"'{name}' is not {what}.{on_engine(name) or _near(name, ours, known)}")


def _near(name: str, ours: Iterable[str], known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, [*ours, *known], n=1)
    return f" Did you mean '{near[0]}'?" if near else ""


def check_classes(arguments: Mapping[str, Any], *, cpu: bool) -> None:
    """Check a user's own worker and scheduler.

    Raises:
        ValueError: one of them does not subclass ours.
    """
    worker(arguments.get("worker_cls"), cpu=cpu)
    if arguments.get("scheduler_cls") is not None:
        scheduler(arguments["scheduler_cls"])


def worker(given: Any, *, cpu: bool) -> Any:
    """The worker class to use: ours, or a user's that subclasses it.

    Raises:
        ValueError: the user's does not.
    """
    ours = CPU_WORKER if cpu else GPU_WORKER
    return given if _checked(given, ours, "worker_cls") else ours


def scheduler(given: Any) -> Any:
    """The scheduler class to use: ours, or a user's that subclasses it.

    Raises:
        ValueError: the user's does not.
    """
    from midstream.modeling.vllm.engine.scheduler import PickScheduler

    return given if _checked(given, _SCHEDULER, "scheduler_cls") else PickScheduler


def _checked(given: Any, ours: str, name: str) -> bool:
    if given is None or given == "auto":
        return False
    from vllm.utils.import_utils import resolve_obj_by_qualname

    base = resolve_obj_by_qualname(ours)
    mixin = base.__mro__[1]
    kind = resolve_obj_by_qualname(given) if isinstance(given, str) else given
    if isinstance(kind, type) and issubclass(kind, mixin):
        return True
    raise ValueError(
        f"{name}={given!r} does not subclass {mixin.__module__}.{mixin.__name__}, which runs the "
        f"blocks. Derive your class from {ours}."
    )


def check_settings(settings: Mapping[str, Any], *, streams: bool = False) -> None:
    """Check what a trace or an invoke is given beside its prompt.

    Args:
        streams: whether its outputs can be had as they come.

    Raises:
        TypeError: an unknown keyword, or both spellings of one.
        UnsupportedError: `stream_saves` of what gives no outputs as they come.
        ValueError: vLLM's own, for a value out of range.
    """
    if not settings:
        return
    check_ours(settings, streams=streams)
    sampling(without_ours(settings))


def check_ours(settings: Mapping[str, Any], *, streams: bool) -> None:
    """Check the settings that vLLM's sampling parameters do not hold, see ``check_settings``."""
    check_edit_names(settings.get("edits"))
    if settings.get("stream_saves") and not streams:
        raise UnsupportedError(
            "stream_saves= belongs to a trace of VLLM(..., mode='async'), whose outputs come one "
            "after the other. Leave it out: what is saved is there when the trace has ended."
        )


def without_ours(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that are vLLM's sampling parameters."""
    return {name: value for name, value in settings.items() if name not in _NOT_SAMPLING}


def check_edit_names(names: Any) -> None:
    """Check what chooses installed edits.

    Raises:
        TypeError: no list of names.
    """
    whole = isinstance(names, str) or not isinstance(names, list | tuple | set | frozenset)
    if names is not None and (whole or not all(isinstance(name, str) for name in names)):
        raise TypeError(
            f"edits={names!r}: expected a list of the names that edits were installed under, such "
            'as edits=["calm"].'
        )


def sampling(settings: Mapping[str, Any]) -> Any:
    """VLLM's sampling parameters from keywords; `max_new_tokens` stands for `max_tokens`.

    Raises:
        TypeError: an unknown keyword, or both spellings of one.
        ValueError: a whole number that no engine can take in.
        VLLMValidationError: vLLM's own, for a value out of range.
    """
    from vllm.sampling_params import SamplingParams  # the package's own name is slow to reach

    fields = sampling_fields(settings)
    found = oversized(fields)
    if found is not None:
        name, bits = found
        raise ValueError(
            f"{name} has a number of more than {bits + 1} bits, which would end the engine: whole "
            f"numbers in it go from {-(2**bits)} to {2**bits - 1}."
        )
    return SamplingParams(**fields)


_BITS = {"seed": 63, "max_tokens": 30}  # the prompt is added to the latter
"""Of a whole number, without its sign; 31 of all others."""


def oversized(settings: Mapping[str, Any]) -> tuple[str, int] | None:
    """The first setting with a whole number that the engine's processes have no form for.

    Returns:
        Its name and how many bits a number in it may have, beside its sign; None if all fit.
    """
    for name, value in settings.items():
        bits = _BITS.get(name, 31)
        if any(not -(2**bits) <= number < 2**bits for number in _numbers(value)):
            return name, bits
    return None


def _numbers(value: Any) -> Iterator[int]:
    if isinstance(value, int):
        yield value
    elif isinstance(value, Mapping):
        yield from _numbers([*value, *value.values()])
    elif isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from _numbers(item)


def sampling_fields(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling settings under the names of vLLM's `SamplingParams`.

    Raises:
        TypeError: an unknown keyword, or both spellings of one.
    """
    settings = dict(settings)
    if "max_new_tokens" in settings:
        if "max_tokens" in settings:
            raise TypeError("max_tokens and max_new_tokens are two names of one setting: pass one.")
        settings["max_tokens"] = settings.pop("max_new_tokens")
    what = "a sampling setting (a field of vLLM's SamplingParams)"
    check_known(
        settings, _sampling_fields(), what, ("block", "run", "max_new_tokens", *_NOT_SAMPLING)
    )
    return settings


@functools.cache
def _sampling_fields() -> frozenset[str]:
    from vllm import SamplingParams

    return frozenset(inspect.signature(SamplingParams).parameters)
