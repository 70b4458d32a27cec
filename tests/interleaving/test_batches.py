"""Rows of several requests are recorded with the same copies, and stay each request's own."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from midstream.errors import LimitExceededError
from midstream.interleaving.batches import Form
from midstream.interleaving.run import Run
from midstream.interleaving.snapshots import Snapshots
from midstream.interleaving.structure import flatten
from tests.interleaving.test_caches import Requests, outputs, same
from tests.interleaving.toy import rows

COPIES = ("aten.clone", "aten.to", "aten._to_copy", "aten.copy_", "aten.index_select", "aten.cat")


class Copies(TorchDispatchMode):
    """Counts the operations that copy tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += str(func).startswith(COPIES)
        return func(*args, **(kwargs or {}))


def copies_of_a_step(*blocks: Callable[[Requests], Any], lengths: Any = None) -> int:
    """How many tensors are copied in the second step of these requests."""
    requests = Requests(*blocks)
    for _ in range(2):
        parts = [rows(length, i) for i, length in enumerate(lengths or [1] * len(blocks))]
        with Copies() as counted:
            requests.step(*parts)
    return counted.count


def cache_all(requests: Requests) -> None:
    """A block that records everything."""
    requests.open(sides=("input", "output"))


def parts_of(value: Any, start: int, stop: int) -> Any:
    """A request's rows of a whole step's value."""
    if isinstance(value, tuple):
        return tuple(part[start:stop] for part in value)
    return value[start:stop]


def test_copies_do_not_grow_with_the_requests() -> None:
    """A location is copied once for all requests that record it in the same form."""
    one = copies_of_a_step(cache_all)
    assert one > 20
    assert copies_of_a_step(*[cache_all] * 5) == one
    assert copies_of_a_step(*[cache_all] * 40) == one


def test_copies_do_not_grow_with_different_choices() -> None:
    """Requests that record different modules share the copies of those they both record."""

    def some(paths: list[str]) -> Callable[[Requests], Any]:
        return lambda r: r.open(paths)

    several = [["layers.0.mlp"], ["layers.0.mlp", "layers.2.mlp"], ["layers.2.mlp"]]
    both = copies_of_a_step(some(["layers.0.mlp", "layers.2.mlp"]))
    assert copies_of_a_step(*map(some, several * 4)) == both


def test_copies_do_not_grow_with_plain_rows_between() -> None:
    """Where most rows are of plain requests, those that are recorded are gathered in one go."""
    requests = Requests(*[lambda r: r.open("layers.1.mlp")] * 6)
    requests.runs = [each for run in requests.runs for each in (run, None)]
    parts = [rows(1 if i % 2 == 0 else 9, i) for i in range(12)]
    requests.step(*parts)
    right = outputs(torch.cat(parts))["layers.1.mlp"]
    for i, cache in enumerate(requests.caches):
        got = cache["layers.1.mlp"].output
        assert torch.equal(got, right[10 * i : 10 * i + 1])
        assert got.untyped_storage().nbytes() == 6 * got.nbytes


def test_a_token_keeps_no_prompt_of_another_request() -> None:
    """What a cache holds on to is bounded by its own rows, whoever runs beside it."""
    requests = Requests(*[lambda r: r.open("layers.1.mlp")] * 3)
    parts = [rows(1, 1), rows(200, 2), rows(1, 3)]
    requests.step(*parts)
    right = outputs(torch.cat(parts))["layers.1.mlp"]
    first, prompt, last = (cache["layers.1.mlp"].output for cache in requests.caches)
    assert torch.equal(torch.cat([first, prompt, last]), right)
    assert first.untyped_storage().nbytes() <= 2 * first.nbytes


def test_many_steps_with_requests_that_come_and_go() -> None:
    """Each request has its rows of each of its steps, in order, whoever was beside it."""
    requests = Requests(*[cache_all] * 4)
    waiting = requests.runs
    seen: dict[Any, list[Any]] = {run: [] for run in waiting}
    for step in range(29):
        requests.runs = [run for i, run in enumerate(waiting) if 3 * i <= step < 20 + 3 * i]
        parts = [rows(1 + (step + i) % 5, 10 * step + i) for i in range(len(requests.runs))]
        requests.step(*parts)
        right, start = outputs(torch.cat(parts)), 0
        for run, part in zip(requests.runs, parts, strict=True):
            seen[run].append((start, start + len(part), right))
            start += len(part)
    for run, cache in zip(waiting, requests.caches, strict=True):
        for path in ("layers.0", "layers.2.mlp", ""):
            got = cache[path].output
            assert len(got) == len(seen[run]) > 10
            for value, (start, stop, right) in zip(got, seen[run], strict=True):
                assert same(value, parts_of(right[path], start, stop))


