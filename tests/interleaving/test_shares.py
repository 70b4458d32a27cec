"""What caches have of the copies that they share: when it comes, what it counts, when it ends."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from midstream.errors import LimitExceededError
from midstream.interleaving.batches import Form
from midstream.interleaving.snapshots import Snapshots
from tests.interleaving.test_batches import cache_all
from tests.interleaving.test_caches import Requests, outputs
from tests.interleaving.toy import rows


def test_a_value_can_be_written_to_while_the_step_goes_on() -> None:
    """A block reads and edits what has been recorded so far; the rest comes, the model is as it is.

    What it had looked at is not there twice.
    """
    seen = []

    def block(requests: Requests) -> None:
        cache = requests.open(["layers.0.mlp", "layers.1.mlp", "layers.2.mlp"])
        requests.tree.root.layers[1].output
        seen.append(cache.keys())
        cache["layers.0.mlp"].output.zero_()
        requests.tree.root.layers[2].output
        seen.append(cache.keys())

    requests = Requests(block, cache_all)
    for _ in range(2):
        parts = [rows(2, 1), rows(3, 2)]
        requests.step(*parts)
    right = outputs(torch.cat(parts))
    assert seen == [
        ["layers.0.mlp", "layers.1.mlp"],
        ["layers.0.mlp", "layers.1.mlp", "layers.2.mlp"],
    ]
    mine, other = requests.caches
    assert not mine["layers.0.mlp"].output[0].any()
    assert torch.equal(mine["layers.0.mlp"].output[1], right["layers.0.mlp"][:2])
    assert torch.equal(mine["layers.2.mlp"].output[0], right["layers.2.mlp"][:2])
    assert torch.equal(other["layers.0.mlp"].output[0], right["layers.0.mlp"][2:])


def test_a_copy_of_a_cache_is_independent() -> None:
    """It has what was recorded so far, and no more comes into it."""
    requests = Requests(lambda r: r.open("layers.1.mlp"))
    requests.step(rows(2, 1))
    sent = pickle.loads(pickle.dumps(requests.caches[0]))
    copied = copy.deepcopy(requests.caches[0])
    assert torch.equal(sent["layers.1.mlp"].output, copied["layers.1.mlp"].output)
    copied["layers.1.mlp"].output.zero_()
    requests.step(rows(1, 2))
    assert copied["layers.1.mlp"].output.shape == (2, 4)
    assert [len(part) for part in requests.caches[0]["layers.1.mlp"].output] == [2, 1]
    assert requests.caches[0]["layers.1.mlp"].output[0].any()


def test_a_token_keeps_no_prompt_of_another_request() -> None:
    """What a cache holds on to is bounded by its own rows, whoever runs beside it."""
    requests = Requests(*[lambda r: r.open("layers.1.mlp")] * 3)
    parts = [rows(1, 1), rows(200, 2), rows(1, 3)]
    requests.step(*parts)
    right = outputs(torch.cat(parts))["layers.1.mlp"]
    first, prompt, last = (cache["layers.1.mlp"].output for cache in requests.caches)
    assert torch.equal(torch.cat([first, prompt, last]), right)
    assert first.untyped_storage().nbytes() <= 2 * first.nbytes


@contextmanager
def without_collector() -> Iterator[None]:
    """What is freed here is not in a cycle."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Kept:
    """Finds the tensors that live."""

    def __init__(self) -> None:
        self._before = self._all()

    @staticmethod
    def _all() -> set[int]:
        return {id(each) for each in gc.get_objects() if type(each) is torch.Tensor}

    @property
    def new(self) -> int:
        """How many there are more than at the beginning."""
        return len(self._all() - self._before)


def test_copies_end_with_the_last_cache() -> None:
    """What nobody looked at is freed with the caches, without the garbage collector."""
    requests = Requests(*[lambda r: r.open()] * 3)
    with without_collector():
        requests.step(*[rows(1, i) for i in range(3)])
        kept = Kept()
        for _ in range(4):
            requests.step(*[rows(1, i) for i in range(3)])
        assert kept.new > 20
        requests.caches[0].values()
        while requests.caches:
            del requests.caches[0]
        assert kept.new == 0


