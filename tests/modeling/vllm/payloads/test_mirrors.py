"""Rows of copies that left while steps ran: they arrive as all others do, and leave nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch

from midstream.errors import TransportError
from midstream.modeling.vllm.payloads import Mirrors, Record, nodes, pack, segments, unpack
from midstream.modeling.vllm.payloads.codec import unpack_apart

OWNER = segments.owner_id(tag=11)
WIDTH = 64


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No test leaves a segment."""
    yield
    assert segments.remaining(OWNER) == []


@pytest.fixture
def mirrors() -> Iterator[Mirrors]:
    """Mirrors that write whatever a step has."""
    made = Mirrors(OWNER, least=1)
    yield made
    made.close()


def run_step(
    mirrors: Mirrors, *copies: torch.Tensor, senders: tuple[str, ...] = ("a", "b")
) -> None:
    """A step whose copies are sent for some senders."""
    for sender in senders:
        mirrors.trust(sender)
    for copy in copies:
        mirrors.add(copy, frozenset(senders))
    mirrors.end_step()


def copies(count: int, dtype: torch.dtype = torch.float32, rows: int = 3) -> list[torch.Tensor]:
    """Batched copies with a row for each request."""
    return [(torch.randn(rows, WIDTH) * 50).to(dtype) for _ in range(count)]


def message(mirrors: Mirrors | None, sender: str = "a", **saves: Any) -> bytes:
    """The message with a sender's only record."""
    return pack([Record(sender, saves, sender=sender)], owner=OWNER, mirrors=mirrors)


def saved(data: bytes) -> dict[str, Any]:
    """What a message with one record brings."""
    [record] = unpack(data)
    assert record.error is None, record.error
    return record.saves


def contents(data: bytes) -> nodes.Message:
    """A message as it is sent."""
    return msgspec.msgpack.decode(data, type=nodes.Message)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.bool, torch.uint8]
)
def test_rows_are_sent_as_their_places(mirrors: Mirrors, dtype: torch.dtype) -> None:
    """No byte of them is in the message; each comes home writable and with memory of its own."""
    steps = [copies(4, dtype) for _ in range(3)]
    for step in steps:
        run_step(mirrors, *step, senders=("a",))
    rows = [copy[1:2] for step in steps for copy in step]
    data = message(mirrors, x=rows)
    assert contents(data).sizes == []
    assert len(contents(data).mirrors) == 3
    found = saved(data)["x"]
    assert [row.dtype for row in found] == [dtype] * 12
    assert all(map(torch.equal, found, rows))
    found[0].zero_()
    assert torch.equal(found[1], rows[1])
    assert {row.untyped_storage().nbytes() for row in found} == {rows[0].nbytes}


def test_containers_and_views_of_all_kinds(mirrors: Mirrors) -> None:
    """Lists in lists, dictionaries, lone tensors, other shapes and dtypes: as they were."""
    one, two = copies(2)
    run_step(mirrors, one, two, senders=("a",))
    value = {
        "nested": [[one[0:1], two[0:1]], [one[1:2], two[1:2]]],
        "by name": {"k": one[2], "l": two[2, :8]},
        "number": two[2, 20],
    }
    found = saved(message(mirrors, value=value, lone=two[2, 32:].view(torch.int32)))
    assert torch.equal(found["lone"], two[2, 32:].view(torch.int32))
    got = found["value"]
    assert torch.equal(got["nested"][1][0], one[1:2])
    assert torch.equal(got["nested"][0][1], two[0:1])
    assert torch.equal(got["by name"]["k"], one[2])
    assert torch.equal(got["by name"]["l"], two[2, :8])
    assert got["number"].shape == ()
    assert torch.equal(got["number"], two[2, 20])


def test_what_is_not_in_a_mirror_travels_beside_it(mirrors: Mirrors) -> None:
    """A list of which only a part was sent in time comes home whole and in order."""
    one, two = copies(2)
    run_step(mirrors, one, two, senders=("a",))
    own = torch.randn(1, WIDTH)
    value = [own, one[0:1], two[0:1], own * 2, own * 3, one[1:2], two.t()[:1]]
    data = message(mirrors, x=value)
    assert all(map(torch.equal, saved(data)["x"], value))
    assert len(contents(data).sizes) == 3


def test_a_value_that_cannot_travel_is_named_by_its_place(mirrors: Mirrors) -> None:
    """Its place counts the rows before it that lie in mirrors."""
    [one] = copies(1)
    run_step(mirrors, one, senders=("a",))
    [record] = unpack(message(mirrors, x=[one[:1], one[1:2], torch.ones(2, device="meta")]))
    assert record.error is not None
    assert "saves['x'][2]" in record.error.message


