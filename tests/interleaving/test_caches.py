"""Recording modules of a toy model, and reading the cache that comes of it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from midstream.interleaving.caches import Cache
from midstream.interleaving.copies import Rows
from midstream.interleaving.interleaver import Interleaver
from midstream.interleaving.node import Tree
from midstream.interleaving.recording import open_cache
from midstream.interleaving.run import Run, current_run
from tests.interleaving.toy import Toy, rows


class Requests:
    """Blocks whose requests run several steps together."""

    def __init__(
        self,
        *blocks: Callable[[Requests], Any],
        rename: Any = None,
        model: torch.nn.Module | None = None,
    ):
        self.model = (model or Toy()).requires_grad_(False)
        self.tree = Tree(self.model, rename)
        self.interleaver = Interleaver(self.tree.modules)
        self.runs: list[Any] = [Run(lambda block=block: block(self)) for block in blocks]  # type: ignore[misc]
        self.edits: dict[Run, list[Run]] = {}
        self.caches: list[Cache] = []

    def open(self, modules: Any = None, sides: Sequence[str] = ("output",), **more: Any) -> Cache:
        """What a block does to open a cache; it is kept here, as a block's name keeps it."""
        wanted = {"sides": frozenset(sides), **more}
        self.caches.append(open_cache(current_run("a cache"), self.tree, modules, wanted))
        return self.caches[-1]

    def step(self, *inputs: torch.Tensor) -> None:
        """One step of all requests; what is given to None belongs to a plain one."""
        self.try_step(*inputs)
        for run in self.runs:
            if run is not None and run.error is not None:
                raise run.error

    def try_step(self, *inputs: torch.Tensor) -> None:
        """One step; errors of blocks stay on their runs."""
        spans, start = {}, 0
        for run, part in zip(self.runs, inputs, strict=True):
            for beside in (run, *self.edits.get(run, ())) if run is not None else ():
                spans[beside] = Rows(start, start + len(part))
            start += len(part)
        with torch.inference_mode():
            self.interleaver.begin_step(list(spans))
            with self.interleaver.phase(spans, (start,)):
                self.model(torch.cat(inputs))
            self.interleaver.finish_step()
        for run in spans:
            run.visit += 1


def outputs(x: torch.Tensor) -> dict[str, Any]:
    """The toy's outputs, by hooks, each as it was when its module returned."""
    model, seen = Toy().requires_grad_(False), {}
    for path, module in model.named_modules():

        def hook(_: Any, args: Any, out: Any, path: str = path) -> None:
            seen[path] = (
                tuple(part.clone() for part in out) if isinstance(out, tuple) else out.clone()
            )

        module.register_forward_hook(hook)
    with torch.no_grad():
        model(x)
    return seen


def same(a: Any, b: Any) -> bool:
    return all(map(torch.equal, a, b)) if isinstance(b, tuple) else torch.equal(a, b)


def test_all_modules_are_recorded_as_they_returned() -> None:
    """Without a choice every called module is there, with what it returned at that moment (C70)."""
    x = rows(3, 1)
    requests = Requests(lambda r: r.open())
    requests.step(x)
    right, cache = outputs(x), requests.caches[0]
    assert sorted(cache.keys()) == sorted(right)
    assert all(same(cache[path].output, right[path]) for path in right)
    assert cache["model"].output is cache[""].output
    assert not same(cache["layers.0"].output, right["layers.1"])


def test_each_request_has_its_rows_and_its_modules() -> None:
    """Requests of one step record different modules, each its own rows of them."""
    parts = [rows(3, 1), rows(2, 2)]
    requests = Requests(
        lambda r: r.open(["layers.0"]), lambda r: r.open([r.tree.root.layers[1].mlp])
    )
    requests.step(*parts)
    first, second = requests.caches
    seen = outputs(torch.cat(parts))
    assert (first.keys(), second.keys()) == (["layers.0"], ["layers.1.mlp"])
    assert torch.equal(first["layers.0"].output[1], seen["layers.0"][1][:3])
    assert torch.equal(second["layers.1.mlp"].output, seen["layers.1.mlp"][3:])


def test_several_steps_are_a_list_and_one_is_the_value() -> None:
    """It goes on after the block has ended, with one item for each step."""
    requests = Requests(lambda r: r.open("layers.1.mlp"))
    requests.step(rows(3, 1))
    assert requests.caches[0]["layers.1.mlp"].output.shape == (3, 4)
    assert requests.runs[0].done
    requests.step(rows(1, 2))
    got = requests.caches[0]["layers.1.mlp"].output
    assert [len(part) for part in got] == [3, 1]
    assert torch.equal(got[1], outputs(rows(1, 2))["layers.1.mlp"])