def test_a_value_that_is_written_to_is_its_caches_alone() -> None:
    """Neither other requests nor the request's other caches and edits see it, nor the model."""
    requests = Requests(*[lambda r: (r.open("layers.1.mlp"), r.open("layers.1.mlp"))] * 2)
    run = requests.runs[0]
    edit = Run(lambda: requests.open("layers.1.mlp"))
    run.turn = 1
    requests.edits[run] = [edit]
    parts = [rows(3, 1), rows(3, 2)]
    requests.step(*parts)
    right = outputs(torch.cat(parts))["layers.1.mlp"]
    mine, *others = [cache["layers.1.mlp"].output for cache in requests.caches]
    mine.fill_(9.0)
    assert requests.caches[0]["layers.1.mlp"].output is mine
    assert len(others) == 4
    expected = [right[:3], right[:3], right[3:], right[3:]]
    own = sorted(others, key=lambda got: not torch.equal(got, right[:3]))
    assert all(map(torch.equal, own, expected))


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


def test_edits_of_one_request_are_in_its_rows_only() -> None:
    """What a block writes is recorded for its request, beside another's clean rows."""

    def editing(requests: Requests) -> None:
        requests.open("layers.1.mlp")
        requests.tree.root.layers[1].mlp.output[:] = 5.0

    requests = Requests(lambda r: r.open("layers.1.mlp"), editing, lambda r: r.open("layers.1.mlp"))
    parts = [rows(2, i) for i in range(3)]
    requests.step(*parts)
    right = outputs(torch.cat(parts))["layers.1.mlp"]
    first, edited, last = (cache["layers.1.mlp"].output for cache in requests.caches)
    assert torch.equal(first, right[:2])
    assert torch.equal(last, right[4:])
    assert torch.equal(edited, torch.full((2, 4), 5.0))


def test_a_module_that_one_request_skips_is_recorded_for_the_others() -> None:
    """Its rows inside are missing in its cache only, and all others' are right."""

    def skipping(requests: Requests) -> None:
        requests.open()
        requests.tree.root.layers[1].skip((rows(2, 8), rows(2, 9)))

    requests = Requests(lambda r: r.open(), skipping, lambda r: r.open())
    parts = [rows(2, i) for i in range(3)]
    for _ in range(2):  # the first step shows the order of modules
        requests.caches.clear()
        requests.runs = Requests(*[lambda _: None] * 3).runs
        requests.runs = [
            Run(lambda b=b: b(requests)) for b in (lambda r: r.open(), skipping, lambda r: r.open())
        ]
        requests.step(*parts)
    right = outputs(torch.cat(parts))
    first, skipped, last = requests.caches
    assert "layers.1.mlp" not in skipped
    assert torch.equal(skipped["layers.1"].output[0], rows(2, 8))
    assert torch.equal(first["layers.1.mlp"].output, right["layers.1.mlp"][:2])
    assert torch.equal(last["layers.1.mlp"].output, right["layers.1.mlp"][4:])
    assert list(first.keys()) == list(last.keys())


def test_each_form_is_its_own() -> None:
    """Requests of one step may have values converted in different ways."""
    forms: list[dict[str, Any]] = [{}, {"dtype": torch.bfloat16}, {"dtype": torch.float64}] * 2
    requests = Requests(*[lambda r, form=form: r.open("layers.1.mlp", **form) for form in forms])
    parts = [rows(2, i) for i in range(6)]
    requests.step(*parts)
    right = outputs(torch.cat(parts))["layers.1.mlp"]
    for i, (cache, form) in enumerate(zip(requests.caches, forms, strict=True)):
        got = cache["layers.1.mlp"].output
        assert torch.equal(got, right[2 * i : 2 * i + 2].to(form.get("dtype", torch.float32)))