def test_what_was_changed_afterwards_comes_home_changed(mirrors: Mirrors) -> None:
    """A write in place, through whatever view, is seen; the other rows come home as they are."""
    one, two = copies(2)
    run_step(mirrors, one, two, senders=("a",))
    one[1].view(2, 32)[0].zero_()
    value = [one[1:2], two[1:2]]
    data = message(mirrors, x=value)
    assert len(contents(data).sizes) == 1
    assert all(map(torch.equal, saved(data)["x"], value))


def test_what_is_changed_before_the_step_ends_is_sent_changed(mirrors: Mirrors) -> None:
    """A block may edit what it has just been given."""
    mirrors.trust("a")
    [one] = copies(1)
    mirrors.add(one, frozenset("a"))
    one[1].zero_()
    mirrors.end_step()
    data = message(mirrors, x=[one[0:1], one[1:2]])
    assert contents(data).sizes == []
    assert not saved(data)["x"][1].any()


def test_one_tensor_under_two_names_is_one(mirrors: Mirrors) -> None:
    """Also where one of the names is inside a container."""
    one, two = copies(2)
    run_step(mirrors, one, two, senders=("a",))
    row = one[0:1]
    found = saved(message(mirrors, x=[row, two[0:1]], y=row, z={"k": [row, row]}))
    assert found["x"][0] is found["y"]
    assert found["z"]["k"][0] is found["y"]
    assert found["z"]["k"][1] is found["y"]
    assert torch.equal(found["y"], row)


def test_tensors_with_the_same_bytes_come_home_apart(mirrors: Mirrors) -> None:
    """Views that overlap, and two of the same rows: a write into one is not one into another."""
    [one] = copies(1)
    run_step(mirrors, one, senders=("a",))
    before = one.clone()
    found = saved(message(mirrors, whole=one, row=one[1:2], again=one[1:2]))
    found["row"].zero_()
    assert torch.equal(found["whole"], before)
    assert torch.equal(found["again"], before[1:2])


def test_a_segment_goes_with_the_last_message(mirrors: Mirrors) -> None:
    """It stays for those whose requests go on, in whatever order their messages are read."""
    [one] = copies(1)
    run_step(mirrors, one, senders=("a", "b", "c"))
    first = message(mirrors, "a", x=[one[0:1]])
    [handle] = contents(first).mirrors
    second = message(mirrors, "b", x=[one[1:2]])
    assert contents(second).over == {}
    third = message(mirrors, "c", x=torch.zeros(2))
    assert contents(third).over == {handle.name: 2}
    for data in (third, second):
        unpack(data)
        assert segments.remaining(OWNER) == [handle.name]
    assert torch.equal(saved(first)["x"][0], one[0:1])
    assert segments.remaining(OWNER) == []


def test_a_segment_that_nobody_names_is_removed(mirrors: Mirrors) -> None:
    """The engine removes it with the last record of those who might have."""
    run_step(mirrors, *copies(2))
    message(mirrors, "a", x=1)
    mirrors.wait()
    assert len(segments.remaining(OWNER)) == 1
    message(mirrors, "b")
    assert segments.remaining(OWNER) == []


def test_closing_removes_what_no_message_names(mirrors: Mirrors) -> None:
    """Whatever is being written then."""
    for _ in range(5):
        run_step(mirrors, *copies(2))
    mirrors.close()
    assert segments.remaining(OWNER) == []


def test_rows_that_come_after_a_senders_record_wait_for_nobody(mirrors: Mirrors) -> None:
    """What was taken in for a sender that has gone since is not written."""
    for sender in "ab":
        mirrors.trust(sender)
    mirrors.add(copies(1)[0], frozenset("ab"))
    mirrors.release("ab")
    mirrors.end_step()
    assert mirrors.live == []