def limited(requests: Requests, index: int, limit: int) -> None:
    """Give one of the requests a limit of bytes."""
    requests.runs[index].snapshots = Snapshots(limit)


def test_a_limit_ends_its_own_block_only() -> None:
    """What was recorded up to there is kept, and the others go on."""
    requests = Requests(*[lambda r: r.open(["layers.0.mlp", "layers.1.mlp"])] * 3)
    limited(requests, 1, 10 * 16)
    for step in range(3):
        requests.try_step(*[rows(2, 3 * step + i) for i in range(3)])
    first, failed, last = requests.runs
    assert isinstance(failed.error, LimitExceededError)
    assert first.error is last.error is None
    sizes = [
        [len(cache[path].output) for path in ("layers.0.mlp", "layers.1.mlp")]
        for cache in requests.caches
    ]
    assert sizes == [[3, 3], [3, 2], [3, 3]]


@pytest.mark.parametrize("looks", [False, True])
def test_a_limit_counts_each_value_once(looks: bool) -> None:
    """Looking at a cache, in the middle of a step or later, does not make it larger."""
    held = 2 * 16 * 2  # bytes of a step

    def block(requests: Requests) -> None:
        cache = requests.open(["layers.0.mlp", "layers.1.mlp"])
        if looks:
            requests.tree.root.layers[1].output[0].shape
            cache.keys()

    requests = Requests(block, cache_all)
    limited(requests, 0, 5 * held + 2 * 2 * 16 * looks)
    for step in range(5):
        requests.step(rows(2, step), rows(2, 1))
        if looks:
            requests.caches[0].keys()
    requests.try_step(rows(4, 1), rows(4, 1))
    assert isinstance(requests.runs[0].error, LimitExceededError)


def test_a_dropped_cache_counts_no_more() -> None:
    """Neither while others hold their rows of the same copies."""
    held = 6 * 16

    def block(requests: Requests) -> None:
        cache = requests.open(["layers.0.mlp", "layers.1.mlp", "layers.2.mlp"])
        requests.tree.root.layers[2].mlp.input
        requests.caches.remove(cache)

    requests = Requests(block, lambda r: r.open(["layers.0.mlp", "layers.1.mlp", "layers.2.mlp"]))
    limited(requests, 0, held)
    requests.step(rows(2, 1), rows(2, 2))
    snapshots = requests.runs[0].snapshots
    gc.collect()
    snapshots.add([torch.zeros(held // 4)])
    with pytest.raises(LimitExceededError):
        kept = [torch.zeros(held // 4), torch.zeros(held // 4)]
        snapshots.add(kept)


def test_where_memory_is_short_each_request_is_tried_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A copy for all that cannot be made ends only the blocks whose own cannot be made either."""
    made_of = Form.made_of

    def short(self: Form, tensor: torch.Tensor, *, copy: bool) -> torch.Tensor:
        if len(tensor) >= 3:
            raise MemoryError(len(tensor))
        return made_of(self, tensor, copy=copy)

    requests = Requests(*[lambda r: r.open(["layers.0.mlp", "layers.1.mlp"])] * 3)
    monkeypatch.setattr(Form, "made_of", short)
    parts = [rows(2, 1), rows(3, 2), rows(2, 3)]
    requests.try_step(*parts)
    right = outputs(torch.cat(parts))
    errors = [type(run.error) for run in requests.runs]
    assert errors == [type(None), MemoryError, type(None)]
    for index, start in ((0, 0), (2, 5)):
        for path in ("layers.0.mlp", "layers.1.mlp"):
            got = requests.caches[index][path].output
            assert torch.equal(got, right[path][start : start + 2])
    assert requests.caches[1].keys() == []
