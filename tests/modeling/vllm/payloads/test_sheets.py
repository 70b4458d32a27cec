"""Caches whose copies left while steps ran: told of once, and made when somebody looks."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch

from midstream.interleaving.caches import Cache
from midstream.modeling.vllm.engine.mirroring import Mirroring
from midstream.modeling.vllm.limits import size_of
from midstream.modeling.vllm.payloads import (
    Mirrors,
    Record,
    nodes,
    pack,
    pack_apart,
    segments,
    unpack,
    unpack_apart,
)
from tests.interleaving.test_batches import parts_of
from tests.interleaving.test_caches import Requests, outputs, same
from tests.interleaving.toy import rows

OWNER = segments.owner_id(tag=12)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No test leaves a segment."""
    yield
    assert segments.remaining(OWNER) == []


def everything(requests: Requests) -> None:
    """A block that records all modules on the CPU."""
    requests.open(sides=("input", "output"), device=CPU)


def recorded(*blocks: Callable[[Requests], Any]) -> tuple[Requests, Mirrors]:
    """Requests whose caches are sent home as they are recorded."""
    requests, mirrors = Requests(*blocks), Mirrors(OWNER, least=1)
    interleaver = requests.interleaver
    interleaver.mirroring = Mirroring(lambda: interleaver.runs, mirrors)
    return requests, mirrors


def message(requests: Requests, mirrors: Mirrors) -> bytes:
    """The records of all requests, with their caches."""
    for run in requests.runs:
        for recorder in run.recorders:
            recorder.settle(may_travel=True)
    mirrors.flush()
    found = [(run, recorder._cache()) for run in requests.runs for recorder in run.recorders]
    records = [Record(str(i), {"c": c}, sender=run) for i, (run, c) in enumerate(found)]
    return pack(records, owner=OWNER, mirrors=mirrors)


def sent(requests: Requests, mirrors: Mirrors) -> list[Cache]:
    """The caches as the client has them."""
    records = unpack(message(requests, mirrors))
    assert [record.error for record in records] == [None] * len(records)
    mirrors.close()
    return [record.saves["c"] for record in records]


def contents(data: bytes) -> nodes.Message:
    """A message as it is sent."""
    return msgspec.msgpack.decode(data, type=nodes.Message)


def test_values_are_those_that_were_recorded() -> None:
    """Of all modules and both sides, of every form and length, in every step."""
    requests, mirrors = recorded(everything, lambda _: None, everything)
    steps = [[rows(2, 1), rows(1, 2), rows(3, 3)], [rows(2, 4), rows(1, 5), rows(3, 6)]]
    for parts in steps:
        requests.step(*parts)
    first, last = sent(requests, mirrors)
    right = [outputs(torch.cat(parts)) for parts in steps]
    for cache, start, stop in ((first, 0, 2), (last, 3, 6)):
        assert set(cache) == set(right[0])
        for path in cache:
            for got, whole in zip(cache[path].output, right, strict=True):
                assert same(got, parts_of(whole[path], start, stop))
        args, kwargs = cache["layers.0"].inputs[0]
        assert type(args) is tuple
        assert type(kwargs) is dict


def test_nothing_of_them_is_in_the_message() -> None:
    """Not a byte of a tensor, and what they have in common is there once."""
    requests, mirrors = recorded(everything, everything)
    for number in range(4):
        requests.step(rows(2, number), rows(2, number + 1))
    data = message(requests, mirrors)
    found = contents(data)
    assert found.sizes == []
    assert len(found.sheets) == 4
    assert len(found.layouts) == 1
    caches = [record.saves["c"] for record in unpack(data)]
    caches[0]["layers.0"].output[0][0].zero_()
    assert caches[1]["layers.0"].output[0][0].any()
    mirrors.close()


def test_what_a_block_has_looked_at_comes_before_the_rest() -> None:
    """And as the block has left it."""

    def block(requests: Requests) -> None:
        cache = requests.open(["layers.0.mlp", "layers.1.mlp"], device=CPU)
        requests.tree.root.layers[1].output
        cache["layers.0.mlp"].output.zero_()

    requests, mirrors = recorded(block, everything)
    parts = [[rows(2, 1), rows(2, 2)], [rows(2, 3), rows(2, 4)]]
    for each in parts:
        requests.step(*each)
    mine, other = sent(requests, mirrors)
    right = [outputs(torch.cat(each)) for each in parts]
    assert not mine["layers.0.mlp"].output[0].any()
    assert torch.equal(mine["layers.0.mlp"].output[1], right[1]["layers.0.mlp"][:2])
    assert torch.equal(mine["layers.1.mlp"].output[0], right[0]["layers.1.mlp"][:2])
    assert torch.equal(other["layers.0.mlp"].output[0], right[0]["layers.0.mlp"][2:])


def test_what_has_left_can_still_be_looked_at() -> None:
    """A block, or who closes it, has the values that were let go of as they arrived."""
    requests, mirrors = recorded(everything)
    requests.step(rows(3, 1))
    mirrors.wait()
    [cache] = requests.caches
    right = outputs(rows(3, 1))
    assert torch.equal(cache["layers.0.mlp"].output, right["layers.0.mlp"])
    cache["layers.0.mlp"].output.zero_()
    [mine] = sent(requests, mirrors)
    assert not mine["layers.0.mlp"].output.any()
    assert torch.equal(mine["layers.1.mlp"].output, right["layers.1.mlp"])


def test_without_room_they_travel_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full folder loses nothing."""

    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    requests, mirrors = recorded(everything, everything)
    with monkeypatch.context() as patch:
        patch.setattr(segments, "_create", full)
        requests.step(rows(2, 1), rows(3, 2))
        mirrors.wait()
    right = outputs(torch.cat([rows(2, 1), rows(3, 2)]))
    for cache, start, stop in zip(sent(requests, mirrors), (0, 2), (2, 5), strict=True):
        assert all(same(cache[path].output, parts_of(right[path], start, stop)) for path in right)


def test_copies_of_a_cache_nobody_has_looked_at() -> None:
    """Pickled, copied, and sent on to another machine it is the same."""
    requests, mirrors = recorded(everything)
    requests.step(rows(2, 1))
    [cache] = sent(requests, mirrors)
    there, data = pack_apart([Record("r", {"c": copy.deepcopy(cache)})])
    [record] = unpack_apart(there, memoryview(bytearray(b"".join(data))))
    right = outputs(rows(2, 1))["layers.1.mlp"]
    for each in (pickle.loads(pickle.dumps(cache)), record.saves["c"], cache):
        assert torch.equal(each["layers.1.mlp"].output, right)


def test_an_unread_cache_counts_with_all_its_bytes() -> None:
    """In the engine, where saves are limited, and in the client, as much as its values have."""
    requests, mirrors = recorded(everything, everything)
    requests.step(rows(2, 1), rows(3, 2))
    before = [size_of(cache) for cache in requests.caches]
    caches = sent(requests, mirrors)
    unread = [size_of(cache) for cache in caches]
    for cache in caches:
        cache.keys()
    read = [sum(x.nbytes for x in _tensors(cache.visits)) for cache in caches]
    assert all(0 <= a - b < 2000 for a, b in zip(before, read, strict=True))
    assert all(0 <= a - b < 2000 for a, b in zip(unread, read, strict=True))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors(each)