def test_without_room_values_travel_as_they_always_did(
    mirrors: Mirrors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full folder ends nothing and loses nothing."""

    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    one, two = copies(2)
    with monkeypatch.context() as patch:
        patch.setattr(segments, "_create", full)
        run_step(mirrors, one, two, senders=("a",))
        mirrors.wait()
    found = saved(message(mirrors, x=[one[0:1], two[1:2]]))["x"]
    assert torch.equal(found[0], one[0:1])
    assert torch.equal(found[1], two[1:2])


def test_bounds() -> None:
    """Few copies are not worth a segment; with too many under way none are taken in."""
    [one] = copies(1)
    small = Mirrors(OWNER, least=one.nbytes + 1)
    run_step(small, one, senders=("a",))
    assert small.live == []
    assert torch.equal(saved(message(small, x=[one[:1]]))["x"][0], one[:1])
    run_step(small, *copies(2), senders=("a",))
    assert len(small.live) == 1
    small.close()
    cut = Mirrors(OWNER, least=1, most=2 * one.nbytes)
    run_step(cut, *copies(5), senders=("a",))
    assert [each.size // one.nbytes for each in cut.live] == [2, 2, 1]
    cut.close()
    full = Mirrors(OWNER, least=1, most=1, under_way=-1)
    assert full.add(one, frozenset("a")) is None
    full.close()


def test_only_of_senders_whose_changes_are_seen(mirrors: Mirrors) -> None:
    """Another's rows of the same copies are sent by value."""
    [one] = copies(1)
    run_step(mirrors, one, senders=("a",))
    one[1].numpy()[:] = 0  # which no version tells of
    data = message(mirrors, "b", x=[one[1:2]])
    assert contents(data).mirrors == []
    assert not saved(data)["x"][0].any()


def test_memory_that_was_let_go_is_not_found(mirrors: Mirrors) -> None:
    """Another tensor in the place of a copy is not taken for it."""
    memory = bytearray(3 * WIDTH * 4)
    one = torch.frombuffer(memory, dtype=torch.float32).view(3, WIDTH)
    run_step(mirrors, one, senders=("a",))
    mirrors.wait()
    place = one.data_ptr()
    del one
    another = torch.frombuffer(memory, dtype=torch.float32)
    another.numpy()[:] = 7
    assert (another.data_ptr(), another._version) == (place, 0)
    assert saved(message(mirrors, x=[another[:WIDTH]]))["x"][0].tolist() == [7] * WIDTH


def test_values_without_memory_or_version_beside_rows(mirrors: Mirrors) -> None:
    """Sparse tensors are refused as ever, and what was computed in inference mode travels."""
    [one] = copies(1)
    run_step(mirrors, one, senders=("a",))
    with torch.inference_mode():
        computed = one[0] * 2
    found = saved(message(mirrors, x=[one[0:1], computed], y=computed))
    assert torch.equal(found["x"][0], one[0:1])
    assert found["x"][1] is found["y"]
    assert torch.equal(found["y"], one[0] * 2)


@pytest.mark.parametrize(
    "line",
    [
        [0, 1, 0, 0, 1],
        [1, 0, 0, 0, 1],
        [0, 0, -64, 0, 1],
        [0, 0, 0, 1 << 20, 9],
        [0, 0, 0, 0, 0],
        [0, 0, 1 << 40, 0, 1],
    ],
)
def test_a_message_that_points_elsewhere_is_refused(mirrors: Mirrors, line: list[int]) -> None:
    """Nothing outside of its segments can be read."""
    [one] = copies(1)
    run_step(mirrors, one, senders=("a",))
    data = contents(message(mirrors, x=[one[0:1]]))
    rows = data.records[0].rows
    assert rows is not None
    rows.lines = torch.tensor(line).numpy().tobytes()
    [record] = unpack(msgspec.msgpack.encode(data))
    assert record.error is not None
    assert "saves['x'] cannot be received" in record.error.message


def test_a_message_from_elsewhere_may_not_name_segments(mirrors: Mirrors) -> None:
    """Only this machine's engine may have files of it read or removed."""
    [one] = copies(1)
    run_step(mirrors, one, senders=("a",))
    data = message(mirrors, x=[one[0:1]])
    with pytest.raises(TransportError, match="names shared memory"):
        unpack_apart(data, memoryview(bytearray()))
    unpack(data)


@pytest.mark.gpu
def test_rows_of_a_gpu() -> None:
    """They are copied behind what computes them, while the next steps overwrite other memory."""
    mirrors = Mirrors(OWNER, least=1)
    mirrors.trust("a")
    steps = []
    for number in range(20):
        x = torch.full((64, 4096), float(number), device="cuda", dtype=torch.bfloat16)
        for _ in range(10):  # so that the copy has something to wait for
            x = x @ torch.eye(4096, device="cuda", dtype=torch.bfloat16)
        mirrors.add(x, frozenset("a"))
        mirrors.end_step()
        steps.append(x)
        del x
        torch.empty(64, 4096, device="cuda", dtype=torch.bfloat16).fill_(-1)
    rows = [x[i : i + 1] for x in steps for i in range(64)]
    data = message(mirrors, x=rows)
    assert contents(data).sizes == []
    found = saved(data)["x"]
    for i, row in enumerate(found):
        assert (row == float(i // 64)).all()
    mirrors.close()


@pytest.mark.gpu
def test_recorded_copies_leave_the_gpu() -> None:
    """Nobody else holds them: their memory is free once they have arrived."""
    mirrors = Mirrors(OWNER, least=1, kept_under_way=8 << 20)
    before, arrived = torch.cuda.memory_allocated(), []
    for number in range(50):
        x = torch.full((64, 4096), float(number), device="cuda")
        mirrors.add(x, frozenset("a"), lambda: arrived.append(1))
        del x
        mirrors.end_step()
        assert torch.cuda.memory_allocated() - before < 64 << 20
    mirrors.wait()
    assert len(arrived) == 50
    assert torch.cuda.memory_allocated() == before
    mirrors.close()
