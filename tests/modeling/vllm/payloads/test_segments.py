"""Shared memory: where large values go, who removes it, and what happens when there is no room."""

from __future__ import annotations

import errno
import gc
import itertools
import multiprocessing
import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from midstream.errors import TransportError
from midstream.modeling.vllm.payloads import Record, buffers, codec, encode, pack, segments, unpack

OWNER = segments.owner_id(tag=7)
SPAWN = multiprocessing.get_context("spawn")
LARGE = torch.arange(100_000)


def message(owner: str = OWNER, **saves: Any) -> bytes:
    """Pack a record with these saves."""
    return pack([Record("r", saves or {"x": LARGE})], owner=owner)


def mapped() -> int:
    """How many midstream segments this process has mapped."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return sum("midstream-" in line for line in maps)


def test_small_values_make_no_segment() -> None:
    """Up to the limit everything is in the message."""
    data = message(x=torch.zeros(codec.INLINE_LIMIT, dtype=torch.uint8))
    assert segments.remaining(OWNER) == []
    assert len(data) > codec.INLINE_LIMIT


def test_large_values_share_one_segment_that_is_removed_as_it_is_read() -> None:
    """All records of a message use one segment; its name is gone once it is unpacked."""
    values = [torch.full((n,), n) for n in (1, 50_000, 0, 3, 40_000)]
    records = [Record(str(i), {"x": values, "y": torch.ones(7)}) for i in range(3)]
    data = pack(records, owner=OWNER)
    assert len(segments.remaining(OWNER)) == 1
    assert len(data) < 2000
    for record in unpack(data):
        for got, value in zip(record.saves["x"], values, strict=True):
            assert torch.equal(got, value)
            assert got.data_ptr() % segments.ALIGNMENT == 0
    assert segments.remaining(OWNER) == []


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have several segments written for little data."""
    monkeypatch.setattr(buffers, "PART_BYTES", 100_000)
    monkeypatch.setattr(encode, "RUN_BYTES", 400_000)
    monkeypatch.setattr(os, "cpu_count", lambda: 16)


SEVERAL = [torch.full((1, 25_000), n) for n in range(9)]


@pytest.mark.usefixtures("small_parts")
def test_much_data_is_written_to_several_segments_at_once() -> None:
    """The buffers are divided among a few segments and arrive; none of them is left."""
    values = [*SEVERAL, torch.empty(0), torch.ones(3)]
    data = message(x=values, y=torch.ones(50_000, dtype=torch.bool), z=torch.empty(0))
    names = segments.remaining(OWNER)
    sizes = [(segments.folder() / name).stat().st_size for name in names]
    assert len(names) == buffers.WRITERS
    assert min(sizes) > sum(sizes) / buffers.WRITERS / 2
    saves = unpack(data)[0].saves
    assert all(torch.equal(a, b) for a, b in zip(saves["x"], values, strict=True))
    assert saves["y"].all()
    assert segments.remaining(OWNER) == []


@pytest.mark.usefixtures("small_parts")
def test_one_tensor_is_one_segment() -> None:
    """A tensor is not divided, so that it can be a view of what was written."""
    data = message(x=torch.ones(1 << 20), y=torch.empty(0))
    assert len(segments.remaining(OWNER)) == 1
    assert unpack(data)[0].saves["x"].sum() == 1 << 20


@pytest.mark.usefixtures("small_parts")
def test_one_of_several_segments_that_cannot_be_written_leaves_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The values go inline, and the segments that were written are removed."""
    whole, calls = os.pwritev, itertools.count()

    def full(*args: Any) -> int:
        if next(calls) == 6:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return whole(*args)

    monkeypatch.setattr(os, "pwritev", full)
    data = message(x=SEVERAL)
    assert next(calls) > 6
    assert segments.remaining(OWNER) == []
    assert len(data) > 9 * SEVERAL[0].nbytes
    got = unpack(data)[0].saves["x"]
    assert all(torch.equal(a, b) for a, b in zip(got, SEVERAL, strict=True))


@pytest.mark.usefixtures("small_parts")
def test_one_of_several_segments_that_is_gone_leaves_none() -> None:
    """A message of which a part is missing is an error, and its other parts are removed."""
    data = message(x=SEVERAL)
    (segments.folder() / segments.remaining(OWNER)[1]).unlink()
    with pytest.raises(TransportError, match="is gone"):
        unpack(data)
    assert segments.remaining(OWNER) == []


@pytest.mark.usefixtures("small_parts")
def test_tensors_of_several_segments_free_each_by_itself() -> None:
    """A segment's memory goes with the last tensor in it, whatever is left of the others."""
    before = mapped()
    got = unpack(message(x=SEVERAL))[0].saves["x"]
    assert mapped() == before + buffers.WRITERS
    del got[1:]
    gc.collect()
    assert mapped() == before + 1
    assert torch.equal(got[0], SEVERAL[0])


