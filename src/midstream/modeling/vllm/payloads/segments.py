"""Shared memory of one client: written by an engine, mapped once, gone with its last tensor.

A segment is a file ``midstream-<owner>-<pid>-<n>`` in ``/dev/shm`` (in the temporary folder where
there is none). `owner` names the client that is to map it, `pid` the process that wrote it. The
client removes the name as it maps the file, so what is left in the folder was never received.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TypeAlias

import msgspec
import torch

from midstream.errors import TransportError

ALIGNMENT = 64  # bytes; a cache line, and enough for every dtype and vector load
_NAME = re.compile(r"midstream-(?P<owner>(?P<pid>\d+)\.[\w.]+)-\d+-\d+")
_numbers = itertools.count()

Modes: TypeAlias = AbstractContextManager[object]


class Handle(msgspec.Struct, array_like=True, frozen=True):
    """The name of a segment in the shared memory folder, and its size in bytes."""

    name: str
    size: int


def owner_id(pid: int | None = None, tag: int = 0) -> str:
    """Name a client process (this one by default) so that a reused process id is not mistaken.

    `tag` tells several engines of one client apart. Two containers that share the folder but not
    their process ids differ in the third part.
    """
    pid = os.getpid() if pid is None else pid
    return f"{pid}.{_start_time(pid)}.{_pid_namespace()}.{tag}"


def layout(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Aligned offsets of buffers laid out one behind the other, and the total, in bytes."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += size + -size % ALIGNMENT
    return offsets, end


def write(parts: Iterable[memoryview], owner: str) -> Handle:
    """Write bytes into a new segment, one part behind the other, each before the next is made.

    Raises:
        OSError: The folder is full or cannot be written; nothing is left behind.
    """
    path, descriptor = _create(owner)
    try:
        # Writing is near twice as fast as copying into a mapping (no page is zeroed first, no
        # page faults), and a full folder is an error here instead of a SIGBUS later.
        position = 0
        for part in parts:
            position = _write(descriptor, part, position)
        return Handle(path.name, position)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)


def write_all(
    several: Sequence[Iterable[memoryview]], owner: str, modes: Callable[[], Modes] = nullcontext
) -> list[Handle]:
    """Write several segments at once, each in a thread of its own, where `modes` is entered.

    A file in memory takes one writer at a time, which fills a few GB a second.

    Raises:
        OSError: One could not be written; none is left behind.
    """

    def one(parts: Iterable[memoryview]) -> Handle:
        with modes():
            return write(parts, owner)

    if len(several) == 1:
        return [one(several[0])]
    with ThreadPoolExecutor(len(several)) as threads:
        written = [threads.submit(one, parts) for parts in several]
    failed = [error for error in (each.exception() for each in written) if error is not None]
    if not failed:
        return [each.result() for each in written]
    _unlink(each.result().name for each in written if each.exception() is None)
    raise failed[0]


def open_all(handles: Sequence[Handle], *, shared: bool = False) -> list[memoryview]:
    """Map segments, see `open_`; if one cannot be, the names of the others are removed too.

    Raises:
        TransportError: One is gone, or is not one that `write` made for a client.
    """
    mapped, problems = [], []
    for handle in handles:
        try:
            mapped.append(open_(handle, shared=shared))
        except TransportError as problem:
            problems.append(problem)
    if problems:
        mapped.clear()  # the error's traceback would keep the memory
        raise problems[0]
    return mapped


def open_(handle: Handle, *, shared: bool = False) -> memoryview:
    """Map a segment and remove its name; the memory is freed with the last view of it.

    Args:
        handle: The segment.
        shared: Other messages refer to it too: the name stays.

    Raises:
        TransportError: The segment is gone, or is not one that `write` made for a client.
    """
    if _NAME.fullmatch(handle.name) is None:
        raise TransportError(f"{handle.name!r} is not the name of a midstream segment")
    path = folder() / handle.name
    try:
        found = path.lstat()
    except FileNotFoundError:
        raise TransportError(
            f"the shared memory {path} is gone: another process removed it before it was read"
        ) from None
    if not stat.S_ISREG(found.st_mode) or found.st_size != handle.size or not handle.size:
        raise TransportError(f"{path} is {found.st_size} bytes, expected a file of {handle.size}")
    # Not mmap.mmap: that keeps a file descriptor for as long as a tensor lives, and a user who
    # keeps the saves of a thousand traces would run out of them.
    mapped = torch.from_file(
        str(path), shared=True, size=handle.size, dtype=torch.uint8, device="cpu"
    )
    if not shared:
        path.unlink(missing_ok=True)
    return mapped.numpy().data


def private(handle: Handle) -> torch.Tensor:
    """The bytes of a segment that this process wrote; what is written into them stays here."""
    path = str(folder() / handle.name)
    return torch.from_file(path, shared=False, size=handle.size, dtype=torch.uint8, device="cpu")


def remove(names: Iterable[str]) -> int:
    """Remove segments to which nothing refers any more; returns how many there were."""
    return _unlink(name for name in names if _NAME.fullmatch(name) is not None)


def sweep() -> int:
    """Remove the segments of clients that no longer run; returns how many."""
    here = str(_pid_namespace())
    return _unlink(
        name
        for name, owner, pid in _segments()
        if owner.split(".")[2:3] == [here] and owner.split(".")[1] != _start_time(pid)
    )


def discard(owner: str) -> int:
    """Remove what `owner` has not received and, its engine ended, never will; returns how many."""
    return _unlink(remaining(owner))


def remaining(owner: str) -> list[str]:
    """Names of the segments written for `owner` that it has not mapped."""
    return sorted(name for name, found, _ in _segments() if found == owner)


def folder() -> Path:
    """Return the folder of the segments: memory where the system has such a folder."""
    shared = Path("/dev/shm")
    return shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())


def _create(owner: str) -> tuple[Path, int]:
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
    while True:
        path = folder() / f"midstream-{owner}-{os.getpid()}-{next(_numbers)}"
        if _NAME.fullmatch(path.name) is None:
            raise ValueError(f"owner is {owner!r}, expected what owner_id() gives")
        with contextlib.suppress(FileExistsError):  # left by an earlier process of this id
            return path, os.open(path, flags, 0o600)


def _write(descriptor: int, part: memoryview, position: int) -> int:
    while part.nbytes:  # one call moves at most 2 GiB
        written = os.pwritev(descriptor, [part], position)
        if not written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        part, position = part[written:], position + written
    return position


def _segments() -> Iterator[tuple[str, str, int]]:
    for name in os.listdir(folder()):
        match = _NAME.fullmatch(name)
        if match is not None:
            yield name, match["owner"], int(match["pid"])


def _unlink(names: Iterable[str]) -> int:
    count = 0
    for name in names:
        with contextlib.suppress(OSError):  # another sweep was first, or another user's file
            (folder() / name).unlink()
            count += 1
    return count


def _start_time(pid: int) -> str:
    """When the process started (Linux), "alive" where only that is known, "gone" if it ended."""
    if not Path("/proc/self/stat").exists():
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return "gone"
        except PermissionError:
            pass
        return "alive"
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return "gone"
    return "gone" if fields[0] in "ZX" else fields[19]


def _pid_namespace() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0
