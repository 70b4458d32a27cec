"""Builds vLLM's engine, and says why when it does not come up."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from multiprocessing.util import register_after_fork
from pathlib import Path
from typing import Any

import msgspec

from midstream.errors import EngineBuildError
from midstream.modeling.vllm import arguments as args
from midstream.modeling.vllm import bootstrap
from midstream.modeling.vllm._bootstrap import follow
from midstream.modeling.vllm.ending import fail_calls
from midstream.modeling.vllm.engine import process
from midstream.modeling.vllm.payloads.segments import owner_id, sweep

# A forked engine process imports nothing: without this it would not follow its client yet. In all
# other forks `enter` finds no client to follow.
register_after_fork(process, lambda module: module.enter())


_TAGS = itertools.count()  # tell this process's engines apart


def new_owner() -> str:
    """Name the client of one engine; also removes what clients left behind that were killed."""
    sweep()
    return owner_id(tag=next(_TAGS))


def build(
    repo: str,
    settings: dict[str, Any],
    vllm: bootstrap.Installed,
    owner: str,
    *,
    invariant: bool = False,
    asynchronous: bool = False,
) -> Any:
    """Build an engine.

    Args:
        repo: checkpoint folder or repository id.
        settings: vLLM's engine arguments; completed in place.
        vllm: the installed vLLM.
        owner: names this engine's client to its processes.
        invariant: whether it is to use batch-invariant kernels.
        asynchronous: whether it is to serve an event loop; then it has a process of its own.

    Returns:
        vLLM's `LLM`, or its `AsyncLLM`.

    Raises:
        EngineBuildError: it did not come up; the text holds the root cause.
        UnsupportedError: ``invariant`` differs from an earlier engine's in this process.
    """
    make = _make_async if asynchronous else _make
    here = bootstrap.in_process() and not asynchronous
    ranks = args.ranks(settings)
    if vllm.cpu:
        # the interpreter that runs Triton's kernels there cannot be compiled
        settings.setdefault("enforce_eager", True)
    settings["worker_cls"] = args.worker(settings.get("worker_cls"), cpu=vllm.cpu)
    settings["scheduler_cls"] = args.scheduler(settings.get("scheduler_cls"))
    with tempfile.TemporaryDirectory(prefix="midstream-") as folder:
        report = Path(folder) / "failures"
        alone = here and ranks == 1  # no other process is started
        variables = bootstrap.process_variables(vllm, invariant=invariant, here=here, ranks=ranks)
        variables[process.CLIENT] = owner
        variables[follow.PARENT] = str(os.getpid())
        if not alone:
            variables[process.REPORT] = os.environ.get(process.REPORT, str(report))
        with bootstrap.environment(variables), nullcontext() if alone else _one_thread():
            refuse_reimport()
            try:
                with nullcontext() if here else _no_waiting_for_the_dead():
                    return make(repo, settings)
            except Exception as error:
                raise _failure(error, process.read_failures(report)) from error


def _make(repo: str, settings: dict[str, Any]) -> Any:
    from vllm import LLM

    return LLM(model=repo, **settings)


def _make_async(repo: str, settings: dict[str, Any]) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    # as in `LLM`: counting for its own log costs each step, and nobody asks for it
    return AsyncLLM.from_engine_args(
        AsyncEngineArgs(model=repo, **{"disable_log_stats": True, **settings})
    )


_ENDED = (
    "The engine did not start: its process was told to end while it started, and ended. A Ctrl-C "
    "in a terminal reaches every process of the program; build it again."
)


@contextmanager
def _no_waiting_for_the_dead() -> Iterator[None]:
    """Fail what vLLM asks of an engine that ended after it had said that it has started.

    One that is told to end while it starts (a Ctrl-C reaches all processes of a terminal) does so,
    and vLLM would wait for its answer for ever.
    """
    before, done = set(multiprocessing.active_children()), threading.Event()

    def look() -> None:
        started: set[Any] = set()
        while not done.wait(0.5):
            started |= set(multiprocessing.active_children()) - before
            if any(child.exitcode is not None for child in started):
                _fail_calls_of_the_dead()

    thread = threading.Thread(target=look, name="midstream-build", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _fail_calls_of_the_dead() -> None:
    from vllm.v1.engine.core_client import MPClient

    for client in (found for found in gc.get_objects() if issubclass(type(found), MPClient)):
        manager = client.resources.engine_manager
        if manager is None or all(core.exitcode is None for core in manager.processes):
            continue
        fail_calls(client.utility_results, EngineBuildError(_ENDED))


@contextmanager
def _one_thread() -> Iterator[None]:
    """Keep PyTorch to one thread while vLLM forks this process.

    A fork does not take OpenMP's threads along, and the child waits for them for ever as soon as
    an operation wants more than one. vLLM's processes serve with one thread anyway.
    """
    import torch

    threads = torch.get_num_threads()
    if threads > 1:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if threads > 1:
            torch.set_num_threads(threads)


def refuse_reimport() -> None:
    """Refuse to build while a started process imports the main module a second time.

    Raises:
        EngineBuildError: with what to write; the process that started this one gets it too.
    """
    if not getattr(multiprocessing.current_process(), "_inheriting", False):
        return
    text = (
        "The engine's process imports your script again when it starts, and the script builds "
        "another engine there. Put what your script does into a function and call it under "
        "`if __name__ == '__main__':`."
    )
    process.report(EngineBuildError.__name__, text)
    raise EngineBuildError(text)


def _failure(error: Exception, reported: list[process.Failure]) -> EngineBuildError:
    """The error of a failed build, with the first cause the engine's processes reported."""
    if isinstance(error, EngineBuildError):
        return error
    kind, message, traceback = type(error).__name__, str(error), ""
    if reported:
        kind, message, traceback = msgspec.structs.astuple(reported[0])
    text = message if kind == EngineBuildError.__name__ else f"{kind}: {message}"
    if traceback:
        text += f"\n\nIn the engine's process:\n{traceback}"
    return EngineBuildError(f"The engine did not start: {text}")