def test_received_memory_lives_as_long_as_its_last_tensor() -> None:
    """Tensors are views of the mapping, keep it, need no descriptor, and free it."""
    before, descriptors = mapped(), len(os.listdir("/proc/self/fd"))
    saves = unpack(message(x=LARGE, y=LARGE + 1))[0].saves
    assert mapped() == before + 1
    assert len(os.listdir("/proc/self/fd")) == descriptors
    last = saves.pop("y")[5:9]
    del saves
    gc.collect()
    assert mapped() == before + 1
    last += 1
    assert last.tolist() == [7, 8, 9, 10]
    del last
    gc.collect()
    assert mapped() == before


def test_a_message_is_read_once() -> None:
    """A second read says that the memory is gone."""
    data = message()
    unpack(data)
    with pytest.raises(TransportError, match="is gone"):
        unpack(data)


def test_a_full_folder_falls_back_to_the_message() -> None:
    """When a write stops half way the values go inline and no file is left."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        data = message()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert segments.remaining(OWNER) == []
    assert len(data) > LARGE.nbytes
    assert torch.equal(unpack(data)[0].saves["x"], LARGE)


def test_no_room_anywhere_is_the_records_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message too large for the fallback too becomes an error that says what to do."""
    monkeypatch.setattr(codec, "FALLBACK_LIMIT", 100_000)
    monkeypatch.setattr(segments, "folder", lambda: Path("/nowhere"))
    [record] = unpack(message())
    assert record.saves == {}
    assert record.error is not None
    assert "/nowhere, which is full: save less, or give it more space" in record.error.message


def test_short_writes_are_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system that writes less than asked for loses nothing."""
    whole = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda fd, parts, at: whole(fd, [parts[0][:7000]], at))
    values = [LARGE[:n] for n in (9000, 1, 5, 9001)]
    got = unpack(message(x=values))[0].saves["x"]
    assert all(torch.equal(a, b) for a, b in zip(got, values, strict=True))


def test_more_buffers_than_one_call_takes() -> None:
    """Thousands of tensors go into one segment."""
    values = list(torch.arange(60_000).reshape(3000, 20))
    got = unpack(message(x=values))[0].saves["x"]
    assert torch.equal(torch.stack(got), torch.stack(values))


@pytest.mark.parametrize(
    ("name", "size"),
    [("../etc/passwd", 10), ("midstream-1.2.3-4-5/../../x", 1), ("midstream-1.2.3-4-5", 10)],
)
def test_only_midstreams_own_segments_are_opened(name: str, size: int) -> None:
    """A name from elsewhere, or of nothing, is refused."""
    with pytest.raises(TransportError, match=r"not the name of|is gone"):
        segments.open_(segments.Handle(name, size))


def test_a_segment_of_another_size_or_kind_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not exactly the file that was announced is not mapped."""
    monkeypatch.setattr(segments, "folder", lambda: tmp_path)
    handle = segments.write([memoryview(b"x" * 64)], OWNER)
    with pytest.raises(TransportError, match="64 bytes, expected a file of 128"):
        segments.open_(segments.Handle(handle.name, 128))
    link = tmp_path / "midstream-1.2.3-4-5"
    link.symlink_to(tmp_path / handle.name)
    with pytest.raises(TransportError, match="expected a file"):
        segments.open_(segments.Handle(link.name, 64))


def test_an_owner_that_is_none_is_refused() -> None:
    """An owner must be what `owner_id` gives, so that sweeping can read it."""
    with pytest.raises(ValueError, match="expected what owner_id"):
        segments.write([memoryview(b"x")], "../me")


