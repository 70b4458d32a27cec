"""How an engine ends: the processes it runs in, or what it holds of this one."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import connection, resource_tracker
from pathlib import Path
from typing import Any

from midstream.modeling.vllm.engine import process

PATIENCE = 30.0  # seconds for a healthy engine's processes to put down what they hold
_SHARED = re.compile(r"psm_\w+|sem\.mp-\w+")  # what Python calls shared memory


class Ending:
    """The end of one engine.

    Args:
        client: vLLM's client of the engine core.
        on_death: called, in a thread of its own, when the engine core is gone, to wake who waits
            for it; by default those of a client that waits in threads.
    """

    def __init__(self, client: Any, on_death: Callable[[], None] | None = None):
        self._cores: list[Any] = []
        self._workers: list[Any] = []
        self._shared: set[str] = set()
        core = getattr(client, "engine_core", None)
        if core is not None:
            _keep_shared_groups(client, core)
        else:
            self._cores = list(client.resources.engine_manager.processes)
            self._workers = _children(self._cores)
            pids = [child.pid for child in (*self._cores, *self._workers)]
            self._shared = _shared_memory(pids) - _shared_memory([os.getpid()])
            if on_death is None:
                waiting = (client.outputs_queue, client.utility_results, client.resources)
                on_death = partial(_announce_death, *waiting)
            threading.Thread(target=_watch, args=(self._cores, on_death), daemon=True).start()

    @property
    def has_begun(self) -> bool:
        """Whether one of its processes is gone, so that the others will follow."""
        ended = any(core.exitcode is not None for core in self._cores)
        return ended or any(map(_is_gone, self._workers))

    def __call__(self, client: Any, patience: float = PATIENCE) -> None:
        """End it; nothing of it is left when this returns.

        Args:
            client: vLLM's client of the engine core.
            patience: seconds for its processes to end by themselves, before they are killed.
        """
        with _waking(self._cores):
            client.shutdown(timeout=patience)
        for core in self._cores:  # vLLM leaves a process that it had to kill as a zombie
            core.join(PATIENCE)
        _kill(self._workers)
        _remove(self._shared)
        self._cores, self._workers, self._shared = [], [], set()


def _watch(cores: list[Any], on_death: Callable[[], None]) -> None:
    connection.wait([core.sentinel for core in cores])
    on_death()


def _announce_death(outputs: Any, calls: Mapping[Any, Future[Any]], resources: Any) -> None:
    """Wake who waits for outputs or an answer when the engine is gone.

    vLLM does so only for outputs, and only if the engine could say that it ends.
    """
    from vllm.v1.engine.exceptions import EngineDeadError

    outputs.put(EngineDeadError())
    for _ in range(100):
        known = resources.engine_dead  # then vLLM begins no further call
        fail_calls(calls, EngineDeadError())
        if known:
            return
        time.sleep(0.05)


def fail_calls(calls: Mapping[Any, Any], error: Exception) -> None:
    """Give an error to the calls of an engine that have no answer and will get none.

    They are futures of threads, or of the event loop that calls this.
    """
    for call in list(calls.values()):
        with suppress(InvalidStateError, asyncio.InvalidStateError):  # it has its answer
            call.set_exception(error)


@contextmanager
def _waking(cores: list[Any]) -> Iterator[None]:
    """Wake engine cores from time to time.

    vLLM asks a core to end by a signal, sent once. Python answers a signal when its main thread
    next executes, and that of a core may just then begin to wait for work, for ever.
    """
    done = threading.Event()

    def wake() -> None:
        while not done.wait(1.0):
            for core in cores:
                with suppress(ProcessLookupError):
                    os.kill(core.pid, process.WAKE)

    threading.Thread(target=wake, daemon=True).start()
    try:
        yield
    finally:
        done.set()


def _children(cores: list[Any]) -> list[Any]:
    """The processes that engine cores have started: a worker for each rank."""
    import psutil  # comes with vLLM

    return [child for core in cores for child in psutil.Process(core.pid).children(recursive=True)]


def _is_gone(worker: Any) -> bool:
    import psutil

    try:
        return bool(worker.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def _kill(workers: list[Any]) -> None:
    """Kill what has outlived its engine core."""
    import psutil

    for worker in workers:
        if worker.is_running():
            worker.kill()
    psutil.wait_procs(workers, timeout=PATIENCE)


def _shared_memory(pids: Iterable[int]) -> set[str]:
    """Names of the shared memory and the semaphores that processes have mapped (Linux).

    A semaphore is mapped under another name than it ends up with: the file is what tells.
    """
    mapped = set[int]()
    for pid in pids:
        with suppress(OSError):
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
            mapped.update(int(line.split()[4]) for line in lines if "/dev/shm/" in line)
    with suppress(OSError):
        named = (file for file in os.scandir("/dev/shm") if _SHARED.fullmatch(file.name))
        return {file.name for file in named if file.inode() in mapped}
    return set()


def _remove(names: Iterable[str]) -> None:
    """Remove what vLLM's processes shared among themselves and, killed, could not remove.

    Python's resource tracker would do it, but only when this process ends.
    """
    for name in names:
        path = Path("/dev/shm", name)
        if path.exists():
            path.unlink(missing_ok=True)
            kind = "semaphore" if name.startswith("sem.") else "shared_memory"
            resource_tracker.unregister(f"/{name.removeprefix('sem.')}", kind)


def _keep_shared_groups(client: Any, core: Any) -> None:
    """Make an engine in this process end without taking vLLM's parallel groups from others.

    The groups belong to the process and serve all engines in it, but vLLM's own end of an engine
    destroys them, also when the engine is dropped without being closed.
    """
    itself = weakref.ref(core)
    core.shutdown = lambda: _shut_down(itself())
    client._finalizer.detach()
    client._finalizer = weakref.finalize(client, _shut_down, core)


def _shut_down(core: Any) -> None:
    if _alone(core):
        type(core).shutdown(core)
    else:  # the same but for the groups
        core.structured_output_manager.clear_backend()
        core.model_executor.shutdown()
        core.scheduler.shutdown()
    core.model_executor = None


def _alone(core: Any) -> bool:
    """Whether no other engine, midstream's or not, is alive in this process."""
    from vllm.v1.engine.core import EngineCore

    gc.unfreeze()  # vLLM freezes what an engine has made, and frozen objects are not listed
    gc.collect()
    cores = (found for found in gc.get_objects() if issubclass(type(found), EngineCore))
    return all(found is core or not found.model_executor for found in cores)