class WithTable(torch.nn.Module):
    """Its module returns a tensor without rows, and things that are no tensors."""

    class Inner(torch.nn.Module):
        """A module with all sorts of leaves."""

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.arange(7.0))

        def forward(self, hidden: torch.Tensor, *more: Any) -> Any:
            """``[rows, 4]`` to a dictionary."""
            return {"hidden": hidden + 1, "rest": [self.table, 3, "text", None, object()], "": ()}

    def __init__(self) -> None:
        super().__init__()
        self.inner = self.Inner()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[rows, 4]`` to the same."""
        return self.inner(hidden, object(), [hidden, 2])["hidden"]  # type: ignore[no-any-return]


def test_values_of_any_structure() -> None:
    """Containers are each cache's own, and so are tensors that have no rows."""
    requests = Requests(
        *[lambda r: r.open("inner", sides=("input", "output"))] * 3, model=WithTable()
    )
    parts = [rows(2, i) for i in range(3)]
    requests.step(*parts)
    found = [cache["inner"] for cache in requests.caches]
    found[0].output["rest"][0].zero_()
    found[0].output["rest"].append(4)
    for each, part in zip(found[1:], parts[1:], strict=True):
        assert torch.equal(each.output["hidden"], part + 1)
        table, *rest = each.output["rest"]
        assert torch.equal(table, torch.arange(7.0))
        assert rest == [3, "text", None, None]
        assert each.output[""] == ()
        (hidden, nothing, (again, number)), keywords = each.inputs
        assert (nothing, number, keywords) == (None, 2, {})
        assert torch.equal(hidden, part)
        assert torch.equal(again, part)
    assert torch.equal(requests.model.inner.table, torch.arange(7.0))


def test_values_take_part_in_gradients_of_their_own() -> None:
    """A cached value may be edited with what requires gradients, as any tensor may."""
    requests = Requests(*[lambda r: r.open("layers.1.mlp")] * 2)
    requests.step(rows(2, 1), rows(2, 2))
    weight = torch.ones(4, requires_grad=True)
    first, second = (cache["layers.1.mlp"].output for cache in requests.caches)
    first += weight
    first.sum().backward()
    assert torch.equal(weight.grad, torch.full((4,), 2.0))
    assert not second.requires_grad


def test_a_copy_of_a_cache_is_independent() -> None:
    """It has what was recorded so far, and no more comes into it."""
    requests = Requests(lambda r: r.open("layers.1.mlp"))
    requests.step(rows(2, 1))
    copied = copy.deepcopy(requests.caches[0])
    copied["layers.1.mlp"].output.zero_()
    requests.step(rows(1, 2))
    assert copied["layers.1.mlp"].output.shape == (2, 4)
    assert [len(part) for part in requests.caches[0]["layers.1.mlp"].output] == [2, 1]
    assert requests.caches[0]["layers.1.mlp"].output[0].any()


class Returning(torch.nn.Module):
    """A module within another that returns what it is given to return."""

    def __init__(self, value: Callable[[torch.Tensor], Any]):
        super().__init__()
        self.inner = torch.nn.Module()
        self.inner.forward = value  # type: ignore[assignment]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[rows, 4]`` as they are."""
        self.inner(hidden)
        return hidden


@pytest.mark.parametrize(
    "value",
    [
        lambda hidden: (),
        lambda hidden: None,
        lambda hidden: (None, 3),
        lambda hidden: (hidden,),
        lambda hidden: (hidden, None, hidden[None]),
        lambda hidden: (hidden, (hidden, None)),
        lambda hidden: [hidden],
        lambda hidden: hidden[None].transpose(0, 1).transpose(0, 1),
        lambda hidden: hidden.new_zeros(len(hidden), 0),
        lambda hidden: torch.max(hidden, dim=1),
    ],
)
def test_each_structure_is_what_it_is_alone(value: Callable[[torch.Tensor], Any]) -> None:
    """Whatever a module returns, a request finds beside others what it finds when it runs alone."""
    parts = [rows(2, i) for i in range(3)]
    together = Requests(*[lambda r: r.open("inner")] * 3, model=Returning(value))
    together.step(*parts)
    for part, cache in zip(parts, together.caches, strict=True):
        alone = Requests(lambda r: r.open("inner"), model=Returning(value))
        alone.step(part)
        got, expected = cache["inner"].output, alone.caches[0]["inner"].output
        assert type(got) is type(expected) is type(value(part))
        (leaves, _), (right, _) = flatten(got), flatten(expected)
        assert len(leaves) == len(right)
        for a, b in zip(leaves, right, strict=True):
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


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