def test_discard_removes_only_what_one_engine_left() -> None:
    """After an engine ended its client removes what it never received, and nothing of others."""
    other = segments.owner_id(tag=8)
    message()
    message()
    message(other)
    assert segments.discard(OWNER) == 2
    assert (len(segments.remaining(OWNER)), len(segments.remaining(other))) == (0, 1)
    assert segments.discard(other) == 1


def test_sweep_knows_reused_ids_and_other_containers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reused process id does not protect a segment; another container's is left alone."""
    monkeypatch.setattr(segments, "folder", lambda: tmp_path)
    pid, start, namespace, tag = OWNER.split(".")
    gone = f"{2**22 + 1}"
    mine = message_name(f"{pid}.{start}.{namespace}.{tag}")
    reused = message_name(f"{pid}.{int(start) - 1}.{namespace}.{tag}")
    dead = message_name(f"{gone}.{start}.{namespace}.{tag}")
    elsewhere = message_name(f"{gone}.{start}.1{namespace}.{tag}")
    (tmp_path / "something-else").touch()
    assert segments.sweep() == 2
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {mine, elsewhere, "something-else"}
    assert not {reused, dead} & left


def message_name(owner: str) -> str:
    """Write a segment for an owner; returns its name."""
    return segments.write([memoryview(b"x")], owner).name


def run_child(target: Callable[..., None], *args: Any) -> Any:
    """Run a function in a spawned process and return what it sent."""
    here, there = SPAWN.Pipe()
    process = SPAWN.Process(target=target, args=(there, *args))
    process.start()
    there.close()
    got = here.recv()
    process.join(60)
    assert process.exitcode == 0
    return got


def engine(pipe: Any, owner: str) -> None:
    """Pack a small and a large record, as an engine's process does."""
    records = [
        Record("small", {"x": torch.ones(3)}),
        Record("large", {"x": LARGE, "row": LARGE.reshape(100, 1000)[5]}),
    ]
    pipe.send(pack(records, owner=owner))


def test_a_message_of_another_process_arrives_after_that_process_ended() -> None:
    """An engine's records, large ones too, outlive the engine and leave nothing behind."""
    small, large = unpack(run_child(engine, OWNER))
    assert torch.equal(small.saves["x"], torch.ones(3))
    assert torch.equal(large.saves["x"], LARGE)
    assert torch.equal(large.saves["row"], LARGE.reshape(100, 1000)[5])
    assert segments.remaining(OWNER) == []


def client(pipe: Any) -> None:
    """Say who this process is and wait to be killed."""
    pipe.send(segments.owner_id())
    time.sleep(600)


def test_what_a_killed_client_never_received_is_swept() -> None:
    """A segment stays while its client lives and goes once it is killed, even if unreaped."""
    here, there = SPAWN.Pipe()
    process = SPAWN.Process(target=client, args=(there,))
    process.start()
    owner = here.recv()
    message(owner)
    segments.sweep()
    assert len(segments.remaining(owner)) == 1
    os.kill(process.pid or 0, signal.SIGKILL)
    os.waitid(os.P_PID, process.pid or 0, os.WEXITED | os.WNOWAIT)
    assert segments.sweep() >= 1
    assert segments.remaining(owner) == []
    process.join(60)


def peak_memory() -> int:
    """Read the peak of this process's resident memory, in bytes."""
    # Not getrusage, whose figure begins with what the parent had when it started this process.
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def memory_of_packing(pipe: Any, owner: str) -> None:
    """Measure by how much the peak of this process's memory grows in pack and unpack, in bytes."""
    value = torch.ones(16 << 20)
    unpack(pack([Record("r", {"x": value[: 1 << 16]})], owner=owner))
    before = peak_memory()
    data = pack([Record("r", {"x": value})], owner=owner)
    packed = peak_memory()
    received = unpack(data)[0].saves["x"]
    unpacked = peak_memory()
    pipe.send((packed - before, unpacked - packed, float(received[-1])))


def test_a_large_value_is_not_copied_on_its_way() -> None:
    """64 MiB go into the segment and out of it without a second copy on either side."""
    packing, unpacking, last = run_child(memory_of_packing, OWNER)
    assert last == 1.0
    assert packing < 8 << 20
    assert unpacking < 8 << 20