def test_edits_are_in_what_is_recorded() -> None:
    """Inputs and outputs are recorded as all blocks have left them (C70)."""

    def block(requests: Requests) -> None:
        requests.open("layers.1", sides=("input", "output"))
        layer = requests.tree.root.layers[1]
        layer.inputs[1]["hidden"].zero_()
        layer.output[0].fill_(7.0)

    requests = Requests(block)
    requests.step(rows(3, 1))
    found = requests.caches[0]["layers.1"]
    assert not found.inputs[1]["hidden"].any()
    assert torch.equal(found.output[0], torch.full((3, 4), 7.0))
    assert torch.equal(found.input, torch.arange(3))


def test_skipped_modules_are_recorded_with_their_value_and_nothing_inside() -> None:
    """Also where the module has run for another request."""

    def block(requests: Requests) -> None:
        requests.open()
        requests.tree.root.layers[1].skip((rows(3, 8), rows(3, 9)))

    for beside in ([], [lambda r: None]):
        requests = Requests(block, *beside)
        for _ in range(2):  # the first step shows the order of modules
            requests.runs[0] = Run(lambda r=requests: block(r))
            requests.step(*[rows(3, 1), rows(2, 2)][: 1 + len(beside)])
        for cache in requests.caches:
            assert torch.equal(cache["layers.1"].output[0], rows(3, 8))
            assert "layers.1.mlp" not in cache
            assert "layers.2.mlp" in cache


def test_a_cache_is_opened_before_anything_is_read() -> None:
    """Afterwards it would have gaps, so it is refused with the line that has read (G41)."""

    def block(requests: Requests) -> None:
        requests.tree.root.layers[0].output
        requests.open()

    with pytest.raises(ValueError, match=r"before the block reads or writes .*\(line \d+ has\)"):
        Requests(block).step(rows(3, 1))


def test_a_list_of_modules_stands_for_those_in_it() -> None:
    """No model calls a list of modules, so its modules are recorded."""
    requests = Requests(lambda r: r.open(r.tree.root.layers))
    requests.step(rows(3, 1))
    assert requests.caches[0].keys() == ["layers.0", "layers.1", "layers.2"]
    assert requests.tree.root.layers[0] in requests.caches[0]


@pytest.mark.parametrize("bad", ["layers.7", "nothing", "layers.0.output"])
def test_unknown_modules_are_refused(bad: str) -> None:
    """A path that is no module of the model names it."""
    with pytest.raises(ValueError, match=f"no module '{bad}'"):
        Requests(lambda r: r.open(["layers.0", bad])).step(rows(3, 1))


def test_dtype_converts_floating_point_only() -> None:
    """Positions stay whole numbers."""
    requests = Requests(
        lambda r: r.open("layers.1", sides=("input", "output"), dtype=torch.bfloat16)
    )
    requests.step(rows(3, 1))
    found = requests.caches[0]["layers.1"]
    assert found.output[0].dtype == torch.bfloat16
    assert found.input.dtype == torch.int64


def test_ways_to_name_a_module() -> None:
    """Paths, attributes, indices, further names and the module itself lead to the same values.

    (C70, C71).
    """
    requests = Requests(lambda r: r.open(), rename={"layers": "blocks", "layers.1.mlp": "middle"})
    requests.step(rows(3, 1))
    cache = requests.caches[0]
    right = cache["layers.1.mlp"].output
    ways = [
        cache.layers[1].mlp,
        cache.layers[-2].mlp,
        cache["model.layers.1.mlp"],
        cache.model.layers[1].mlp,
        cache["blocks.1.mlp"],
        cache.blocks[1].mlp,
        cache.middle,
        cache[requests.tree.root.layers[1].mlp],
    ]
    assert all(way.output is right for way in ways)
    assert "layers.1.mlp" in cache
    assert "blocks.1.mlp" in cache
    assert len(cache) == len(cache.keys()) == len(list(cache)) == len(cache.items())


def test_what_was_not_recorded_is_an_error() -> None:
    """A path, an attribute and a side that are not there say what is (C71)."""
    requests = Requests(lambda r: r.open("layers.1.mlp"))
    requests.step(rows(3, 1))
    cache = requests.caches[0]
    with pytest.raises(KeyError, match=r"'layers\.0' was not recorded\. .*layers\.1\.mlp"):
        cache["layers.0"]
    with pytest.raises(KeyError, match="only modules inside it"):
        cache.layers[1].output
    with pytest.raises(KeyError, match="include_inputs=True"):
        cache.layers[1].mlp.inputs
    with pytest.raises(AttributeError, match="'head' was not recorded"):
        cache.head
    with pytest.raises(KeyError):
        cache.layers[0]
    assert "layers.0" not in cache


def test_a_dropped_cache_is_freed_and_records_no_more() -> None:
    """A block that lets go of its cache leaves the engine with nothing to do or to hold."""
    requests = Requests(lambda r: r.open())
    requests.step(rows(3, 1))
    assert requests.runs[0].records
    held = weakref.ref(requests.caches.pop())
    gc.collect()
    assert held() is None
    assert not requests.runs[0].records
    requests.interleaver.begin_step(requests.runs)
    assert not requests.interleaver.wants_modules
